"""On-policy distillation from a teacher (arXiv 2306.13649, algorithm 1 with lambda 1).

The loss of a token of the student's own responses is the divergence of its distribution from the
teacher's. No gradient flows through the sampling; advantages are not used, rewards are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hybridengine.kernels import linear_distillation_loss
from hybridengine.model import (
    Optimizer,
    PackedBatch,
    accepts_head_function,
    check_sequence_parallel,
    free_gathered,
    on_device,
)
from hybridengine.model.extensions import pop_metrics
from hybridengine.model.forward import gather_rows, packed_head
from hybridengine.model.packing_check import check_packing
from hybridengine.model.rotary import check_rotary
from hybridengine.model.validation import check_weights, config_of
from hybridengine.run.config import ConfigError, RLConfig
from hybridengine.run.errors import ModelError
from hybridengine.train.batch import DataParallel, RolloutBatch
from hybridengine.train.build import load_model, load_tokenizer
from hybridengine.train.models import Actor
from hybridengine.train.preflight import check_length

__all__ = ["Student", "build_actor", "check", "packed_distillation_loss"]


def check(config: RLConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check the teacher's files, and that it reads the same tokens as the student.

    tokenizer: the student's, None where there is none.
    """
    path, trust = config.algorithm.distill.teacher_path, config.model.trust_remote_code
    assert path is not None
    teacher = config_of(config.model.at(path))
    check_weights(path, teacher, trust)
    check_packing(path, teacher, trust)
    check_sequence_parallel(teacher, config.actor.ulysses_sequence_parallel_size)
    check_rotary(teacher, config.max_model_len, trust)
    vocab = load_tokenizer(config, path).get_vocab()
    own = vocab if tokenizer is None else tokenizer.get_vocab()
    if vocab != own:
        differing = sorted(token for token, _ in vocab.items() ^ own.items())
        raise ConfigError(
            f"algorithm.distill.teacher_path {path!r} has another vocabulary than model.path "
            f"{config.model.path!r}: {len(vocab)} and {len(own)} tokens, {differing[0]!r} differs; "
            "the divergence compares distributions over the same tokens, so give a teacher with "
            "the student's tokenizer"
        )
    check_length(
        teacher,
        config.max_sequence_length,
        "for the teacher, the longest sequence",
        "data.max_prompt_length or data.max_response_length",
    )


def build_actor(config: RLConfig, model: Any, optimizer: Optimizer, dp: DataParallel) -> Student:
    """Build the student of a loaded policy `model`; load its teacher.

    Raises ModelError where a model computes its logits with more than its head's product.
    """
    path = config.algorithm.distill.teacher_path
    assert path is not None
    teacher = load_model(config, dp.session, path).requires_grad_(False)
    for one, name in ((model, config.model.path), (teacher, path)):
        if not accepts_head_function(one):
            raise ModelError(
                f"model {name!r} does more to its logits than scale or soft-cap them, and "
                "distillation computes them from hidden states; it needs another model"
            )
    return Student(config, model, partial(on_device, teacher), optimizer, dp)


class Student(Actor):
    """A policy that learns the distribution of a frozen teacher.

    teacher: enters a context and returns the teacher.
    """

    def __init__(
        self,
        config: RLConfig,
        model: nn.Module,
        teacher: Callable[[], AbstractContextManager[nn.Module]],
        optimizer: Optimizer,
        dp: DataParallel,
    ) -> None:
        super().__init__(config, model, None, optimizer, dp)
        self._teacher = teacher

    def update(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """Run ppo_epochs optimizer steps per mini-batch towards the teacher; return metrics."""
        with self._dp.session.phase("update_actor"), self._teacher() as self._frozen:
            metrics, _ = self._epochs(batch)
            free_gathered(self._frozen)
            return batch, metrics | pop_metrics(self.model)

    def micro_batch_loss(
        self, batch: RolloutBatch, micro_batch: PackedBatch, num_tokens: Tensor, num_seqs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        distill = self._config.algorithm.distill
        loss, divergences = packed_distillation_loss(
            self.model,
            self._frozen,
            micro_batch,
            response_mask=batch.mask_of(micro_batch),
            num_items=num_tokens,
            beta=distill.beta,
            temperature=distill.temperature,
            grad_scale=self._dp.grad_scale(self.optimizer),
        )
        return loss, {"actor/distill_loss": divergences.sum() / num_tokens}, divergences


def packed_distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    batch: PackedBatch,
    *,
    response_mask: Tensor,
    num_items: Tensor,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Return (loss of this rank's rows, divergences [R] of the full batch).

    The student runs inside the module call of the teacher, so that the weights of both heads are
    gathered for `linear_distillation_loss`; no logits or hidden states are copied. Where one of the
    vocabularies is padded to more entries than the other, both are those of the smaller one.

    response_mask: bool [R], of the full batch.
    arguments: of `linear_distillation_loss`.
    """
    mask = response_mask
    if batch.shard is not None:
        mask = mask[batch.shard.rows.to(mask.device)]
    results: tuple[Tensor, Tensor] | None = None

    def teacher_head(hidden: Tensor, weight: Tensor, **transform: Any) -> tuple[Tensor]:
        nonlocal results

        def student_head(
            rows: Tensor, own_weight: Tensor, **own_transform: Any
        ) -> tuple[Tensor, Tensor]:
            vocab = min(weight.shape[0], own_weight.shape[0])
            first = lambda x: x if x is None or len(x) == vocab else x[:vocab]  # noqa: E731
            options: dict[str, Any] = {}
            for model, own in (("student", own_transform), ("teacher", transform)):
                values = own | {"bias": first(own["bias"])}
                options |= {f"{model}_{name}": value for name, value in values.items()}
            return linear_distillation_loss(
                rows,
                first(own_weight),
                hidden,
                first(weight),
                response_mask=mask,
                num_items_in_batch=num_items,
                **options,
                **arguments,
            )

        with torch.enable_grad():
            results = packed_head(student, batch, student_head)
        return (hidden.new_zeros(()),)  # not the loss: FSDP2 would prepare the teacher's backward

    with torch.no_grad():
        packed_head(teacher, batch, teacher_head)
    assert results is not None
    loss, divergences = results
    if batch.shard is not None:
        (divergences,) = gather_rows(divergences, shard=batch.shard)
    return loss, divergences
