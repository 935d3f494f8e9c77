"""verl's advantage estimators: `verl.trainer.ppo.core_algos.compute_*_advantage*`.

All return (advantages, returns) [B, L] with 0 at masked tokens, where verl's GAE and ReMax leave
values that nothing reads. Rewards must be finite. `index` names the prompt of each response by
anything hashable. GDPO and the optimal-token-baseline estimators stay verl's: the former calls
`compute_grpo_outcome_advantage`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from hybridengine.integrations.padded import group_ids
from hybridengine.kernels import gae, group_advantage

__all__ = [
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
]

Advantages = tuple[Tensor, Tensor]  # advantages and returns, [B, L]


def _grpo(
    name: str, doc: str, estimator: str, norms: Callable[[Any, bool, Tensor], bool]
) -> Callable[..., Advantages]:
    """Make an estimator of the GRPO family with verl's signature.

    norms: (config, norm_adv_by_std_in_grpo, group ids [B]) -> whether to divide by the std.
    """

    def compute(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Iterable[Hashable],
        epsilon: float = 1e-6,
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
        **kwargs: Any,
    ) -> Advantages:
        ids = group_ids(index).to(token_level_rewards.device)
        advantages = group_advantage(
            token_level_rewards.sum(dim=-1),
            ids,
            estimator=estimator,
            response_mask=response_mask,
            norm_by_std=norms(config, norm_adv_by_std_in_grpo, ids),
            epsilon=epsilon,
        )
        return advantages, advantages

    return _named(compute, name, doc)


def _named(function: Callable[..., Advantages], name: str, doc: str) -> Callable[..., Advantages]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _passk_norm(config: Any, norm: bool, ids: Tensor) -> bool:
    """Return `config.norm_adv_by_std_in_grpo`; verl reads it there, not from the argument."""
    assert config is not None
    counts = ids.bincount()
    if counts.numel() and int(counts.min()) < 2:
        raise ValueError(
            f"Pass@k requires at least 2 samples per group. Got a group of {int(counts.min())}."
        )
    return bool(config.get("norm_adv_by_std_in_grpo", True))


# Two functions, as verl has: each is replaced, and restored, by itself.
compute_grpo_outcome_advantage, compute_grpo_vectorized_outcome_advantage = (
    _grpo(
        name,
        """(r - mean) / (std + epsilon) over the responses to a prompt; r the sum of rewards.

        The std is unbiased. A group of one has mean 0 and std 1. Without norm_adv_by_std_in_grpo:
        r - mean (Dr. GRPO).
        """,
        "grpo",
        lambda config, norm, ids: norm,
    )
    for name in ("compute_grpo_outcome_advantage", "compute_grpo_vectorized_outcome_advantage")
)
compute_grpo_passk_outcome_advantage = _grpo(
    "compute_grpo_passk_outcome_advantage",
    "The best response of a group: (r - second best) / (std + epsilon); 0 for the others.",
    "grpo_passk",
    _passk_norm,
)


def _estimator(
    name: str, doc: str, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Advantages]:
    """Make an estimator with verl's signature from advantages of (rewards [B], ids [B], mask)."""

    def estimator(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Iterable[Hashable],
        epsilon: float = 1e-6,
        config: Any = None,
        **kwargs: Any,
    ) -> Advantages:
        ids = group_ids(index).to(token_level_rewards.device)
        advantages = compute(token_level_rewards.sum(dim=-1), ids, response_mask)
        return advantages, advantages

    return _named(estimator, name, doc)


compute_rloo_outcome_advantage = _estimator(
    "compute_rloo_outcome_advantage",
    "r - the mean of the others in the group; r in a group of one.",
    lambda rewards, ids, mask: group_advantage(rewards, ids, estimator="rloo", response_mask=mask),
)
compute_rloo_vectorized_outcome_advantage = _estimator(
    "compute_rloo_vectorized_outcome_advantage",
    "r - the mean of the others in the group; 0 in a group of one.",
    lambda rewards, ids, mask: group_advantage(
        rewards.masked_fill(ids.bincount()[ids] == 1, 0), ids, estimator="rloo", response_mask=mask
    ),
)
compute_opo_outcome_advantage = _estimator(
    "compute_opo_outcome_advantage",
    "r - the mean of the group weighted by response length; r in a group of one.",
    lambda rewards, ids, mask: group_advantage(
        rewards, ids, estimator="opo", response_mask=mask, lengths=mask.sum(dim=-1)
    ),
)
compute_reinforce_plus_plus_baseline_outcome_advantage = _estimator(
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "r - mean of the group, whitened over the unmasked tokens of the batch.",
    lambda rewards, ids, mask: _whiten(
        group_advantage(rewards, ids, estimator="mean", response_mask=mask), mask
    ),
)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Hashable],
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """(r - mean) B / (number of rewards other than 0) / f_norm. verl does not use alpha."""
    rewards = token_level_rewards.sum(dim=-1)
    scale = rewards.numel() / torch.count_nonzero(rewards).clamp(min=1) / f_norm
    ids = group_ids(index).to(rewards.device)
    advantages = scale * group_advantage(
        rewards, ids, estimator="mean", response_mask=response_mask
    )
    return advantages, advantages


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """Discounted rewards to go (`config.gamma`), whitened over the unmasked tokens."""
    assert config is not None
    returns = gae(
        token_level_rewards, None, gamma=float(config.gamma), response_mask=response_mask
    )[1]
    return _whiten(returns, response_mask), returns


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Rewards to go less reward_baselines [B], the reward of the greedy response."""
    returns = gae(token_level_rewards, None, response_mask=response_mask)[1]
    return returns - reward_baselines.unsqueeze(-1) * response_mask, returns


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> Advantages:
    """Generalised advantages, whitened, and returns before whitening; masked tokens are skipped."""
    advantages, returns = gae(
        token_level_rewards,
        values,
        gamma=float(gamma),
        lam=float(lam),
        response_mask=response_mask,
    )
    return _whiten(advantages, response_mask), returns


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Whiten over the unmasked entries of this process (`kernels.whiten` spans all ranks)."""
    mask = mask.bool()
    unmasked = values[mask].double()
    if unmasked.numel() < 2:
        raise ValueError(
            f"whitening needs at least 2 unmasked tokens; response_mask has {unmasked.numel()}."
        )
    variance, mean = torch.var_mean(unmasked)
    whitened = (unmasked - mean) * (variance + 1e-8).rsqrt()
    return torch.zeros_like(values).masked_scatter_(mask, whitened.to(values.dtype))
