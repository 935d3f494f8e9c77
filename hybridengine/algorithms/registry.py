"""Advantage estimators by name (verl's names); a user's own registers with one decorator.

    @register_estimator("mine")
    def mine(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
        ...                                                   # advantages, returns: [T] each

and `algorithm.adv_estimator=mine` takes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import gae, group_advantage, whiten


@dataclass(frozen=True)
class Responses:
    """N responses packed into T tokens."""

    rewards: Tensor  # [N] float, the outcome reward
    group_ids: Tensor  # [N] int64, equal for the responses to one prompt
    cu_seqlens: Tensor  # [N + 1] int32
    response_mask: Tensor  # [T] bool, the tokens that are trained on
    token_rewards: Tensor | None = None  # [T]; None: the outcome reward at the last token
    values: Tensor | None = None  # [T], the critic's (gae)
    reward_baselines: Tensor | None = None  # [N], rewards of greedy responses (remax)
    reward_parts: Tensor | None = None  # [N, K], several rewards (gdpo)


@dataclass(frozen=True)
class AdvantageOptions:
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    epsilon: float = 1e-6
    part_weights: tuple[float, ...] | None = None  # gdpo; None: all 1
    process_group: dist.ProcessGroup | None = None  # whose tokens are whitened together


Estimator = Callable[[Responses, AdvantageOptions], tuple[Tensor, Tensor]]
ESTIMATORS: dict[str, Estimator] = {}
NEEDS: dict[str, tuple[str, ...]] = {}


def register_estimator(
    *names: str, needs: tuple[str, ...] = ()
) -> Callable[[Estimator], Estimator]:
    """Make an estimator known under `names`; a name that is taken is an error.

    needs: which of values (a critic is trained), reward_baselines (a greedy response to every
    prompt is generated) and reward_parts it reads.
    """

    def register(estimator: Estimator) -> Estimator:
        for name in names:
            if ESTIMATORS.setdefault(name, estimator) is not estimator:
                raise ValueError(f"advantage estimator {name!r} is already registered")
            NEEDS[name] = needs
        return estimator

    return register


def check_estimator(name: str) -> None:
    """Raise ValueError, with a suggestion, for a name that is not registered."""
    if name not in ESTIMATORS:
        near = difflib.get_close_matches(name, ESTIMATORS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown advantage estimator {name!r}; {hint}expected one of "
            f"{', '.join(sorted(ESTIMATORS))}"
        )


def advantages(
    name: str, responses: Responses, options: AdvantageOptions | None = None
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), [T] each, 0 where masked, by the estimator of that name.

    Raises:
        ValueError: no such estimator (the message suggests one), or an input it needs is missing.
    """
    check_estimator(name)
    return ESTIMATORS[name](responses, options or AdvantageOptions())


def _group(estimator: str, responses: Responses, options: AdvantageOptions, rewards=None) -> Tensor:
    """A group estimator of the kernel, spread to tokens."""
    return group_advantage(
        responses.rewards if rewards is None else rewards,
        responses.group_ids,
        estimator=estimator,
        norm_by_std=options.norm_by_std,
        epsilon=options.epsilon,
        lengths=_lengths(responses) if estimator == "opo" else None,
        cu_seqlens=responses.cu_seqlens,
        response_mask=responses.response_mask,
    )


def _lengths(responses: Responses) -> Tensor:
    """[N], unmasked tokens of every response."""
    before = torch.nn.functional.pad(responses.response_mask.cumsum(0), (1, 0))
    return before[responses.cu_seqlens.long()].diff()


def _token_rewards(responses: Responses) -> Tensor:
    """[T]; the outcome reward goes to the last unmasked token of its response."""
    if responses.token_rewards is not None:
        return responses.token_rewards
    mask = responses.response_mask
    seen = mask.cumsum(0)
    ends = responses.cu_seqlens.long()
    number = torch.searchsorted(
        ends[1:], torch.arange(mask.numel(), device=mask.device), right=True
    )
    inside = number < ends.numel() - 1
    number = number.clamp(max=max(ends.numel() - 2, 0))
    last_seen = torch.nn.functional.pad(seen, (1, 0))[ends[1:]]
    is_last = mask & inside & (seen == last_seen[number])
    return torch.where(is_last, responses.rewards[number], 0)


def _whiten(values: Tensor, responses: Responses, options: AdvantageOptions) -> Tensor:
    return whiten(values, responses.response_mask, group=options.process_group)


def _needs(responses: Responses, field: str, name: str) -> Tensor:
    value = getattr(responses, field)
    if value is None:
        raise ValueError(f"advantage estimator {name!r} needs Responses.{field}")
    return value


def _register_group_estimator(name: str, *others: str, kernel: str) -> None:
    @register_estimator(name, *others)
    def estimator(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
        out = _group(kernel, responses, options)
        return out, out


_register_group_estimator("grpo", "grpo_vectorized", kernel="grpo")
_register_group_estimator("dr_grpo", kernel="mean")
_register_group_estimator("rloo", "rloo_vectorized", kernel="rloo")
_register_group_estimator("grpo_passk", kernel="grpo_passk")
_register_group_estimator("max_mean", kernel="max_mean")
_register_group_estimator("opo", kernel="opo")


@register_estimator("gae", needs=("values",))
def _gae(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """PPO (arXiv 1506.02438): token-level, whitened over all ranks."""
    out, returns = gae(
        _token_rewards(responses),
        _needs(responses, "values", "gae"),
        responses.cu_seqlens,
        gamma=options.gamma,
        lam=options.lam,
        response_mask=responses.response_mask,
    )
    return _whiten(out, responses, options), returns


@register_estimator("reinforce_plus_plus")
def _reinforce_plus_plus(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted rewards to go, whitened."""
    _, returns = gae(
        _token_rewards(responses),
        None,
        responses.cu_seqlens,
        gamma=options.gamma,
        response_mask=responses.response_mask,
    )
    return _whiten(returns, responses, options), returns


@register_estimator("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(
    responses: Responses, options: AdvantageOptions
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group mean as baseline, whitened."""
    out = _whiten(_group("mean", responses, options), responses, options)
    return out, out


@register_estimator("remax", needs=("reward_baselines",))
def _remax(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): rewards to go minus the reward of the greedy response."""
    baselines = _needs(responses, "reward_baselines", "remax")
    _, returns = gae(
        _token_rewards(responses),
        None,
        responses.cu_seqlens,
        response_mask=responses.response_mask,
    )
    places = torch.arange(returns.numel(), device=returns.device)
    number = torch.searchsorted(responses.cu_seqlens[1:].long(), places, right=True)
    baseline = torch.nn.functional.pad(baselines, (0, 1))[number]
    return torch.where(responses.response_mask, returns - baseline, 0), returns


@register_estimator("gdpo", needs=("reward_parts",))
def _gdpo(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv 2601.05242): every reward normalised in its group by itself, summed, whitened."""
    parts = _needs(responses, "reward_parts", "gdpo")
    weights = options.part_weights or (1.0,) * parts.size(1)
    if len(weights) != parts.size(1):
        raise ValueError(f"gdpo: {len(weights)} part_weights for {parts.size(1)} reward parts")
    total = sum(
        weight * _group("grpo", responses, options, parts[:, k].contiguous())
        for k, weight in enumerate(weights)
    )
    out = _whiten(total, responses, options)
    return out, out
