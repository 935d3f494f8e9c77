"""The policy under training: log-probs of packed rollouts, and optimizer steps over them.

Every loss term is divided by a count over the whole mini-batch on all ranks, so neither the split
into micro-batches nor the number of ranks changes the loss or the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridengine.config import GRPOConfig
from hybridengine.distributed import Session
from hybridengine.kernels import policy_loss
from hybridengine.model import Optimizer, PackedBatch, pack_rollouts, packed_log_probs
from hybridengine.trainer.batching import split_micro_batches
from hybridengine.trainer.probs_diff import ProbsDiff
from hybridengine.trainer.rollouts import Rollout

__all__ = ["Actor"]


@dataclass
class _Micro:
    """One micro-batch of this rank; per-token tensors cover its R response tokens, packed."""

    batch: PackedBatch
    response_cu_seqlens: Tensor  # int32 [S+1]
    advantages: Tensor  # [R]
    rollout_log_probs: Tensor  # [R]
    response_mask: Tensor  # bool [R]; all False in a stand-in
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None


@dataclass
class _Mini:
    """One optimizer step: this rank's micro-batches and the counts over all ranks."""

    micros: list[_Micro]
    num_tokens: int
    num_seqs: int


class Actor:
    """Policy model, optimizer and, where the KL loss wants one, the frozen reference."""

    def __init__(
        self,
        config: GRPOConfig,
        model: nn.Module,
        reference: nn.Module | None,
        optimizer: Optimizer,
        session: Session,
        sequence_parallel: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.reference, self.optimizer = model, reference, optimizer
        self._config, self._session = config, session
        self._sp_size = config.actor.ulysses_sequence_parallel_size
        self._sp_group = sequence_parallel
        self._temperature = config.rollout.temperature

    def update(
        self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], mini_batches: int
    ) -> dict[str, float]:
        """Optimizer steps over all rollouts; returns metrics by their dashboard names.

        advantages: per rollout [tokens of its response], float32. mini_batches: into how many
        optimizer steps one pass is cut.
        """
        epochs = self._config.actor.ppo_epochs
        minis = self._cut(rollouts, advantages, mini_batches)
        micros = [micro for mini in minis for micro in mini.micros]
        diff = ProbsDiff(self._session.device)
        if self.reference is not None:
            with self._session.phase("ref"):
                for micro in micros:
                    micro.ref_log_probs = self._frozen_log_probs(self.reference, micro)
        if epochs * len(minis) > 1:
            with self._session.phase("old_log_prob"):
                for micro in micros:
                    micro.old_log_probs = self._frozen_log_probs(self.model, micro)
                    diff.add(micro.old_log_probs, micro.rollout_log_probs, micro.response_mask)
        steps = []
        with self._session.phase("update_actor"):
            for _ in range(epochs):
                for mini in minis:
                    steps.append(self._step(mini, diff))
        return _mean_of(steps) | diff.metrics()

    def _cut(
        self, rollouts: Sequence[Rollout], advantages: Sequence[Tensor], mini_batches: int
    ) -> list[_Mini]:
        minis = []
        groups = sorted({r.group for r in rollouts})
        for k in range(mini_batches):
            low = groups[len(groups) * k // mini_batches]
            end = len(groups) * (k + 1) // mini_batches
            chosen = [
                i
                for i, r in enumerate(rollouts)
                if r.group >= low and (end == len(groups) or r.group < groups[end])
            ]
            split = split_micro_batches(
                [rollouts[i].num_tokens for i in chosen],
                self._session.world_size // self._sp_size,
                self._config.actor.ppo_max_token_len_per_gpu * self._sp_size,
            )
            minis.append(
                _Mini(
                    micros=[
                        self._micro([chosen[i] for i in m.indices], m.counted, rollouts, advantages)
                        for m in split[self._session.rank // self._sp_size]
                    ],
                    num_tokens=sum(len(rollouts[i].response_ids) for i in chosen),
                    num_seqs=len(chosen),
                )
            )
        return minis

    def _micro(
        self,
        indices: list[int],
        counted: bool,
        rollouts: Sequence[Rollout],
        advantages: Sequence[Tensor],
    ) -> _Micro:
        device = self._session.device
        chosen = [rollouts[i] for i in indices]
        lengths = torch.tensor([len(r.response_ids) for r in chosen])
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        log_probs = torch.tensor([p for r in chosen for p in r.log_probs], dtype=torch.float32)
        batch = pack_rollouts(
            [(r.sample.prompt_ids, r.response_ids) for r in chosen], device, self._sp_group
        )
        return _Micro(
            batch=batch,
            response_cu_seqlens=cu.to(device, torch.int32),
            advantages=torch.cat([advantages[i] for i in indices]).to(device),
            rollout_log_probs=log_probs.to(device),
            response_mask=torch.full((int(lengths.sum()),), counted, device=device),
        )

    @torch.no_grad()
    def _frozen_log_probs(self, model: nn.Module, micro: _Micro) -> Tensor:
        return packed_log_probs(model, micro.batch, self._temperature)[0]

    def _step(self, mini: _Mini, diff: ProbsDiff) -> dict[str, Tensor]:
        actor = self._config.actor
        low, high = self._config.clip_ratios
        totals: dict[str, Tensor] = {}
        largest = torch.full((), -torch.inf, device=self._session.device)
        for micro in mini.micros:
            log_probs, entropy = packed_log_probs(self.model, micro.batch, self._temperature)
            old = micro.old_log_probs
            if old is None:  # the only step on these rollouts: the policy is still the old one
                old = log_probs.detach()
                diff.add(old, micro.rollout_log_probs, micro.response_mask)
            loss, metrics = policy_loss(
                log_probs,
                old,
                micro.advantages,
                response_mask=micro.response_mask,
                loss_mode=actor.policy_loss.loss_mode,
                clip_ratio_low=low,
                clip_ratio_high=high,
                clip_ratio_c=actor.clip_ratio_c,
                loss_agg_mode=actor.loss_agg_mode,
                loss_scale_factor=self._config.data.max_response_length,
                cu_seqlens=micro.response_cu_seqlens,
                global_num_tokens=mini.num_tokens,
                global_num_seqs=mini.num_seqs,
                ref_log_probs=micro.ref_log_probs,
                kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
                kl_type=actor.kl_loss_type,
                entropy=entropy,
                entropy_coeff=actor.entropy_coeff,
            )
            # FSDP2 averages gradients over the ranks; the loss is already a global mean.
            (loss * self._session.world_size).backward()
            largest = torch.maximum(largest, metrics.pop("ratio_max"))
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        names = sorted(totals)
        summed = torch.stack([totals[n] for n in names])
        dist.all_reduce(summed)
        summed /= self._sp_size  # the ranks that share a micro-batch each hold its whole loss
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        grad_norm = self.optimizer.step(actor.grad_clip)
        return {
            **{f"actor/{n}": v for n, v in zip(names, summed, strict=True)},
            "actor/ratio_max": largest,
            "actor/grad_norm": grad_norm,
            "actor/lr": torch.tensor(self.optimizer.last_lr),
        }


def _mean_of(steps: list[dict[str, Tensor]]) -> dict[str, float]:
    return {name: float(sum(float(s[name]) for s in steps) / len(steps)) for name in steps[0]}
