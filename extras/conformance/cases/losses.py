"""Clipping, sequence ratios, KL estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridengine.conformance.case import Case, with_gradient

from .aggregation import ADVANTAGES, BATCH, MASK, NEW, OLD, REF, aggregate, ppo

Terms = Callable[..., Tensor]
_WIDE = OLD + 4 * (NEW - OLD)  # many ratios leave the clip range
_FAR = {**BATCH, "log_probs": _WIDE}


def _loss(terms: Terms) -> Terms:
    """Return the formula [loss, gradient] of terms [B, L]."""

    def formula(log_probs: Tensor, mask: Tensor, aggregation: str, **inputs: Any) -> Tensor:
        return with_gradient(
            lambda x: aggregate(terms(x, mask=mask, **inputs), mask, aggregation), log_probs
        )

    return formula


def _sequence_ratio(x: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """exp of the mean log-ratio over the unmasked tokens, [B, 1]."""
    return ((x - old).where(mask, 0).sum(1) / mask.sum(1)).exp()[:, None]


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    a = advantages[:, None]
    return -torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _ppo(x: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, **_: Any) -> Tensor:
    return ppo(x, old, advantages, low, high)


def _symmetric(x: Tensor, low: float, high: float, **inputs: Any) -> Tensor:
    return _ppo(x, low=low, high=low, **inputs)


def _two_sided(x: Tensor, dual_clip: float, advantages: Tensor, **inputs: Any) -> Tensor:
    """As TRL's delta and the dual clip: for A < 0 at most -c A."""
    a, terms = advantages[:, None], _ppo(x, advantages=advantages, **inputs)
    return torch.where(a < 0, torch.min(terms, -dual_clip * a), terms)


def _dual_for_all(x: Tensor, dual_clip: float, advantages: Tensor, **inputs: Any) -> Tensor:
    a, terms = advantages[:, None], _ppo(x, advantages=advantages, **inputs)
    return torch.min(terms, -dual_clip * a)


def _gspo(
    x: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, **_: Any
) -> Tensor:
    return _clip(_sequence_ratio(x, old, mask), advantages, low, high).expand_as(x)


def _over_padding(x: Tensor, mask: Tensor, **inputs: Any) -> Tensor:
    return _gspo(x, mask=torch.ones_like(mask), **inputs)


def _product(
    x: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, **_: Any
) -> Tensor:
    ratio = (x - old).where(mask, 0).sum(1).exp()[:, None]
    return _clip(ratio, advantages, low, high).expand_as(x)


def _k3(x: Tensor, ref: Tensor) -> Tensor:
    return (ref - x).exp() - (ref - x) - 1


def _gspo_kl(x: Tensor, ref: Tensor, kl_coef: float, **inputs: Any) -> Tensor:
    return _gspo(x, **inputs) + kl_coef * _k3(x, ref)


def _luspo_unmasked(
    log_probs: Tensor, mask: Tensor, aggregation: str, ref: Tensor, kl_coef: float, **inputs: Any
) -> Tensor:
    """mean over all tokens of terms times the length of the sequence."""

    def loss(x: Tensor) -> Tensor:
        terms = _gspo_kl(x, mask=mask, ref=ref, kl_coef=kl_coef, **inputs)
        return (terms * mask.sum(1, keepdim=True)).mean()

    return with_gradient(loss, log_probs)


def _ppo_kl(x: Tensor, ref: Tensor, kl_coef: float, **inputs: Any) -> Tensor:
    return _ppo(x, **inputs) + kl_coef * _k3(x, ref)


def _kl_of_reward_sign(x: Tensor, ref: Tensor, kl_coef: float, **inputs: Any) -> Tensor:
    return _ppo(x, **inputs) - kl_coef * _k3(x, ref)


def _kl_times_ratio(
    x: Tensor, old: Tensor, ref: Tensor, kl_coef: float, kl_times_ratio: bool, **inputs: Any
) -> Tensor:
    return _ppo(x, old, **inputs) + kl_coef * _k3(x, ref) * (x - old).exp()


def _weighted(x: Tensor, weights: Tensor, ref: Tensor, kl_coef: float, **inputs: Any) -> Tensor:
    return _ppo(x, **inputs) * weights + kl_coef * _k3(x, ref)


def _all_weighted(x: Tensor, weights: Tensor, ref: Tensor, kl_coef: float, **inputs: Any) -> Tensor:
    return _ppo_kl(x, ref, kl_coef, **inputs) * weights


