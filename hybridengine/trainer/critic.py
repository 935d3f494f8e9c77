"""The critic of PPO: values of packed rollouts, and clipped regression to their returns.

A value belongs to the state before a token: it is read where the policy's logits of that token are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridengine.config import GRPOConfig
from hybridengine.kernels import value_loss
from hybridengine.model import Optimizer, on_device, packed_values
from hybridengine.trainer.batching import Batch, Mini, Replicas

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
        metrics = {name: float(sum(s[name] for s in steps)) / len(steps) for name in steps[0]}
        residual = (batch.returns - batch.values).var(correction=0)
        spread = batch.returns.var(correction=0).clamp(min=1e-8)
        metrics["critic/vf_explained_var"] = float(1 - residual / spread)
        return metrics

    def _step(self, batch: Batch, mini: Mini) -> dict[str, Tensor]:
        num_tokens, num_seqs = mini.counts(batch)
        sums = self._replicas.sums()
        for micro in mini.micros:
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
            # FSDP2 averages over the ranks; the loss is already a global mean.
            (loss * self._session.world_size * self.optimizer.loss_scale).backward()
            sums.add({f"critic/{name}": value for name, value in metrics.items()})
        reduced = sums.reduced()
        reduced["critic/grad_norm"] = self.optimizer.step(self._config.actor.grad_clip)
        reduced["critic/lr"] = torch.tensor(self.optimizer.last_lr)
        return reduced
