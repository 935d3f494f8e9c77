"""OpenRLHF's log-probs, padding, advantages and losses on our operators (openrlhf 0.11).

    from hybridengine.integrations import openrlhf

    openrlhf.patch()                # OpenRLHF's own functions are these, until unpatch()
    with openrlhf.patched():        # within the block
        ...

The groups of `patch(*groups)`:

    log_probs    log_probs_from_logits, compute_entropy
    padding      unpad_input, pad_input, index_first_axis in ring_attn_utils; rings stay as they are
    advantages   get_advantages_and_returns, get_cumulative_returns of the experience maker
    balance      get_seqlen_balanced_partitions, get_minimum_num_micro_batch_size
    losses       (not by default) PolicyLoss, ValueLoss, GPTLMLoss
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridengine.kernels import (
    balance,
    balance_by_tokens,
    gae,
    policy_loss,
    token_entropy,
    token_log_probs,
    value_loss,
)

from ._patching import Patches
from .flash_attn import as_apply, index_first_axis, pad_input, unpad_input

__all__ = [
    "GPTLMLoss",
    "PolicyLoss",
    "ValueLoss",
    "compute_entropy",
    "get_advantages_and_returns",
    "get_cumulative_returns",
    "get_minimum_num_micro_batch_size",
    "get_seqlen_balanced_partitions",
    "index_first_axis",
    "log_probs_from_logits",
    "pad_input",
    "patch",
    "patched",
    "unpad_input",
    "unpatch",
]

_IGNORE_INDEX = -100


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the log-probs [...] of labels [...] from logits [..., V], float32; differentiable.

    The logits stay as they are; OpenRLHF divides them by the temperature in place.
    """
    return token_log_probs(logits, labels, temperature)[0]


def compute_entropy(logits: Tensor) -> Tensor:
    """Compute the entropy [...] of logits [..., V], float32; differentiable."""
    return token_entropy(logits)


def get_advantages_and_returns(
    self: Any,
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor | None,
    gamma: float,
    lambd: float,
) -> tuple[Tensor, Tensor]:
    """Compute GAE and returns [B, L], where masked tokens have value and reward 0.

    They are steps like others, as in OpenRLHF; `kernels.gae(response_mask=)` skips them.
    `self` is not used.
    """
    values, rewards = _masked(values, action_mask), _masked(rewards, action_mask)
    return gae(rewards, values, gamma=gamma, lam=lambd)


def get_cumulative_returns(
    self: Any, rewards: Tensor, action_mask: Tensor | None, gamma: float
) -> Tensor:
    """Compute the discounted rewards to go [B, L], where masked tokens have reward 0."""
    return gae(_masked(rewards, action_mask), None, gamma=gamma)[1].to(rewards.dtype)


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(mask != 0, values, 0)


