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
    token_rewards: Tensor  # [T]: the outcome reward at the last token, and what tokens have beside
    values: Tensor | None = None  # [T], the critic's (gae)
    reward_baselines: Tensor | None = None  # [N], rewards of greedy responses (remax)
    reward_parts: Tensor | None = None  # [N, K], the K rewards whose weighted sum `rewards` is

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [T], which response a token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(lengths, output_size=self.response_mask.numel())

    @property
    def lengths(self) -> Tensor:
        """int64 [N], unmasked tokens."""
        found = torch.zeros_like(self.group_ids)
        return found.index_add(0, self.sequence_ids, self.response_mask.long())

    def needed(self, name: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"this advantage estimator needs Responses.{name}")
        return value


@dataclass(frozen=True)
class AdvantageOptions:
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    epsilon: float = 1e-6
    part_weights: tuple[float, ...] | None = None  # of the K reward_parts; None: all 1
    process_group: dist.ProcessGroup | None = None  # whose tokens are whitened together


Estimator = Callable[[Responses, AdvantageOptions], tuple[Tensor, Tensor]]
ESTIMATORS: dict[str, Estimator] = {}
NEEDS: dict[str, tuple[str, ...]] = {}


def register_estimator(
    *names: str, needs: tuple[str, ...] = ()
) -> Callable[[Estimator], Estimator]:
    """Make an estimator known under `names`; a name that is taken is an error.

    needs: which of values (a critic is trained), reward_baselines (a greedy response to every
    prompt is generated) and reward_parts (with AdvantageOptions.part_weights) it reads.
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
    """Compute (advantages, returns), [T] each, 0 where masked, by the estimator of that name.

    Raises:
        ValueError: no such estimator (the message suggests one), an input it needs is missing, or
            it gave something else than two tensors [T].
    """
    check_estimator(name)
    found = ESTIMATORS[name](responses, options or AdvantageOptions())
    shape = responses.response_mask.shape
    if not isinstance(found, tuple) or [getattr(x, "shape", None) for x in found] != [shape] * 2:
        raise ValueError(
            f"advantage estimator {name!r} gave {_described(found)}; expected (advantages, "
            f"returns), two tensors of shape {list(shape)}, one entry per token"
        )
    return found


def _described(found: object) -> str:
    if isinstance(found, Tensor):
        return f"one tensor of shape {list(found.shape)}"
    if not isinstance(found, tuple):
        return repr(type(found).__name__)
    return f"({', '.join(str(list(getattr(x, 'shape', ()))) for x in found)})"


def _group(
    estimator: str, responses: Responses, options: AdvantageOptions, rewards: Tensor | None = None
) -> Tensor:
    """A group estimator of the kernel, spread to tokens."""
    return group_advantage(
        responses.rewards if rewards is None else rewards,
        responses.group_ids,
        estimator=estimator,
        norm_by_std=options.norm_by_std,
        epsilon=options.epsilon,
        lengths=responses.lengths if estimator == "opo" else None,
        cu_seqlens=responses.cu_seqlens,
        response_mask=responses.response_mask,
    )


def _gae(
    responses: Responses, values: Tensor | None, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    return gae(
        responses.token_rewards,
        values,
        responses.cu_seqlens,
        gamma=gamma,
        lam=lam,
        response_mask=responses.response_mask,
    )


def _whiten(values: Tensor, responses: Responses, options: AdvantageOptions) -> Tensor:
    return whiten(values, responses.response_mask, group=options.process_group)


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
def _ppo(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """PPO (arXiv 1506.02438): token-level, whitened over all ranks."""
    values = responses.needed("values")
    out, returns = _gae(responses, values, options.gamma, options.lam)
    return _whiten(out, responses, options), returns


@register_estimator("reinforce_plus_plus")
def _reinforce_plus_plus(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): discounted rewards to go, whitened."""
    _, returns = _gae(responses, None, options.gamma)
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
    baselines = responses.needed("reward_baselines")[responses.sequence_ids]
    _, returns = _gae(responses, None)
    return torch.where(responses.response_mask, returns - baselines, 0), returns


@register_estimator("gdpo", needs=("reward_parts",))
def _gdpo(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv 2601.05242): every reward normalised in its group by itself, summed, whitened.

    The sum is weighted by options.part_weights.
    """
    parts = responses.needed("reward_parts")
    weights = options.part_weights or (1.0,) * parts.size(1)
    if len(weights) != parts.size(1):
        raise ValueError(
            f"gdpo: part_weights has {len(weights)} numbers for the {parts.size(1)} rewards of "
            "reward_parts; expected one for each"
        )
    total = sum(
        weight * _group("grpo", responses, options, part.contiguous())
        for weight, part in zip(weights, parts.T, strict=True)
    )
    out = _whiten(total, responses, options)
    return out, out
