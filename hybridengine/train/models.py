"""The trained models of an RL run, policy and critic: optimizer steps, and their losses.

Every loss term is divided by a count over the whole mini-batch on all ranks, so neither the split
into micro-batches nor the number of ranks changes the loss or the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridengine.kernels import RolloutCorrection, policy_loss, select_by_covariance, value_loss
from hybridengine.model import (
    Optimizer,
    PackedBatch,
    accepts_head_function,
    free_gathered,
    on_device,
    packed_log_probs,
    packed_policy_loss,
    packed_values,
)
from hybridengine.model.extensions import hooks_of, pop_metrics, recorded_parts
from hybridengine.model.packed import Part
from hybridengine.run.config import ConfigError, RLConfig
from hybridengine.train.advantages import LossOptions, correct, correct_batch
from hybridengine.train.algorithms import KLController
from hybridengine.train.batch import DataParallel, RolloutBatch, mean_metrics
from hybridengine.train.checkpoint.tensors import RemotePart
from hybridengine.train.metrics import explained_variance
from hybridengine.train.rollout_files import TokenRecord
from hybridengine.train.rollouts import Rollouts

_COV_MODES = ("clip_cov", "kl_cov")  # choose tokens by the old log-probs


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

    def take_step(self, batch: RolloutBatch, number: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run the optimizer step of a mini-batch; return metrics and each micro-batch's outputs."""
        parts, outputs = list[dict[str, Tensor]](), list[Tensor]()
        counts, max_norm = self._dp.num_trained(batch, number), self._config.actor.grad_clip

        def loss_of(micro_batch: PackedBatch) -> tuple[Tensor, Tensor]:
            loss, metrics, output = self.micro_batch_loss(batch, micro_batch, *counts)
            parts.append(metrics)
            outputs.append(output.detach())
            return loss, output

        norm, of_hooks = self._dp.optimizer_step(
            self.model, self.optimizer, batch.mini_batches[number], loss_of, max_norm
        )
        own = {"grad_norm": norm, "lr": torch.tensor(self.optimizer.last_lr)}
        metrics = self._dp.reduce_metrics(parts)
        return metrics | {f"{self.name}/{n}": x for n, x in own.items()} | of_hooks, outputs

    def _epochs(self, batch: RolloutBatch) -> tuple[dict[str, float], list[Tensor]]:
        """Run ppo_epochs optimizer steps per mini-batch; return their mean metrics.

        Returns the outputs of the last one, too.
        """
        numbers = [*range(len(batch.mini_batches))] * self._config.actor.ppo_epochs
        parts = list[dict[str, Tensor]]()
        for number in numbers:
            if parts and self.between_steps is not None:
                self.between_steps()
            metrics, outputs = self.take_step(batch, number)
            parts.append(metrics)
        return mean_metrics(parts), outputs

    @abstractmethod
    def micro_batch_loss(
        self, batch: RolloutBatch, micro_batch: PackedBatch, num_tokens: Tensor, num_seqs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Run forward and loss of one micro-batch: (loss, metrics, log-probs or values [r]).

        num_tokens, num_seqs: of the mini-batch on all ranks, the denominators of loss and metrics.
        """


def needs_old_log_probs(config: RLConfig, num_mini_batches: int) -> bool:
    """Return whether the update needs old log-probs from a forward pass of their own.

    It does not where a batch is used for one optimizer step and nothing before that step reads
    them: the policy is then still the one of the old log-probs (`Actor.update`). Distillation
    reads none.
    """
    if config.distills:
        return False
    return (
        config.actor.ppo_epochs * num_mini_batches > 1
        or config.algorithm.use_kl_in_reward
        or bool(config.algorithm.rollout_correction.rejection)
        or config.algorithm.rollout_correction.rollout_is_batch_normalize
        or config.actor.policy_loss.loss_mode in _COV_MODES
    )


class Actor(Learner):
    """Policy model, optimizer and, where a KL needs one, the frozen reference.

    reference: enters a context and returns the reference model: a copy of its own, or the policy
      with its adapters disabled.
    total_steps: of the run, for the schedule of the KL coefficient.

    Attributes:
        record: takes what updates compute per token; None: nobody reads it.
    """

    name = "actor"
    record: TokenRecord | None = None

    def __init__(
        self,
        config: RLConfig,
        model: nn.Module,
        reference: Callable[[], AbstractContextManager[nn.Module]] | None,
        optimizer: Optimizer,
        dp: DataParallel,
        total_steps: int = 1,
    ) -> None:
        super().__init__(config, model, optimizer, dp)
        self._reference, self._temperature = reference, config.rollout.temperature
        self._recorded: Mapping[str, Sequence[Part]] = {}  # by the newest `old_log_probs`
        self._correction = config.algorithm.rollout_correction
        self._loss_options = LossOptions.of(config)
        self.kl: KLController | None = None
        if (actor := config.actor).use_kl_loss:
            self.kl = KLController(actor.kl_loss_ctrl, actor.kl_loss_coef, total_steps)
        if config.algorithm.score_centering.enabled and not accepts_head_function(model):
            raise ConfigError(
                "algorithm.score_centering.enabled is true, but the policy does more to its logits "
                "than scale or soft-cap them; set it to false"
            )

    @property
    def _kl_coef(self) -> float:
        return self.kl.coef if self.kl is not None else 0.0

    def ref_log_probs(self, batch: RolloutBatch) -> Tensor | None:
        """Compute the reference's log-probs, [R]; None without a reference."""
        if self._reference is None:
            return None
        with self._dp.session.phase("ref"), self._reference() as reference:
            return self._log_probs(reference, batch)

    def old_log_probs(self, batch: RolloutBatch) -> Tensor:
        """Compute the policy's log-probs before the update, [R], and record what it replays."""
        with self._dp.session.phase("old_log_prob"), recorded_parts(self.model) as self._recorded:
            return self._log_probs(self.model, batch)

    def _log_probs(self, model: nn.Module, batch: RolloutBatch) -> Tensor:
        log_probs = batch.per_token(lambda micro_batch: self._forward(model, micro_batch)[0])
        free_gathered(model)
        return log_probs

    def _forward(self, model: nn.Module, micro_batch: PackedBatch) -> tuple[Tensor, ...]:
        """Compute log-probs and entropy [r], over what sampling kept where that is replayed."""
        return packed_log_probs(model, micro_batch, self._temperature)

    def rollout_correction(self, batch: RolloutBatch) -> RolloutCorrection:
        """Return (importance weights, response mask after rejection, metrics by verl's names).

        Collective.
        """
        return correct_batch(batch, self._dp, self._correction)

    def take_step(self, batch: RolloutBatch, number: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Run one optimizer step; with bypass_mode, normalised weights need a forward before it."""
        options = self._correction
        if not (options.bypass_mode and options.rollout_is_batch_normalize):
            return super().take_step(batch, number)
        own = torch.zeros_like(batch.rollout_log_probs)
        with torch.no_grad():
            for micro_batch in batch.mini_batches[number]:
                own[micro_batch.row_index] = self._forward(self.model, micro_batch)[0]
        mask = batch.response_mask & batch.in_mini_batch(number)
        correction = self.rollout_correction(replace(batch, old_log_probs=own, response_mask=mask))
        metrics, outputs = super().take_step(replace(batch, is_weights=correction.weights), number)
        return correction.metrics | metrics, outputs

    def update(self, batch: RolloutBatch) -> tuple[RolloutBatch, dict[str, float]]:
        """Run ppo_epochs optimizer steps per mini-batch, by batch.advantages; return metrics.

        Returns the batch, too. Where its old log-probs are not computed before its only optimizer
        step, the policy is still the one of them, so they are this step's own log-probs, detached:
        every ratio is 1, and the rollout correction is computed per micro-batch.
        """
        with self._dp.session.phase("update_actor"):
            pop_metrics(self.model)  # of the passes before
            given = batch
            if self._config.actor.policy_loss.loss_mode in _COV_MODES:
                given = replace(given, selected=self.select(given))
            if given.old_log_probs is not None and self._recorded:
                given = given.with_parts(self._recorded)
            given = self.with_active_rows(given)
            metrics, log_probs = self._epochs(given)
            metrics |= pop_metrics(self.model)
            if self.kl is not None:
                metrics["actor/kl_coef"] = self.kl.coef  # of this update
                self.kl.update(metrics["actor/kl_loss"], len(batch.outcomes.last))
            if batch.old_log_probs is None:
                batch = replace(batch, old_log_probs=given.join(log_probs))
            return batch, metrics

    def with_active_rows(self, batch: RolloutBatch) -> RolloutBatch:
        """Find the tokens that may have a gradient: unmasked, with an advantage other than 0.

        Groups without such a token are computed without gradient. The numbers of tokens set the
        sizes of the head's gradient products, so the host waits for them, once per update: one copy
        for all micro-batches. A KL or entropy term has a gradient at every token, and in two modes
        the gradient is no multiple of the token's own advantage. Collective.
        """
        actor = self._config.actor
        every_token = actor.entropy_coeff or self._kl_coef
        if every_token or actor.policy_loss.loss_mode in ("kl_cov", "geo_mean"):
            return batch
        assert batch.advantages is not None
        is_active = batch.response_mask & (batch.advantages != 0)
        if all(hook.divisible for hook in hooks_of(self.model)):
            batch = self._dp.divide(batch, is_active)
        flags = [m.take(is_active) & (not m.is_dummy) for m in batch.micro_batches]
        parts = torch.cat(flags).cpu().split([flag.numel() for flag in flags])
        device = is_active.device
        return batch.with_each("active_rows", [x.nonzero().squeeze(1).to(device) for x in parts])

    def micro_batch_loss(
        self, batch: RolloutBatch, micro_batch: PackedBatch, num_tokens: Tensor, num_seqs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        take, correction = micro_batch.take, self._correction
        uses_reference, mask = self._config.actor.use_kl_loss, batch.mask_of(micro_batch)
        options = replace(
            self._loss_options,
            old_log_probs=take(batch.old_log_probs),
            advantages=take(batch.advantages),
            response_mask=mask,
            selected=take(batch.selected),
            cu_seqlens=micro_batch.cu_rows,
            global_num_tokens=num_tokens,
            global_num_seqs=num_seqs,
            ref_log_probs=take(batch.ref_log_probs) if uses_reference else None,
            kl_coef=self._kl_coef,
            rollout_is_weights=take(batch.is_weights),
        )
        in_one_pass, rollout = self.permits_one_pass(batch, micro_batch), batch.rollout_log_probs
        if in_one_pass:  # from hidden states: 6 T H V operations in the head
            weights = dict[str, Any]()
            if batch.old_log_probs is None and correction.rollout_is is not None:
                lower, upper = correction.is_bounds
                weights = {"rollout_is_lower": lower, "rollout_is_threshold": upper}
                weights["rollout_log_probs"] = take(rollout)
            loss, log_probs, entropy, metrics = packed_policy_loss(
                self.model,
                micro_batch,
                self._temperature,
                grad_scale=self._dp.grad_scale(self.optimizer),
                **vars(options),
                **weights,
            )
        else:  # log-probs, then the loss: 8 T H V operations, 6 where the logits are kept
            log_probs, entropy = self._forward(self.model, micro_batch)
        corrected = dict[str, Tensor]()
        if batch.old_log_probs is None or correction.bypass_mode:  # by log-probs of this step
            own, ends = log_probs.detach(), micro_batch.cu_rows
            now = correct(own, take(rollout), ends, mask, num_tokens, correction)
            corrected = now.metrics
            if not in_one_pass:
                options = replace(options, response_mask=now.response_mask)
                if correction.applies_weights and batch.is_weights is None:
                    options = replace(options, rollout_is_weights=now.weights)
        if not in_one_pass:
            loss, metrics = policy_loss(log_probs, entropy=entropy, **vars(options))
        if self.record is not None:
            self.record.add(batch, micro_batch, log_probs, entropy, options)
        return loss, {f"actor/{name}": x for name, x in metrics.items()} | corrected, log_probs

    def permits_one_pass(self, batch: RolloutBatch, micro_batch: PackedBatch) -> bool:
        """Return whether the loss and its gradients can be computed in the forward.

        Not without a head function, for the rows of part of a sequence (Ulysses), and where a
        token's importance weight or rejection depends on log-probs of this step of its whole
        response.
        """
        options = self._correction
        by_response = options.rollout_is in ("sequence", "sequence_mean")
        corrects = options.loss_type == "reinforce" or bool(options.rejection)
        return (
            accepts_head_function(self.model)
            and micro_batch.shard is None
            and not (batch.old_log_probs is None and by_response)
            and not (options.bypass_mode and corrects)
        )

    def select(self, batch: RolloutBatch) -> Tensor:
        """Select tokens of each mini-batch of all replicas by covariance, bool [R]. Collective."""
        assert batch.old_log_probs is not None and batch.advantages is not None
        session = self._dp.session
        generator = torch.Generator(session.device)
        generator.manual_seed(self._config.seed + session.step)
        columns = torch.stack([batch.old_log_probs, batch.advantages, batch.response_mask.float()])
        selected = torch.zeros_like(batch.response_mask)
        for number in range(len(batch.mini_batches)):
            gathered, is_own = self._dp.gather_tokens(batch, number, columns)
            log_probs, advantages, mask = gathered
            chosen = select_by_covariance(
                log_probs,
                advantages,
                loss_mode=self._config.actor.policy_loss.loss_mode,
                response_mask=mask.bool(),
                generator=generator,
            )
            selected[batch.in_mini_batch(number)] = chosen[is_own]
        return selected


class StepCritic:
    """The critic as the ranks of the policy call it; this one is none, which does nothing.

    `Critic` is on these ranks, an `ExternalCritic` on others. All methods are collective over the
    ranks of the policy.
    """

    def begin(self, step: int, rollouts: Rollouts, batch: RolloutBatch) -> None:
        """Begin with the rollouts that `step` is trained on; `batch` is what these ranks have."""

    def values(self, batch: RolloutBatch) -> Tensor | None:
        """Return the value of every response token, [R]."""
        return None

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """Run ppo_epochs optimizer steps per mini-batch towards batch.returns; return metrics."""
        return {}

    def finish(self, seconds: float) -> dict[str, float]:
        """Wait until the update is done; return further metrics. seconds: of the step up to now."""
        return {}

    def stop_signal(self) -> int:
        """Return the number of a stop signal that a rank of the critic has received; 0: none."""
        return 0

    def summary(self) -> dict[str, Any]:
        """Return entries of summary.json."""
        return {}

    def close(self, how: Literal["finished", "stopped"]) -> None:
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
            metrics, _ = self._epochs(batch)
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
