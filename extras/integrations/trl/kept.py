"""Log-probs over the vocabulary entries that a colocated vLLM engine kept, in GRPO and RLOO of TRL.

With top-p, top-k or min-p a token is drawn from the entries that are kept, and the engine's
log-probs are over these; TRL's are over the full vocabulary. Here the engine records the entries,
every sampled token id carries its own through TRL's lists (`SampledToken`), and the batch then has
the column `kept_ids`. Our fused head reads it: in old and reference log-probs, and in the loss.
Without truncation nothing is recorded.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain, islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridengine.engine.response import pack_kept
from hybridengine.kernels import sparse_linear_token_log_probs, token_log_probs
from hybridengine.model import KeptIds
from hybridengine.run.config.rl import truncates
from hybridengine.run.errors import ModelError, RolloutError

COLUMN = "kept_ids"  # of TRL's batches: a KeptIds for each completion
WARNED = "_hybridengine_kept_warned"  # attribute of a trainer
_OFF = 'or leave out the group "kept" of hybridengine.integrations.trl.patch'

logger = logging.getLogger(__name__)


class SampledToken(int):
    """A token id with the entries that it was sampled from; lists of ids carry it along.

    kept: ascending ids; none where nothing was cut.
    """

    kept: array[int]


class Replay:
    """The entries of one batch, which the fused heads take while TRL goes through its rows.

    kept: the entries of each completion; None where nothing is replayed.
    """

    def __init__(self, kept: Sequence[KeptIds] | None = None) -> None:
        self.kept, self.is_used, self._next = kept, False, 0

    def take(self, labels: Tensor) -> KeptIds | None:
        """Return the entries of the labels of the next rows [b, L], in their order.

        Every pass over the batch takes its rows in order. Completions begin in one column, which is
        the first with a label.
        """
        if self.kept is None:
            return None
        start, self.is_used = self._next, True
        kept = self.kept[start : start + len(labels)]
        self._next = (start + len(labels)) % len(self.kept)
        row, column = (labels != -100).cpu().nonzero(as_tuple=True)
        sizes = torch.tensor([x.cu_kept.numel() - 1 for x in kept])
        position = column - column.min() if len(column) else column
        if len(kept) != len(labels) or (position >= sizes[row]).any():
            raise ModelError(
                f"the rows of a batch with the column {COLUMN} have other completions than those "
                "that were sampled; keep the order and the length of the column's rows, " + _OFF
            )
        counts = torch.cat([x.cu_kept.diff() for x in kept])
        joined = KeptIds.from_counts(torch.cat([x.ids for x in kept]), counts)
        return joined.take(sizes.cumsum(0)[row] - sizes[row] + position).to(labels.device)


REPLAY: ContextVar[Replay | None] = ContextVar("REPLAY", default=None)


def kept_scores(
    rows: Tensor, weight: Tensor | None, ids: Tensor, temperature: float, kept: KeptIds, **head: Any
) -> tuple[Tensor, ...]:
    """Return log-probs and entropy [N] over the kept entries of each row.

    rows: [N, H] with weight [V, H] and its bias, logit_scale and softcap, or logits [N, V].
    """
    if weight is None:
        mask = kept.vocab_mask(rows.shape[1])
        log_probs, entropy = token_log_probs(rows, ids, temperature, vocab_mask=mask)
        return log_probs, entropy
    entries = kept.entries(weight.shape[0])
    return sparse_linear_token_log_probs(rows, weight, ids, *entries, temperature, **head)


def generate(self: Any, original: Callable[[], tuple]) -> tuple:
    """Run TRL's `VLLMGeneration.generate`; tokens that were sampled for a batch have their entries.

    original: calls TRL's function with the arguments that it was given.
    """
    if self.mode != "colocate" or REPLAY.get() is None:
        return original()
    theirs = self.llm.generate

    def recording_generate(prompts: Any, sampling_params: Any, **options: Any) -> Any:
        if not _truncates(sampling_params):
            return theirs(prompts, sampling_params=sampling_params, **options)
        from hybridengine.engine.vllm import sampling

        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        if sampling.FusedSampler.of(runner) is None:
            sampling.fuse_sampler(runner)
        # vLLM's prefix cache has the pickled ids as keys; those of earlier turns are SampledTokens.
        prompts = [p | {"prompt_token_ids": [*map(int, p["prompt_token_ids"])]} for p in prompts]
        with sampling.record_kept_ids(self.llm, runner):
            outputs = theirs(prompts, sampling_params=sampling_params, **options)
        for sample in chain.from_iterable(output.outputs for output in outputs):
            sample.token_ids = sampled_tokens(sample)
        return outputs

    with patch.object(self.llm, "generate", recording_generate):
        return original()


def score_completions(original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run TRL's `_generate_and_score_completions`; its batch gets the column of entries."""
    replay = Replay()
    token = REPLAY.set(replay)
    try:
        batch = original()
    finally:
        REPLAY.reset(token)
    return batch if replay.kept is None else batch | {COLUMN: replay.kept}


