"""The engine's log-probs against the trainer's: weights, rejection, kept mass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridengine.conformance.case import Case

from .aggregation import MASK, NEW, OLD

_generator = torch.Generator().manual_seed(1)


def _weights(
    old: Tensor, rollout: Tensor, mask: Tensor, level: str, upper: float, lower: float | None
) -> Tensor:
    """Ratios trainer / engine, truncated or set to 0 outside the bounds; 0 where masked."""
    difference = (old - rollout).where(mask, 0)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True).expand_as(old)
    ratio = difference.exp()
    if lower is None:
        ratio = ratio.clamp(max=upper)
    else:
        ratio = ratio.where((ratio >= lower) & (ratio <= upper), 0)
    return ratio.where(mask, 0)


def _padding_counts(mask: Tensor, **inputs: Any) -> Tensor:
    return _weights(mask=torch.ones_like(mask), **inputs).where(mask, 0)


def _sum_of_ratios(old: Tensor, rollout: Tensor, mask: Tensor, upper: float, **_: Any) -> Tensor:
    ratio = (old - rollout).exp().where(mask, 0).sum(1, keepdim=True)
    return ratio.clamp(max=upper).expand_as(old).where(mask, 0)


def _inverse(old: Tensor, rollout: Tensor, **inputs: Any) -> Tensor:
    return _weights(rollout, old, **inputs)


def _truncated(lower: float | None, **inputs: Any) -> Tensor:
    return _weights(lower=None, **inputs)


def _rejection(
    old: Tensor, rollout: Tensor, mask: Tensor, criterion: str, bound: tuple[float, float]
) -> Tensor:
    """The mask that remains, as float64; k1 is the geometric mean of rollout / trainer."""
    means = (rollout - old).where(mask, 0).sum(1) / mask.sum(1)
    kept = (means.exp() >= bound[0]) & (means.exp() <= bound[1])
    return (mask & kept[:, None]).double()


def _reject_by_mean_ratio(
    old: Tensor, rollout: Tensor, mask: Tensor, criterion: str, bound: tuple[float, float]
) -> Tensor:
    """The arithmetic mean of the ratios."""
    means = (rollout - old).exp().where(mask, 0).sum(1) / mask.sum(1)
    return (mask & ((means >= bound[0]) & (means <= bound[1]))[:, None]).double()


def _loss_of_kept(
    losses: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, bound: float
) -> Tensor:
    """Token mean of weighted losses; tokens with |log ratio| above the bound are rejected."""
    kept = mask & ((old - rollout).abs() <= bound)
    return (losses * (old - rollout).exp()).where(kept, 0).sum() / kept.sum()


def _loss_over_all(
    losses: Tensor, old: Tensor, rollout: Tensor, mask: Tensor, bound: float
) -> Tensor:
    kept = mask & ((old - rollout).abs() <= bound)
    return (losses * (old - rollout).exp()).where(kept, 0).sum() / mask.sum()


_LOGITS = 2 * torch.randn(3, 8, generator=_generator, dtype=torch.float64)
_KEPT = torch.zeros(3, 8).bool().scatter_(1, _LOGITS.topk(3).indices, True)
_IDS = _LOGITS.topk(2).indices[:, 1]


def _kept_log_probs(logits: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    of_kept = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return of_kept.gather(1, ids[:, None])[:, 0]


def _full_log_probs(logits: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _tempered(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def _divided_after(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0] / temperature


_BASE: dict[str, Any] = {"old": OLD, "rollout": NEW, "mask": MASK}
_SWINGS = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)

CASES = (
    Case(
        "a token's weight is trainer over engine, truncated above",
        "rollout_weights",
        {**_BASE, "level": "token", "upper": 1.3, "lower": None},
        _weights,
        _inverse,
        "https://github.com/verl-project/verl/pull/2953",
        "Sampling from another policy than the trained one biases every gradient.",
    ),
    Case(
        "weights outside of two bounds are 0",
        "rollout_weights",
        {**_BASE, "level": "token", "upper": 1.2, "lower": 0.8},
        _weights,
        _truncated,
        "https://github.com/unslothai/unsloth-zoo/pull/870",
        "One of two ways to bound weights was missing.",
    ),
    Case(
        "a sequence's weight is the product over its tokens",
        "rollout_weights",
        {**_BASE, "level": "sequence", "upper": 3.0, "lower": None},
        _weights,
        _sum_of_ratios,
        "https://github.com/unslothai/unsloth-zoo/pull/870",
        "The ratios of the tokens were added.",
    ),
    Case(
        "a sequence's weight leaves masked tokens out",
        "rollout_weights",
        {**_BASE, "level": "sequence", "upper": 20.0, "lower": None},
        _weights,
        _padding_counts,
        "https://github.com/huggingface/trl/issues/5814",
        "A ratio over a sequence depends on which tokens are in it, and on how many.",
    ),
    Case(
        "seq_mean_k1 rejects by the geometric mean",
        "rejection",
        {**_BASE, "rollout": OLD + _SWINGS, "criterion": "seq_mean_k1", "bound": (0.9, 1.1)},
        _rejection,
        _reject_by_mean_ratio,
        "https://github.com/areal-project/AReaL/pull/1088",
        "Ratios were aggregated arithmetically where the criterion is the geometric mean.",
    ),
    Case(
        "rejected tokens are not in the denominator",
        "kept_loss",
        {**_BASE, "losses": 1 + NEW.square(), "bound": 0.3},
        _loss_of_kept,
        _loss_over_all,
        "https://github.com/THUDM/slime/pull/657",
        "Rejection by weights of 0 kept the tokens in the denominator.",
    ),
    Case(
        "log-probs of top-p are over the kept entries",
        "kept_log_probs",
        {"logits": _LOGITS, "ids": _IDS, "kept": _KEPT},
        _kept_log_probs,
        _full_log_probs,
        "https://github.com/huggingface/trl/issues/6789",
        "The engine's log-probs are of the truncated distribution and the trainer's of the full "
        "one: every ratio carries the kept mass.",
    ),
    Case(
        "logits are divided by the temperature, not log-probs",
        "log_probs",
        {"logits": _LOGITS, "ids": _IDS, "temperature": 0.6},
        _tempered,
        _divided_after,
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/697",
        "The log-probs of sampled tokens were divided by the temperature.",
    ),
    Case(
        "the trainer's log-probs have the temperature of the engine's",
        "log_probs",
        {"logits": _LOGITS, "ids": _IDS, "temperature": 1.5},
        _tempered,
        lambda temperature, **inputs: _tempered(temperature=1.0, **inputs),
        "https://github.com/huggingface/trl/pull/3029",
        "Log-probs of the policy and of the reference were computed at temperature 1.",
    ),
)
