"""On-policy distillation (arXiv 2306.13649, algorithm 1 with lambda 1).

The loss of a token of the student's own responses is the divergence of its distribution from the
teacher's. No gradient flows through the sampling; advantages are not used, rewards are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from hybridengine.model import Optimizer, PackedBatch, free_gathered, packed_distillation_loss
from hybridengine.moe.batch_routes import pop_metrics
from hybridengine.run.config import RLConfig
from hybridengine.train.batch import DataParallel, RolloutBatch
from hybridengine.train.models import Actor


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

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Run ppo_epochs optimizer steps per mini-batch towards the teacher; return metrics."""
        with self._dp.session.phase("update_actor"), self._teacher() as self._frozen:
            metrics = self._epochs(batch) | pop_metrics(self.model)
            free_gathered(self._frozen)
            return metrics

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
