"""A trained model of an RL run: optimizer steps over the micro-batches of a mini-batch.

Every loss term is divided by a count over the whole mini-batch on all ranks, so neither the split
into micro-batches nor the number of ranks changes the loss or the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybridengine.model import Optimizer, PackedBatch, RouterBalance
from hybridengine.run.config import RLConfig
from hybridengine.train.batch import DataParallel, RolloutBatch, mean_metrics


class Learner(ABC):
    """A model with an FSDP2 group and an optimizer of its own.

    name: prefix of its metrics.
    between_steps: called between the optimizer steps of a batch.
    """

    name: str
    between_steps: Callable[[], object] | None = None

    def __init__(
        self, config: RLConfig, model: nn.Module, optimizer: Optimizer, dp: DataParallel
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._config, self._dp = config, dp

    def _step(self, batch: RolloutBatch, number: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run the optimizer step of a mini-batch; return metrics and each micro-batch's outputs."""
        parts, outputs = list[dict[str, Tensor]](), list[Tensor]()
        counts = self._dp.num_trained(batch, number)
        if (balance := RouterBalance.of(self.model)) is not None:
            balance.begin_step(batch.mini_batches[number], self._dp.grad_scale(self.optimizer))
        for micro_batch in batch.mini_batches[number]:
            loss, metrics, output = self.micro_batch_loss(batch, micro_batch, *counts)
            self._dp.backward(loss, self.optimizer, output)
            parts.append(metrics)
            outputs.append(output.detach())
        metrics = self._dp.reduce_metrics(parts)
        metrics[f"{self.name}/grad_norm"] = self.optimizer.step(self._config.actor.grad_clip)
        metrics[f"{self.name}/lr"] = torch.tensor(self.optimizer.last_lr)
        if balance is not None:
            metrics |= balance.end_step(updated=not self.optimizer.skipped_in_a_row)
        return metrics, outputs

    def _epochs(self, batch: RolloutBatch) -> dict[str, float]:
        """Run ppo_epochs optimizer steps per mini-batch; return their mean metrics."""
        numbers = [*range(len(batch.mini_batches))] * self._config.actor.ppo_epochs
        parts = list[dict[str, Tensor]]()
        for number in numbers:
            if parts and self.between_steps is not None:
                self.between_steps()
            parts.append(self._step(batch, number)[0])
        return mean_metrics(parts)

    @abstractmethod
    def micro_batch_loss(
        self, batch: RolloutBatch, micro_batch: PackedBatch, num_tokens: Tensor, num_seqs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Run forward and loss of one micro-batch: (loss, metrics, log-probs or values [r]).

        num_tokens, num_seqs: of the mini-batch on all ranks, the denominators of loss and metrics.
        """
