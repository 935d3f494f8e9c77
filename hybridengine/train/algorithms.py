"""Advantage estimators by name (verl's names), with a decorator for a user's own; KL coefficient.

    @register_estimator("mine")
    def mine(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
        ...                                                   # advantages, returns: [T] each

`algorithm.adv_estimator=mine` selects it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import gae, group_advantage, whiten
from hybridengine.run.config import RLConfig
from hybridengine.run.config.rl import KLScheduleConfig

__all__ = [
    "ESTIMATORS",
    "NEEDS",
    "AdvantageOptions",
    "KLController",
    "Responses",
    "advantages",
    "check_estimator",
    "register_estimator",
    "uses_critic",
]

_MAX_KL_ERROR = 0.2


@dataclass(frozen=True)
class Responses:
    """What an estimator reads of the N responses of all ranks.

    Numbers per response are those of all N, the same on every rank. Tokens are those of the n
    responses that this rank trains on, packed into T tokens.
    """

    rewards: Tensor  # [N] float, the outcome reward
    group_ids: Tensor  # [N] int64, equal for the responses to one prompt
    cu_seqlens: Tensor  # [n + 1] int32
    response_mask: Tensor  # [T] bool, the tokens that are trained on
    token_rewards: Tensor  # [T], the outcome reward at the last token minus each token's KL penalty
    lengths: Tensor | None = None  # [N] int64, the model's tokens; None: counted, if all N are here
    local: Tensor | None = None  # [n] int64, which of the N have their tokens here; None: all
    values: Tensor | None = None  # [T], of the critic (gae)
    reward_baselines: Tensor | None = None  # [N], reward of the greedy response (remax)
    reward_parts: Tensor | None = None  # [N, K], the K rewards whose weighted sum `rewards` is

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [T], which of the N responses a token belongs to."""
        ids = torch.repeat_interleave(
            self.cu_seqlens.diff().long(), output_size=self.response_mask.numel()
        )
        return ids if self.local is None else self.local[ids]

    def to_tokens(self, per_response: Tensor) -> Tensor:
        """Copy numbers per response to their tokens, 0 where masked: [N] -> [T]."""
        return torch.where(self.response_mask, per_response[self.sequence_ids], 0)

    @property
    def all_lengths(self) -> Tensor:
        """int64 [N], the model's tokens of each response."""
        if self.lengths is not None:
            return self.lengths
        zeros = torch.zeros_like(self.group_ids)
        return zeros.index_add(0, self.sequence_ids, self.response_mask.long())

    def needed(self, name: str) -> Tensor:
        """Return the field `name`; ValueError if it is None."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"this advantage estimator needs Responses.{name}")
        return value


@dataclass(frozen=True)
class AdvantageOptions:
    """The options of all estimators."""

    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # of GAE
    norm_by_std: bool = True  # of the group, in grpo
    epsilon: float = 1e-6  # added to standard deviations
    part_weights: tuple[float, ...] | None = None  # of the K reward_parts; None: all 1
    process_group: dist.ProcessGroup | None = None  # whose tokens are whitened together; None: all


Estimator = Callable[[Responses, AdvantageOptions], tuple[Tensor, Tensor]]
ESTIMATORS: dict[str, Estimator] = {}
NEEDS: dict[str, tuple[str, ...]] = {}


def register_estimator(
    *names: str, needs: tuple[str, ...] = ()
) -> Callable[[Estimator], Estimator]:
    """Register an estimator under `names`.

    needs: what it reads that a run may lack: values (the run trains a critic), reward_baselines
    (the run generates a greedy response to every prompt), reward_parts (with
    AdvantageOptions.part_weights), group_ids (it compares the responses to a prompt, so that
    rollout.n of 1 is noted).

    Raises:
        ValueError: a name is taken.
    """

    def register(estimator: Estimator) -> Estimator:
        for name in names:
            if ESTIMATORS.setdefault(name, estimator) is not estimator:
                raise ValueError(f"advantage estimator {name!r} is already registered")
            NEEDS[name] = needs
        return estimator

    return register


def uses_critic(config: RLConfig) -> bool:
    """Return whether the estimator needs values; False for one that is not registered."""
    return "values" in NEEDS.get(config.algorithm.adv_estimator, ())


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
            it returned something else than two tensors [T].
    """
    check_estimator(name)
    result = ESTIMATORS[name](responses, options or AdvantageOptions())
    shape = responses.response_mask.shape
    if not isinstance(result, tuple) or [getattr(x, "shape", None) for x in result] != [shape] * 2:
        raise ValueError(
            f"advantage estimator {name!r} returned {_describe(result)}; expected (advantages, "
            f"returns), two tensors of shape {list(shape)}, one entry per token"
        )
    return result


