"""The references of group_advantage and gae: groups and tokens one after the other, in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def check_finite(op: str, rewards: Tensor, mask: Tensor) -> None:
    """Raise ValueError naming the first unmasked reward that is NaN or infinite."""
    bad = (mask & ~rewards.isfinite()).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"{op}: rewards[{row}] is {rewards[row]}; expected finite rewards: check what the "
            "reward function returned for it"
        )


def group_reference(rewards, group_ids, estimator, norm_by_std, epsilon, lengths):
    """The specification, a group at a time, in float64."""
    check_finite("group_advantage", rewards, torch.ones_like(rewards, dtype=torch.bool))
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        rows = (group_ids == group).nonzero().squeeze(1)
        r = rewards[rows].double()
        n = r.numel()
        mean = r.mean() if n > 1 else r.new_zeros(())
        scale = (r.std() if n > 1 else 1) + epsilon if norm_by_std else 1
        if estimator in ("grpo", "mean"):
            found = (r - mean) / (scale if estimator == "grpo" else 1)
        elif estimator == "rloo":
            found = r - (r.sum() - r) / max(n - 1, 1)
        elif estimator == "opo":
            length = lengths[rows].double()
            total = length.sum()
            found = r - ((length * r).sum() / total if n > 1 and total > 0 else 0)
        else:
            best = int(r.argmax())
            rest = torch.cat([r[:best], r[best + 1 :]])
            second = rest.max() if n > 1 else 0
            baseline = second if estimator == "grpo_passk" else mean
            found = torch.zeros_like(r)
            found[best] = (r[best] - baseline) / scale
        advantages[rows] = found.to(rewards.dtype)
    return advantages


def gae_reference(rewards, values, cu_seqlens, mask, gamma, lam):
    """The specification, token by token, in Python's floats."""
    reward, keep = rewards.tolist(), mask.tolist()
    value = [0.0] * len(reward) if values is None else values.tolist()
    advantages, returns = [0.0] * len(reward), [0.0] * len(reward)
    for begin, end in pairwise(cu_seqlens.tolist()):
        next_value = next_advantage = 0.0
        for t in range(end - 1, begin - 1, -1):
            if keep[t]:
                delta = reward[t] + gamma * next_value - value[t]
                next_value, next_advantage = value[t], delta + gamma * lam * next_advantage
                advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return rewards.new_tensor(advantages), rewards.new_tensor(returns)