def _unweighted(x: Tensor, weights: Tensor, ref: Tensor, kl_coef: float, **inputs: Any) -> Tensor:
    return _ppo_kl(x, ref, kl_coef, **inputs)


def _cispo(x: Tensor, old: Tensor, advantages: Tensor, high: float, **_: Any) -> Tensor:
    weight = (x - old).exp().clamp(max=1 + high).detach()
    return -weight * advantages[:, None] * x


def _cispo_without_score(
    x: Tensor, old: Tensor, advantages: Tensor, high: float, **_: Any
) -> Tensor:
    """The clipped ratio is the objective: clipped tokens have no gradient."""
    return -(x - old).exp().clamp(max=1 + high) * advantages[:, None]


def _gate(x: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    tau = torch.where(advantages > 0, 1.0, 1.05)[:, None].double()
    return torch.sigmoid(tau * ((x - old).exp() - 1)) * 4 / tau


def _sapo(x: Tensor, old: Tensor, advantages: Tensor, **_: Any) -> Tensor:
    return -_gate(x, old, advantages) * advantages[:, None]


def _sapo_without_advantage(x: Tensor, old: Tensor, advantages: Tensor, **_: Any) -> Tensor:
    return _gate(x, old, advantages)


def _gmpo(
    x: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, **_: Any
) -> Tensor:
    d, a = x - old, advantages[:, None]
    d = torch.where(a > 0, d.clamp(max=high), d.clamp(min=-low))
    return (-advantages * (d.where(mask, 0).sum(1) / mask.sum(1)).exp())[:, None].expand_as(x)


def _gmpo_both_sides(
    x: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, **_: Any
) -> Tensor:
    d = (x - old).clamp(-low, high)
    return (-advantages * (d.where(mask, 0).sum(1) / mask.sum(1)).exp())[:, None].expand_as(x)


def _vespo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """phi(w) of every sequence, [B]."""
    log_w = (log_probs - old).where(mask, 0).sum(1)
    positive = advantages >= 0
    k, lam = torch.where(positive, 2.0, 3.0).double(), torch.where(positive, 3.0, 2.0).double()
    return (lam + k * log_w - lam * log_w.exp()).exp()


def _vespo_over_padding(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return _vespo(log_probs, old, advantages, torch.ones_like(mask))


def _kl(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    k1 = lambda x, ref: x - ref  # noqa: E731
    k2 = lambda x, ref: (x - ref).square() / 2  # noqa: E731
    return {"k1": k1, "k2": k2, "k3": _k3}[kind]


def _kl_case(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    """[sum, gradient]; a trailing "+" has the gradient of k2."""
    value = _kl(kind.removesuffix("+"))
    out = with_gradient(lambda x: value(x, ref), log_probs)
    if kind.endswith("+"):
        out[1:] = (log_probs - ref).flatten()
    return out


def _reversed_kl(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    return with_gradient(lambda x: _kl(kind)(ref, x), log_probs)


def _own_gradient(log_probs: Tensor, ref: Tensor, kind: str) -> Tensor:
    return _kl_case(log_probs, ref, kind.removesuffix("+"))


_TOKEN = {"aggregation": "token-mean", "low": 0.2, "high": 0.28}
_SEQUENCE = {"aggregation": "seq-mean-token-mean", "low": 0.1, "high": 0.1}
_KL = {"ref": REF, "kl_coef": 0.1}
_WEIGHTS = (0.4 * (REF - NEW)).exp()

CASES = (
    Case(
        "clip-higher: the two bounds of the ratio are apart",
        "policy_loss",
        {**_FAR, **_TOKEN},
        _loss(_ppo),
        _loss(_symmetric),
        "https://github.com/areal-project/AReaL/pull/285",
        "One of the two epsilons was used for both bounds.",
    ),
    Case(
        "the dual clip acts on negative advantages only",
        "policy_loss",
        {**_FAR, **_TOKEN, "dual_clip": 1.4},
        _loss(_two_sided),
        _loss(_dual_for_all),
        "https://github.com/thu-ml/tianshou/issues/433",
        "With a positive advantage the bound c A became the loss.",
    ),
    Case(
        "gspo: the ratio of a sequence is over its unmasked tokens",
        "policy_loss",
        {**_FAR, **_SEQUENCE, "mode": "gspo"},
        _loss(_gspo),
        _loss(_over_padding),
        "https://github.com/MakazhanAlpamys/Soup/issues/723",
        "Masked tokens were in the statistic and got a gradient.",
    ),
    Case(
        "gspo: the ratio has the length in its exponent",
        "policy_loss",
        {**BATCH, **_SEQUENCE, "mode": "gspo"},
        _loss(_gspo),
        _loss(_product),
        "https://github.com/MakazhanAlpamys/Soup/pull/744",
        "Without 1 / |y| the ratio is a product that grows with the length.",
    ),
    Case(
        "luspo with a KL term sums over unmasked tokens",
        "policy_loss",
        {
            **BATCH,
            **_KL,
            "aggregation": "seq-mean-token-sum",
            "low": 0.1,
            "high": 0.1,
            "mode": "gspo",
        },
        _loss(_gspo_kl),
        _luspo_unmasked,
        "https://github.com/huggingface/trl/pull/6654",
        "Terms per token were weighted by the length and averaged over the padded width.",
    ),
    Case(
        "cispo: a clipped token keeps its gradient",
        "policy_loss",
        {**_FAR, "aggregation": "token-mean", "low": 1.0, "high": 0.28, "mode": "cispo"},
        _loss(_cispo),
        _loss(_cispo_without_score),
        "https://github.com/allenai/open-instruct/pull/1269",
        "The clipped ratio was the objective itself, without log-probabilities.",
    ),
    Case(
        "sapo: the gate is multiplied by the advantage",
        "policy_loss",
        {**_FAR, "aggregation": "seq-mean-token-mean", "low": 0.2, "high": 0.2, "mode": "sapo"},
        _loss(_sapo),
        _loss(_sapo_without_advantage),
        "https://github.com/unslothai/unsloth-zoo/pull/869",
        "A rewrite kept the gate and lost -A.",
    ),
    Case(
        "gmpo clips on the side to which the advantage pushes",
        "policy_loss",
        {**_FAR, "aggregation": "seq-mean-token-mean", "low": 0.3, "high": 0.3, "mode": "gmpo"},
        _loss(_gmpo),
        _loss(_gmpo_both_sides),
        "https://github.com/callsys/GMPO/issues/4",
        "Formula and code were read as a clip of both sides; PPO's clip has one.",
    ),
    Case(
        "vespo: the weight of a sequence is over its unmasked tokens",
        "vespo_weights",
        {"log_probs": NEW, "old": OLD, "advantages": ADVANTAGES, "mask": MASK},
        _vespo,
        _vespo_over_padding,
        "https://github.com/unslothai/unsloth-zoo/pull/870",
        "The weight of a sequence left out a part of its ratio.",
    ),
    Case(
        "rollout weights multiply the policy term and not the KL term",
        "policy_loss",
        {**BATCH, **_TOKEN, **_KL, "weights": _WEIGHTS},
        _loss(_weighted),
        _loss(_unweighted),
        "https://github.com/linkedin/Liger-Kernel/issues/1082",
        "A fused loss did not apply the engine's weights; gradients were 100 times larger.",
    ),
    Case(
        "the KL term is added to the loss",
        "policy_loss",
        {**BATCH, **_TOKEN, **_KL},
        _loss(_ppo_kl),
        _loss(_kl_of_reward_sign),
        "https://github.com/Unakar/Logic-RL/issues/58",
        "The KL divergence was maximised.",
    ),
    Case(
        "the KL term times the ratio has the gradient of both",
        "policy_loss",
        {**BATCH, **_TOKEN, **_KL, "kl_times_ratio": True},
        _loss(_kl_times_ratio),
        lambda kl_times_ratio, **inputs: _loss(_ppo_kl)(**inputs),
        "https://github.com/huggingface/trl/pull/4638",
        "Off policy, k3 without the importance ratio is biased (arXiv 2512.02556).",
    ),
    Case(
        "k1 is log p - log p_ref",
        "kl",
        {"log_probs": NEW, "ref": REF, "kind": "k1"},
        _kl_case,
        _reversed_kl,
        "https://github.com/marin-community/marin/issues/1708",
        "The estimate was not one of the divergence of the policy from the reference.",
    ),
    Case(
        "k3 is p_ref / p - log(p_ref / p) - 1",
        "kl",
        {"log_probs": NEW, "ref": REF, "kind": "k3"},
        _kl_case,
        _reversed_kl,
        "https://github.com/huggingface/trl/issues/2854",
        "The direction of the ratio decides which divergence it estimates.",
    ),
    Case(
        "k3+ has the value of k3 and the gradient of k2",
        "kl",
        {"log_probs": NEW, "ref": REF, "kind": "k3+"},
        _kl_case,
        _own_gradient,
        "https://github.com/verl-project/verl/pull/6058",
        "The suffix reached the dispatch of the value, and no such estimator ran.",
    ),
)