def _describe(result: object) -> str:
    if isinstance(result, Tensor):
        return f"one tensor of shape {list(result.shape)}"
    if not isinstance(result, tuple):
        return repr(type(result).__name__)
    return f"({', '.join(str(list(getattr(x, 'shape', ()))) for x in result)})"


def _group(
    estimator: str, responses: Responses, options: AdvantageOptions, rewards: Tensor | None = None
) -> Tensor:
    """Compute a group estimator of the kernel per token, [T]."""
    per_response = group_advantage(
        responses.rewards if rewards is None else rewards,
        responses.group_ids,
        estimator=estimator,
        norm_by_std=options.norm_by_std,
        epsilon=options.epsilon,
        lengths=responses.all_lengths if estimator == "opo" else None,
    )
    return responses.to_tokens(per_response)


def _gae(
    responses: Responses, values: Tensor | None, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    rewards, mask = responses.token_rewards, responses.response_mask
    return gae(rewards, values, responses.cu_seqlens, gamma=gamma, lam=lam, response_mask=mask)


def _whiten(values: Tensor, responses: Responses, options: AdvantageOptions) -> Tensor:
    return whiten(values, responses.response_mask, group=options.process_group)


def _register_group_estimator(kernel: str, *names: str) -> None:
    @register_estimator(*names, needs=("group_ids",))
    def estimator(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
        out = _group(kernel, responses, options)
        return out, out


_register_group_estimator("grpo", "grpo", "grpo_vectorized")
_register_group_estimator("mean", "dr_grpo")
_register_group_estimator("rloo", "rloo", "rloo_vectorized")
for _name in ("grpo_passk", "max_mean", "opo"):
    _register_group_estimator(_name, _name)


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


@register_estimator("reinforce_plus_plus_baseline", needs=("group_ids",))
def _reinforce_plus_plus_baseline(
    responses: Responses, options: AdvantageOptions
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group mean as baseline, whitened."""
    out = _whiten(_group("mean", responses, options), responses, options)
    return out, out


@register_estimator("remax", needs=("reward_baselines",))
def _remax(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): rewards to go minus the reward of the greedy response."""
    baselines = responses.to_tokens(responses.needed("reward_baselines"))
    _, returns = _gae(responses, None)
    return torch.where(responses.response_mask, returns - baselines, 0), returns


@register_estimator("gdpo", needs=("reward_parts", "group_ids"))
def _gdpo(responses: Responses, options: AdvantageOptions) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv 2601.05242): each reward normalised in its group, summed, whitened.

    The sum is weighted by options.part_weights.
    """
    parts = responses.needed("reward_parts")
    weights = options.part_weights or (1.0,) * parts.size(1)
    if len(weights) != parts.size(1):
        raise ValueError(
            f"gdpo: part_weights has {len(weights)} numbers for the {parts.size(1)} rewards of "
            "reward_parts; expected one for each"
        )
    normalised = (
        weight * _group("grpo", responses, options, part.contiguous())
        for weight, part in zip(weights, parts.T, strict=True)
    )
    total = sum(normalised, start=torch.zeros(()))
    out = _whiten(total, responses, options)
    return out, out


class KLController:
    """Holds `coef`, the factor of a KL term in this step: of the reward's, or of the loss's.

    Adaptive (Ziegler et al. 2019, arXiv 1909.08593, section 2.2): the coefficient moves in
    proportion to the relative distance from the target, which is clipped to 20%, and acts fully
    over `horizon` responses. Linear: from `coef` in the first step to `final_kl_coef` in step
    `num_steps`, by default the last one of the run, `total_steps`.
    """

    def __init__(self, schedule: KLScheduleConfig, coef: float, total_steps: int = 1) -> None:
        self.coef, self._initial, self._schedule = coef, coef, schedule
        self._num_steps, self._updates = schedule.num_steps or total_steps, 0

    def update(self, kl: float, responses: int) -> None:
        """Set coef for the next step; a KL that is not finite does not change an adaptive one.

        kl: mean over `responses` responses of their mean KL per token, in nats.
        """
        self._updates += 1
        schedule = self._schedule
        if schedule.type == "adaptive" and math.isfinite(kl):
            error = kl / schedule.target_kl - 1
            error = min(max(error, -_MAX_KL_ERROR), _MAX_KL_ERROR)
            self.coef *= 1 + error * responses / schedule.horizon
        elif schedule.type == "linear":
            done = min(1.0, self._updates / max(1, self._num_steps - 1))
            self.coef = self._initial + done * (schedule.final_kl_coef - self._initial)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`; a fixed coefficient is that of the configuration, as set now."""
        if self._schedule.type != "fixed":
            self.coef, self._updates = state["coef"], state.get("updates", 0)
