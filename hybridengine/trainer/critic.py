"""The critic of PPO: values of packed rollouts, and clipped regression to their returns.

A value belongs to the state before a token: it is read where the policy's logits of that token are.
"""

from __future__ import annotations

from torch import Tensor, nn

from hybridengine.config import GRPOConfig
from hybridengine.kernels import value_loss
from hybridengine.model import Optimizer, on_device, packed_values
from hybridengine.trainer.batching import Batch, Micro, Mini, Replicas, means

__all__ = ["Critic"]


class Critic:
    """A value model with an FSDP2 group and an optimizer of its own."""

    def __init__(
        self, config: GRPOConfig, model: nn.Module, optimizer: Optimizer, replicas: Replicas
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._config, self._replicas, self._session = config, replicas, replicas.session

    def begin(self, batch: Batch, minis: list[Mini]) -> None:
        """Values of every response token into `batch`."""
        with self._session.phase("values"), on_device(self.model):
            batch.values = self._replicas.per_token(
                minis, lambda packed: packed_values(self.model, packed)
            )

    def update(self, batch: Batch, minis: list[Mini]) -> dict[str, float]:
        """Optimizer steps towards batch.returns; metrics by dashboard names."""
        assert batch.values is not None and batch.returns is not None
        with self._session.phase("update_critic"), on_device(self.model):
            epochs = self._config.actor.ppo_epochs
            steps = [self._step(batch, mini) for _ in range(epochs) for mini in minis]
        metrics = means(steps)
        residual = (batch.returns - batch.values).var(correction=0)
        spread = batch.returns.var(correction=0).clamp(min=1e-8)
        metrics["critic/vf_explained_var"] = float(1 - residual / spread)
        return metrics

    def _step(self, batch: Batch, mini: Mini) -> dict[str, Tensor]:
        num_tokens, num_seqs = mini.counts(batch)

        def loss_of(micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = value_loss(
                packed_values(self.model, micro.packed),
                micro.of(batch.values),
                micro.of(batch.returns),
                response_mask=micro.mask(batch),
                cliprange_value=self._config.critic.cliprange_value,
                loss_agg_mode=self._config.actor.loss_agg_mode,
                loss_scale_factor=self._config.data.max_response_length,
                cu_seqlens=micro.cu_seqlens,
                global_num_tokens=num_tokens,
                global_num_seqs=num_seqs,
            )
            return loss, {f"critic/{name}": value for name, value in metrics.items()}

        clip = self._config.actor.grad_clip
        return self._replicas.update("critic", mini, self.optimizer, clip, loss_of)