def get_seqlen_balanced_partitions(
    seqlen_list: list[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split sequences into partitions of nearly equal length; equal_size: of as many sequences."""
    if len(seqlen_list) < k_partitions or (equal_size and len(seqlen_list) % k_partitions):
        raise AssertionError(
            f"number of items:[{len(seqlen_list)}] does not fit k_partitions:[{k_partitions}], "
            f"equal_size={equal_size}"
        )
    return balance(seqlen_list, k_partitions, equal_count=equal_size)


def get_minimum_num_micro_batch_size(
    total_lengths: list[int],
    max_tokens_per_gpu: int,
    ring_attn_size: int,
    ds_tensor_parallel_size: int,
) -> int:
    """Return the fewest micro-batches that hold the sequences; a longer one has its own."""
    budget = max_tokens_per_gpu * ring_attn_size * ds_tensor_parallel_size
    fitting = [length for length in total_lengths if length <= budget]
    return len(total_lengths) - len(fitting) + len(balance_by_tokens(fitting, budget))


class GPTLMLoss(torch.nn.Module):
    """Next-token cross-entropy of logits [..., L, V] and labels [..., L], mean over the labels."""

    def __init__(self, ring_attn_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.IGNORE_INDEX = _IGNORE_INDEX
        self.ring_attn_group = ring_attn_group
        if ring_attn_group:
            self.ring_attn_rank = dist.get_rank(ring_attn_group)
            self.ring_attn_world_size = dist.get_world_size(ring_attn_group)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss; with a ring, of this rank's part, averaged over the ranks."""
        ring = self.ring_attn_group
        if ring is not None:
            size = labels.size(-1) // self.ring_attn_world_size
            labels = labels[..., self.ring_attn_rank * size :][..., :size]
        # The last position becomes an ignored row: a slice of the logits would be copied.
        labels = F.pad(labels[..., 1:], (0, 1), value=self.IGNORE_INDEX)
        count = (labels != self.IGNORE_INDEX).sum()
        total = -token_log_probs(logits, labels, ignore_index=self.IGNORE_INDEX)[0].sum()
        if ring is None:
            return total / count
        loss = total / count.clamp(min=1)
        dist.all_reduce(loss, group=ring)
        return loss / self.ring_attn_world_size


class PolicyLoss(torch.nn.Module):
    """OpenRLHF's PPO and GSPO losses with its corrections for the rollout engine.

    Args:
        clip_eps_low, clip_eps_high, dual_clip: the clip ranges; dual_clip is above 1 or None.
        token_level_loss: mean over tokens; False, and for gspo: over sequences of token means.
        policy_loss_type: ppo or gspo.
        is_correction_level, _mode, _gating, _threshold: which tokens or sequences are dropped or
            clamped, by which statistic of old and rollout log-probs, outside which bounds.
    """

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Any = (0.5, 5.0),
    ) -> None:
        super().__init__()
        if policy_loss_type not in ("ppo", "gspo"):
            raise ValueError(f"Invalid policy loss type: {policy_loss_type}")
        if dual_clip is not None and dual_clip <= 1.0:
            raise AssertionError(f"dual_clip must be > 1.0, got {dual_clip}")
        _check_correction(
            is_correction_level, is_correction_mode, is_correction_gating, is_correction_threshold
        )
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.dual_clip, self.policy_loss_type = dual_clip, policy_loss_type
        self.token_level_loss = token_level_loss and policy_loss_type != "gspo"
        self.is_correction_level = is_correction_level
        self.is_correction_mode = is_correction_mode
        self.is_correction_gating = is_correction_gating
        self.is_correction_threshold = is_correction_threshold

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return (loss, share of clipped tokens, KL of old to new, KL and share of the correction).

        Per-token arguments are [B, L]. batch_num_tokens, global_batch_size: of all ranks.
        """
        new, old = log_probs, old_log_probs
        weights = rollout_kl = filtered = None
        corrected = self.is_correction_level != "off"
        rollout: Any = rollout_log_probs  # given where `corrected`
        if self.policy_loss_type == "gspo":  # one ratio for all tokens of a sequence
            log_ratio = log_probs - (rollout if corrected else old_log_probs)
            mask = torch.ones_like(log_probs) if action_mask is None else action_mask
            ratio = _masked(log_ratio, mask).sum(-1) / mask.sum(-1).clamp(min=1)
            new, old = ratio.unsqueeze(-1).expand_as(log_probs), torch.zeros_like(log_probs)
        elif corrected:
            weights, filtered = _correction(self, old_log_probs, rollout, action_mask)
            rollout_kl = _mean(rollout - old_log_probs, action_mask)
        by_tokens = self.token_level_loss
        total, aggregation = _aggregation(by_tokens, batch_num_tokens, global_batch_size)
        loss, metrics = policy_loss(
            new,
            old,
            advantages,
            response_mask=action_mask,
            clip_ratio_low=self.clip_eps_low,
            clip_ratio_high=self.clip_eps_high,
            clip_ratio_c=self.dual_clip,
            rollout_is_weights=weights,
            **aggregation,
        )
        clipped = metrics["pg_clipfrac"]
        if by_tokens and total is not None:  # a sum divided by the global number of tokens
            count = log_probs.numel() if action_mask is None else action_mask.sum()
            clipped = clipped * total / count
        kl = _mean((old_log_probs - log_probs).detach(), action_mask)
        loss = loss if total is None else loss * dp_size
        return loss, clipped, kl, rollout_kl, filtered


def _aggregation(
    by_tokens: bool, num_tokens: float | Tensor | None, num_seqs: float | Tensor | None
) -> tuple[Any, dict[str, Any]]:
    """Return what a loss is divided by over all ranks, and the options of our losses for it."""
    if by_tokens:
        return num_tokens, {"loss_agg_mode": "token-mean", "global_num_tokens": num_tokens}
    return num_seqs, {"loss_agg_mode": "seq-mean-token-mean", "global_num_seqs": num_seqs}


def _check_correction(level: str, mode: str, gating: str, threshold: Any) -> None:
    for name, value, known in (
        ("level", level, ("off", "token", "seq")),
        ("mode", mode, ("mask", "clip")),
        ("gating", gating, ("ratio", "binary_kl", "tv")),
    ):
        if value not in known:
            raise ValueError(f"is_correction_{name} must be {'/'.join(known)}, got {value}")
    if mode == "clip" and (level == "seq" or gating != "ratio"):
        raise ValueError(
            "is_correction_mode=clip requires is_correction_level=token and "
            "is_correction_gating=ratio"
        )
    if gating != "ratio" and level != "off" and threshold[0] > 0:
        raise ValueError(
            f"is_correction_gating={gating} takes an upper bound only (a single delta)"
        )


def _correction(
    self: Any, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the weights of tokens [B, L] and the share of the filtered tokens or sequences."""
    low, high = self.is_correction_threshold
    log_ratio = (old_log_probs - rollout_log_probs).detach()
    by_sequences = self.is_correction_level == "seq"
    if self.is_correction_gating == "ratio":
        statistic = log_ratio
    else:  # clamped, so that the logarithms of the binary KL are finite
        p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (rollout_log_probs, old_log_probs))
        if self.is_correction_gating == "binary_kl":
            statistic = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        else:
            statistic = (p - q).abs()
    if by_sequences:
        statistic = _mean(statistic, mask, dim=-1).unsqueeze(-1)
    if self.is_correction_gating == "ratio":
        statistic = statistic.exp()
    keep = (statistic >= low) & (statistic <= high)
    if self.is_correction_mode == "clip":
        weights = statistic.clamp(min=low, max=high)
    else:
        weights = torch.where(keep, log_ratio.exp(), 0.0)
    filtered = (~keep).float()
    return weights, filtered.mean() if by_sequences else _mean(filtered, mask)


