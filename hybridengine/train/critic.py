"""The critic's model, and what the training loop calls of a critic wherever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from torch import Tensor

from hybridengine.kernels import value_loss
from hybridengine.model import PackedBatch, free_gathered, on_device, packed_values
from hybridengine.run.config import RLConfig
from hybridengine.train.batch import DataParallel, RolloutBatch
from hybridengine.train.build import build_optimizer, load_model
from hybridengine.train.checkpoint.tensors import RemotePart
from hybridengine.train.metrics import explained_variance
from hybridengine.train.models import Learner
from hybridengine.train.rollouts import Rollouts


class StepCritic(ABC):
    """The critic as the ranks of the policy call it. All methods are collective over them.

    `Critic` is on these ranks, an `ExternalCritic` on others.
    """

    def begin(self, step: int, rollouts: Rollouts, batch: RolloutBatch) -> None:  # noqa: B027
        """Begin with the rollouts that `step` is trained on; `batch` is what these ranks have."""

    @abstractmethod
    def values(self, batch: RolloutBatch) -> Tensor:
        """Return the value of every response token, [R]."""

    @abstractmethod
    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Run ppo_epochs optimizer steps per mini-batch towards batch.returns; return metrics."""

    def finish(self, seconds: float) -> dict[str, float]:
        """Wait until the update is done; return further metrics. seconds: of the step up to now."""
        return {}

    def stop_signal(self) -> int:
        """Return the number of a stop signal that a rank of the critic has received; 0: none."""
        return 0

    def summary(self) -> dict[str, Any]:
        """Return entries of summary.json."""
        return {}

    def close(self, how: Literal["finished", "stopped"]) -> None:  # noqa: B027
        """Release other ranks; how: the run has ended."""


class ExternalCritic(StepCritic, RemotePart):
    """A critic on ranks that a mode has set apart; these write and read its tensors.

    optimizer: what they have reported of it; its state is part of a checkpoint.
    """

    optimizer: Any

    @abstractmethod
    def wait_until_built(self) -> None:
        """Wait until its ranks have loaded their model."""


class Critic(Learner, StepCritic):
    """The critic of PPO: values of packed rollouts, and clipped regression to their returns.

    A value belongs to the state before a token: it is read where the policy's logits of it are.
    """

    name = "critic"

    def values(self, batch: RolloutBatch) -> Tensor:
        with self._dp.session.phase("values"), on_device(self.model):
            values = batch.per_token(lambda micro_batch: packed_values(self.model, micro_batch))
            free_gathered(self.model)
            return values

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        assert batch.values is not None and batch.returns is not None
        with self._dp.session.phase("update_critic"), on_device(self.model):
            metrics = self._epochs(batch)
        metrics["critic/vf_explained_var"] = explained_variance(batch, self._dp.group)
        return metrics

    def micro_batch_loss(
        self, batch: RolloutBatch, micro_batch: PackedBatch, num_tokens: Tensor, num_seqs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        values = packed_values(self.model, micro_batch)
        old_values, returns = (micro_batch.take(x) for x in (batch.values, batch.returns))
        assert old_values is not None and returns is not None
        loss, metrics = value_loss(
            values,
            old_values,
            returns,
            response_mask=batch.mask_of(micro_batch),
            cliprange_value=self._config.critic.cliprange_value,
            loss_agg_mode=self._config.actor.loss_agg_mode,
            loss_scale_factor=self._config.data.max_response_length,
            cu_seqlens=micro_batch.cu_rows,
            global_num_tokens=num_tokens,
            global_num_seqs=num_seqs,
        )
        return loss, {f"critic/{name}": value for name, value in metrics.items()}, values


def build_critic(config: RLConfig, dp: DataParallel, steps: int) -> Critic:
    """Build the value model with an FSDP2 group of its own over the ranks of `dp`."""
    path = config.critic.model.path or config.model.path
    model = load_model(config, dp.session, path, value_head=True)
    optimizer = build_optimizer(config, model, config.actor.optim, config.critic.optim, steps)
    return Critic(config, model, optimizer, dp)
