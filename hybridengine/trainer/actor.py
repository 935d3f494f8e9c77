"""The policy under training: log-probs of packed rollouts, and optimizer steps over them.

Every loss term is divided by a count over the whole mini-batch on all ranks, so neither the split
into micro-batches nor the number of ranks changes the loss or the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from hybridengine.config import GRPOConfig
from hybridengine.kernels import (
    RolloutCorrection,
    policy_loss,
    rollout_correction,
    select_by_covariance,
)
from hybridengine.model import Optimizer, packed_log_probs
from hybridengine.trainer.batching import Batch, Micro, Mini, Replicas, means
from hybridengine.trainer.step_metrics import probs_diff

__all__ = ["Actor"]

_COV_KL_COEF = 0.1  # of kl_cov, verl's ppo_kl_coef
_CORRECTION_NAMES = {  # the kernel's -> verl's
    "is_weight_mean": "rollout_is_mean",
    "is_weight_max": "rollout_is_max",
    "is_clipped_fraction": "rollout_is_clipped_fraction",
    "rejected_fraction": "rollout_rs_masked_fraction",
}


class Actor:
    """Policy model, optimizer and, where a KL wants one, the frozen reference.

    reference: enters a context and gives the reference model: a copy of its own, or the policy with
    its adapters off.
    """

    def __init__(
        self,
        config: GRPOConfig,
        model: nn.Module,
        reference: Callable[[], AbstractContextManager[nn.Module]] | None,
        optimizer: Optimizer,
        replicas: Replicas,
    ) -> None:
        self.model, self.reference, self.optimizer = model, reference, optimizer
        self._config, self._replicas, self._session = config, replicas, replicas.session
        self._temperature = config.rollout.temperature

    def begin(self, batch: Batch, minis: list[Mini], needs_old: bool) -> dict[str, float]:
        """Reference and, if asked for, old log-probs into `batch`; metrics of what is known then.

        Old log-probs are asked for where they are not simply those of the only optimizer step.
        """
        if self.reference is not None:
            with self._session.phase("ref"), self.reference() as reference:
                batch.ref_log_probs = self._frozen_log_probs(reference, minis)
        if not needs_old and not self._wants_old(len(minis)):
            return {}
        with self._session.phase("old_log_prob"):
            batch.old_log_probs = self._frozen_log_probs(self.model, minis)
        return probs_diff(batch)

    def _wants_old(self, mini_batches: int) -> bool:
        algorithm, loss = self._config.algorithm, self._config.actor.policy_loss.loss_mode
        return (
            self._config.actor.ppo_epochs * mini_batches > 1
            or algorithm.use_kl_in_reward
            or bool(algorithm.rollout_correction.rejection)
            or loss in ("clip_cov", "kl_cov")
        )

    def correct(self, batch: Batch) -> dict[str, float]:
        """Importance weights and rejection by the known old log-probs, into `batch`."""
        if batch.old_log_probs is None:
            return {}
        found = self._correction(
            batch.old_log_probs,
            batch.rollout_log_probs,
            batch.cu_seqlens,
            batch.response_mask,
            batch.response_mask.sum(),
        )
        batch.is_weights, batch.response_mask = found.weights, found.response_mask
        return {name: float(value) for name, value in _named(found.metrics).items()}

    def update(self, batch: Batch, minis: list[Mini]) -> dict[str, float]:
        """Optimizer steps over all rollouts, by batch.advantages; metrics by dashboard names."""
        with self._session.phase("update_actor"):
            if self._config.actor.policy_loss.loss_mode in ("clip_cov", "kl_cov"):
                batch.selected = self._select(batch, minis)
            if batch.old_log_probs is None:
                return self._only_step(batch, minis)
            epochs = range(self._config.actor.ppo_epochs)
            return means([self._step(batch, mini) for _ in epochs for mini in minis])

    def _only_step(self, batch: Batch, minis: list[Mini]) -> dict[str, float]:
        """The old log-probs are found on the way: the policy is still the old one."""
        [mini] = minis
        found = torch.zeros_like(batch.rollout_log_probs)
        metrics = means([self._step(batch, mini, found)])
        batch.old_log_probs = self._replicas.joined(found)
        return metrics | probs_diff(batch)

    def _frozen_log_probs(self, model: nn.Module, minis: list[Mini]) -> Tensor:
        return self._replicas.per_token(
            minis, lambda packed: packed_log_probs(model, packed, self._temperature)[0]
        )

    def _select(self, batch: Batch, minis: list[Mini]) -> Tensor:
        """Tokens of each mini-batch by covariance; all ranks and micro-batches choose the same."""
        loss_mode = self._config.actor.policy_loss.loss_mode
        generator = torch.Generator(self._session.device)
        generator.manual_seed(self._config.seed + self._session.step)
        selected = torch.zeros_like(batch.response_mask)
        assert batch.old_log_probs is not None and batch.advantages is not None
        for mini in minis:
            selected[mini.places] = select_by_covariance(
                batch.old_log_probs[mini.places],
                batch.advantages[mini.places],
                loss_mode=loss_mode,
                response_mask=batch.response_mask[mini.places],
                generator=generator,
            )
        return selected

    def _correction(
        self, old: Tensor, rollout: Tensor, cu_seqlens: Tensor, mask: Tensor, num_tokens: Tensor
    ) -> RolloutCorrection:
        options = self._config.algorithm.rollout_correction
        lower, upper = options.is_bounds
        return rollout_correction(
            old,
            rollout,
            cu_seqlens=cu_seqlens,
            response_mask=mask,
            rollout_is=options.rollout_is,
            rollout_is_threshold=upper,
            rollout_is_lower=lower,
            rejection=options.rejection,
            global_num_tokens=num_tokens,
        )

    def _step(self, batch: Batch, mini: Mini, found: Tensor | None = None) -> dict[str, Tensor]:
        """found: [R], where this rank's old log-probs go if they are not known yet."""
        actor = self._config.actor
        low, high = self._config.clip_ratios
        num_tokens, num_seqs = mini.counts(batch)

        def loss_of(micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = packed_log_probs(self.model, micro.packed, self._temperature)
            mask, weights = micro.mask(batch), micro.of(batch.is_weights)
            old, corrected = micro.of(batch.old_log_probs), {}
            if found is not None:
                old, rollout = log_probs.detach(), batch.rollout_log_probs[micro.places]
                if micro.counted:
                    found[micro.places] = old
                correction = self._correction(old, rollout, micro.cu_seqlens, mask, num_tokens)
                weights, corrected = correction.weights, _named(correction.metrics)
            loss, metrics = policy_loss(
                log_probs,
                old,
                micro.of(batch.advantages),
                response_mask=mask,
                loss_mode=actor.policy_loss.loss_mode,
                clip_ratio_low=low,
                clip_ratio_high=high,
                clip_ratio_c=actor.clip_ratio_c,
                selected=micro.of(batch.selected),
                cov_kl_coef=_COV_KL_COEF,
                loss_agg_mode=actor.loss_agg_mode,
                loss_scale_factor=self._config.data.max_response_length,
                cu_seqlens=micro.cu_seqlens,
                global_num_tokens=num_tokens,
                global_num_seqs=num_seqs,
                ref_log_probs=micro.of(batch.ref_log_probs) if actor.use_kl_loss else None,
                kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
                kl_type=actor.kl_loss_type,
                entropy=entropy,
                entropy_coeff=actor.entropy_coeff,
                rollout_is_weights=weights,
            )
            return loss, corrected | {f"actor/{name}": value for name, value in metrics.items()}

        reduced = self._replicas.update("actor", mini, self.optimizer, actor.grad_clip, loss_of)
        if actor.use_kl_loss:
            reduced["actor/kl_coef"] = torch.tensor(actor.kl_loss_coef)
        return reduced


def _named(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"rollout_corr/{_CORRECTION_NAMES.get(n, n)}": v for n, v in metrics.items()}