def note_completions(
    trainer: Any, token_ids: Sequence[Sequence[int]], tool_mask: Sequence[Sequence[int]] | None
) -> None:
    """Replay the entries of completions from now on, until their batch is complete.

    tool_mask: 0 for tokens that were not sampled.
    """
    replay = REPLAY.get()
    if replay is None or not trainer.use_vllm:
        return
    if not any(isinstance(token, SampledToken) for token in chain.from_iterable(token_ids)):
        if _truncates(trainer.vllm_generation) and not getattr(trainer, WARNED, False):
            setattr(trainer, WARNED, True)
            logger.warning(
                "log-probs are over the full vocabulary, though sampling was truncated: the "
                "completions come without the entries that sampling kept. They have them with "
                'vllm_mode="colocate", where a rollout_func returns the token ids of '
                "trainer.vllm_generation.generate as they are"
            )
        return
    masks = tool_mask or [[1] * len(ids) for ids in token_ids]
    replay.kept = [_rows(ids, mask) for ids, mask in zip(token_ids, masks, strict=True)]


def compute_loss(inputs: Mapping[str, Any], original: Callable[[], Tensor]) -> Tensor:
    """Run TRL's `compute_loss` over the entries that the batch has."""
    if COLUMN not in inputs:
        return original()
    replay = Replay(inputs[COLUMN])
    token = REPLAY.set(replay)
    try:
        loss = original()
    finally:
        REPLAY.reset(token)
    if not replay.is_used:
        raise ModelError(
            "top_p, top_k or min_p truncate, but the model's head is not ours, so that log-probs "
            'are not over the kept entries: patch the group "head" before the trainer is made, '
            + _OFF
        )
    return loss


def _truncates(sampling: Any) -> bool:
    """Return whether tokens are drawn from a part of the vocabulary.

    sampling: vLLM's `SamplingParams`, or TRL's `VLLMGeneration`.
    """
    return truncates(sampling) and sampling.temperature > 0


def sampled_tokens(sample: Any) -> list[SampledToken]:
    """Return the tokens of a vLLM `CompletionOutput` with their entries."""
    masks = sample.sampling_mask.token_ids if sample.sampling_mask else []
    advice = f"sample without top_p, top_k and min_p, {_OFF}"
    num_kept, kept_ids = pack_kept(sample.token_ids, masks, sys.maxsize, advice).values()
    tokens, entries = list(map(SampledToken, sample.token_ids)), iter(kept_ids)
    for token, count in zip(tokens, num_kept, strict=True):
        token.kept = array("i", islice(entries, count))
    return tokens


def _rows(token_ids: Sequence[int], tool_mask: Sequence[int]) -> KeptIds:
    """Return the entries of a completion; a token that was not sampled has itself alone."""
    kept = []
    for position, (token, is_sampled) in enumerate(zip(token_ids, tool_mask, strict=True)):
        if isinstance(token, SampledToken):
            kept.append(token.kept)
        elif is_sampled:
            raise RolloutError(
                f"token {position} of a completion of {len(token_ids)} has no vocabulary entries "
                "that sampling kept, and others have: it is not one that trainer.vllm_generation."
                f"generate returned. Set env_mask to 0 for it, {_OFF}"
            )
        else:
            kept.append(array("i", [token]))
    ids = torch.tensor(array("i", chain.from_iterable(kept)), dtype=torch.int32)
    return KeptIds.from_counts(ids, torch.tensor([len(entries) for entries in kept]))