def _mean(values: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    if mask is None:
        return values.mean(dim=dim)
    return _masked(values, mask).sum(dim=dim) / mask.sum(dim=dim)


class ValueLoss(torch.nn.Module):
    """The clipped squared error of values; clip_eps None does not clip."""

    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        self.clip_eps, self.token_level_loss = clip_eps, token_level_loss

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of values [B, L]; the numbers are those of all ranks."""
        sizes = batch_num_tokens, global_batch_size
        total, aggregation = _aggregation(self.token_level_loss, *sizes)
        loss, _ = value_loss(
            values,
            old_values,
            returns,
            response_mask=action_mask,
            cliprange_value=self.clip_eps,
            **aggregation,
        )
        return loss if total is None else loss * dp_size


_MAKER = "trainer.ppo_utils.experience_maker.RemoteExperienceMaker"
_PATCHES = Patches(
    "openrlhf",
    {
        "log_probs": {
            "models.utils.log_probs_from_logits": log_probs_from_logits,
            "models.utils.compute_entropy": compute_entropy,
        },
        "padding": {
            "models.ring_attn_utils.unpad_input": unpad_input,
            "models.ring_attn_utils.pad_input": pad_input,
            "models.ring_attn_utils.index_first_axis": as_apply(index_first_axis),
        },
        "advantages": {
            f"{_MAKER}.get_advantages_and_returns": get_advantages_and_returns,
            f"{_MAKER}.get_cumulative_returns": get_cumulative_returns,
        },
        "balance": {
            "utils.seqlen_balancing.get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
            "utils.seqlen_balancing.get_minimum_num_micro_batch_size": (
                get_minimum_num_micro_batch_size
            ),
        },
        "losses": {
            "models.loss.PolicyLoss.forward": PolicyLoss.forward,
            "models.loss.ValueLoss.forward": ValueLoss.forward,
            "models.loss.GPTLMLoss.forward": GPTLMLoss.forward,
        },
    },
    default_groups=("log_probs", "padding", "advantages", "balance"),
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
