"""Per-token policy-gradient and KL terms: the specification of csrc/policy_loss/token_loss.h.

Plain PyTorch in whatever dtype it is given, differentiated by autograd; in float64 it is the oracle
of every backend. T tokens lie packed; "segment" arguments are already spread over the tokens.
With x = log_probs - old_log_probs and r = exp(x), the loss of a token, to be minimised, is

    ppo_clip   -min(r A, clip(r, 1-lo, 1+hi) A), and for A < 0 at most -c A
               PPO, arXiv 1707.06347 eq. 7; two epsilons: DAPO, arXiv 2503.14476;
               dual clip: arXiv 1912.09729
    gspo       ppo_clip without c on s = sg[exp(mean_seq x)] p / sg[p]    arXiv 2507.18071
    gmpo       -A_seq exp(mean_seq of x clipped to [-lo, hi] where A pushes out)
                                                                          arXiv 2507.20673
    cispo      -sg[clip(r, 1-lo, 1+hi)] A log p                           arXiv 2506.13585
    sapo       -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A      arXiv 2511.20347
    dppo_tv    -sg[min(r, c)] A log p unless p - p_old passed hi / -lo where A pushes
    dppo_kl    the same with the binary KL(p_old || p)                    arXiv 2602.04879
    clip_cov   ppo_clip without c, 0 for the selected tokens              arXiv 2505.22617
    kl_cov     -r A, plus cov_kl_coef |x| for the selected tokens         arXiv 2505.22617
    reinforce  -A log p                                        (GPG: arXiv 2504.02546)

x is clamped to [-20, 20], where its gradient is then zero, so that r stays finite. No finite step
makes a token possible whose log p is -inf: it has no gradient, and a term A log p is 0. Where
log p_old is -inf too, x = 0 and the ratio is 1: neither policy can produce the token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .aggregation import as_mask, check_given, compute_dtype, token_arguments

LOSS_MODES = (
    "ppo_clip",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "reinforce",
)
SEQUENCE_MODES = ("gspo", "gmpo")
SELECTION_MODES = ("clip_cov", "kl_cov")
MODE_ALIASES = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "gpg": "reinforce"}

KL_TYPES = ("k1", "abs", "k2", "k3")
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

_OFF = float("inf")
_MAX_LOG_RATIO = 20.0
_MAX_LOG_SEQUENCE_RATIO = 10.0
_MAX_K3 = 10.0


class LossOptions(NamedTuple):
    """The numbers a loss mode reads; each is used by the modes whose formula names it.

    A clip ratio of infinity does not clip.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    cov_kl_coef: float = 1.0

    @staticmethod
    def checked(
        op: str,
        clip_ratio_low: float | None,
        clip_ratio_high: float | None,
        clip_ratio_c: float | None,
        tau_pos: float,
        tau_neg: float,
        cov_kl_coef: float,
    ) -> LossOptions:
        """The options of operator `op`; None as a clip ratio is infinity.

        Raises ValueError for a negative or NaN clip ratio, a clip_ratio_c of 1 or less, a tau that
        is not positive and finite, a cov_kl_coef that is negative or not finite.
        """

        def clip(name: str, value: float | None, **bound: float) -> float:
            return check.number(op, name, _OFF if value is None else value, infinite=True, **bound)

        return LossOptions(
            clip("clip_ratio_low", clip_ratio_low, at_least=0),
            clip("clip_ratio_high", clip_ratio_high, at_least=0),
            clip("clip_ratio_c", clip_ratio_c, above=1),
            check.number(op, "tau_pos", tau_pos, above=0),
            check.number(op, "tau_neg", tau_neg, above=0),
            check.number(op, "cov_kl_coef", cov_kl_coef, at_least=0),
        )


class TokenLoss(NamedTuple):
    """Terms of every token, [T]."""

    loss: Tensor
    clipped: Tensor  # bool: the upper clip, mask or selection took effect
    clipped_lower: Tensor  # bool: the second bound (dual clip, truncation) took effect
    log_ratio: Tensor  # x before it is clamped, without gradient
    ratio: Tensor  # what the mode weighs the token by, without gradient


def log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """log_probs - other_log_probs; 0, without gradient, where both are -inf."""
    neither = log_probs.isneginf() & other_log_probs.isneginf()
    return torch.where(neither, 0, log_probs - other_log_probs)


def clamped_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return log_ratio(log_probs, old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def gmpo_log_ratio(log_ratio: Tensor, advantages: Tensor, options: LossOptions) -> Tensor:
    """x, clipped to [-lo, hi] only where moving on would raise the objective (GMPO eq. 4)."""
    clipped = log_ratio.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    sign = advantages.sign()
    return torch.where(sign * log_ratio <= sign * clipped, log_ratio, clipped)


def _clip(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    clipped = bounded > unclipped
    return torch.where(clipped, bounded, unclipped), clipped


def _times_log_prob(factor: Tensor, log_probs: Tensor) -> Tensor:
    """factor * log_probs; 0, without gradient, for a log-prob of -inf."""
    return factor * torch.where(log_probs.isneginf(), 0, log_probs)


def _binary_kl(p: Tensor, p_old: Tensor, x: Tensor) -> Tensor:
    rest = torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    return (1 - p_old) * rest - torch.where(p_old > 0, p_old * x, 0)


def _dppo_allows(
    mode: str, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, options: LossOptions
) -> Tensor:
    p, p_old = log_probs.exp(), old_log_probs.exp()
    if mode == "dppo_tv":
        up = p - p_old <= options.clip_ratio_high
        down = p - p_old >= -options.clip_ratio_low
    else:
        kl = _binary_kl(p, p_old, log_ratio(log_probs, old_log_probs))
        up = (kl <= options.clip_ratio_high) | (p <= p_old)
        down = (kl <= options.clip_ratio_low) | (p >= p_old)
    return torch.where(advantages > 0, up, down)


def token_loss(
    mode: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    options: LossOptions,
    *,
    segment_log_ratio: Tensor | None = None,
    segment_advantages: Tensor | None = None,
    selected: Tensor | None = None,
) -> TokenLoss:
    """The table above, one row; all tensors [T].

    segment_log_ratio: mean over the token's sequence of x (gspo; without gradient) or of
        `gmpo_log_ratio` (gmpo; with its gradient).
    segment_advantages: mean advantage of the token's sequence (gmpo).
    selected: bool, the tokens that clip_cov and kl_cov single out.
    """
    x = clamped_log_ratio(log_probs, old_log_probs)
    ratio = x.exp()
    never = torch.zeros_like(x, dtype=torch.bool)
    clipped, lower = never, never
    if mode == "ppo_clip":
        loss, clipped = _clip(ratio, advantages, options)
        bound = -advantages * options.clip_ratio_c
        lower = (advantages < 0) & (loss > bound)
        loss = torch.where(lower, bound, loss)
    elif mode == "gspo":
        straight = torch.where(log_probs.isneginf(), 0, log_probs - log_probs.detach())
        ratio = (straight + segment_log_ratio).clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
        loss, clipped = _clip(ratio, advantages, options)
    elif mode == "gmpo":
        ratio = segment_log_ratio.exp()
        loss = -segment_advantages * ratio
        outside = x != x.clamp(-options.clip_ratio_low, options.clip_ratio_high)
        clipped, lower = outside & (advantages > 0), outside & (advantages < 0)
    elif mode == "cispo":
        bounded = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high).detach()
        loss = _times_log_prob(-bounded * advantages, log_probs)
        clipped = ratio != bounded
    elif mode == "sapo":
        tau = torch.where(advantages > 0, options.tau_pos, options.tau_neg).to(x.dtype)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    elif mode in ("dppo_tv", "dppo_kl"):
        with torch.no_grad():
            allowed = _dppo_allows(mode, log_probs, old_log_probs, advantages, options)
        weight = ratio.detach().clamp(max=options.clip_ratio_c)
        loss = _times_log_prob(torch.where(allowed, -advantages * weight, 0), log_probs)
        clipped, lower = ~allowed, allowed & (ratio > options.clip_ratio_c)
    elif mode == "clip_cov":
        loss, _ = _clip(ratio, advantages, options)
        loss = torch.where(selected, 0, loss)
        clipped = selected
    elif mode == "kl_cov":
        loss = -advantages * ratio
        loss = torch.where(selected, loss + options.cov_kl_coef * x.abs(), loss)
        clipped = selected
    else:
        loss = _times_log_prob(-advantages, log_probs)
    unclamped = log_ratio(log_probs, old_log_probs).detach()
    return TokenLoss(loss, clipped, lower, unclamped, ratio.detach())


def token_kl(kl_type: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL(policy || reference) estimated per token (joschu.net/blog/kl-approx.html).

    Args:
        kl_type: k1 (alias kl), abs, k2 (mse), k3 (low_var_kl, clamped to 10). A trailing "+" keeps
            the value but takes the gradient of k2, the unbiased one.
        log_probs, ref_log_probs: of one shape, floating point; differentiable in both. A token with
            -inf in both has a KL of 0.

    Returns:
        The shape of the inputs, float64 for float64, else float32.

    Raises:
        ValueError: an unknown kl_type, tensors of different shapes or on different devices.
    """
    check_given("token_kl", log_probs=log_probs, ref_log_probs=ref_log_probs)
    base = check_kl_type("token_kl", kl_type)
    check.same_device("token_kl", log_probs=log_probs, ref_log_probs=ref_log_probs)
    check.floats("token_kl", log_probs=log_probs, ref_log_probs=ref_log_probs)
    if ref_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"token_kl: ref_log_probs has shape {list(ref_log_probs.shape)}; expected "
            f"{list(log_probs.shape)} like log_probs."
        )
    dtype = compute_dtype(log_probs)
    difference = log_ratio(log_probs.to(dtype), ref_log_probs.to(dtype))
    half_square = 0.5 * difference.square()
    if base == "k1":
        value = difference
    elif base == "abs":
        value = difference.abs()
    elif base == "k2":
        value = half_square
    else:
        negative = (-difference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        value = (negative.expm1() - negative).clamp(max=_MAX_K3)
    if kl_type.endswith("+"):
        return half_square - half_square.detach() + value.detach()
    return value


def check_kl_type(op: str, kl_type: str) -> str:
    """The member of KL_TYPES that `kl_type` names, without its "+"."""
    base = str(kl_type).removesuffix("+")
    if base not in KL_TYPES and base not in KL_ALIASES:
        check.choice(op, "kl_type", kl_type, KL_TYPES, tuple(KL_ALIASES))
    return KL_ALIASES.get(base, base)


def select_by_covariance(
    log_probs: Tensor,
    advantages: Tensor,
    *,
    loss_mode: str,
    ratio: float = 2e-4,
    response_mask: Tensor | None = None,
    lower: float = 1.0,
    upper: float = 5.0,
    excluded: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Select the tokens that clip_cov and kl_cov single out (arXiv 2505.22617, eq. 10-13).

    cov_t = (A_t - mean A) (log p_t - mean log p), means over the unmasked. kl_cov takes the
    `ratio` of tokens with the largest cov; clip_cov a random `ratio` of all tokens from those with
    lower < cov < upper; at least one token where there is one. Means and counts are those of this
    call: for a loss that does not depend on the split, choose once over the whole batch and
    give policy_loss the parts. Nothing waits for the GPU.

    Args:
        log_probs, advantages: of one shape, floating point. A token with a log-prob of -inf counts
            as masked: it would make every covariance infinite.
        loss_mode: clip_cov or kl_cov.
        response_mask: the same shape, bool or 0/1; None: all count.
        excluded: the same shape, bool or 0/1: tokens clip_cov leaves out (verl: those the ratio
            clip already caught).
        generator: of the random choice, on the device of log_probs.

    Returns:
        bool, the shape of log_probs.

    Raises:
        ValueError: another mode, a ratio outside (0, 1], lower above upper, shapes, devices.
    """
    op = "select_by_covariance"
    check_given(op, log_probs=log_probs, advantages=advantages)
    check.choice(op, "loss_mode", loss_mode, SELECTION_MODES)
    check.number(op, "ratio", ratio, above=0, at_most=1)
    check.number(op, "lower", lower, infinite=True)
    check.number(op, "upper", upper, infinite=True)
    check.ordered(op, "lower", lower, "upper", upper)
    given, _ = token_arguments(
        op,
        {"log_probs": log_probs.detach(), "advantages": advantages.detach()},
        {"response_mask": response_mask, "excluded": excluded},
        None,
    )
    flat = given["log_probs"].to(compute_dtype(log_probs))
    mask = as_mask(given["response_mask"], flat) & ~flat.isneginf()
    count = mask.sum()

    def centred(values: Tensor) -> Tensor:
        values = torch.where(mask, values, 0)
        return values - values.sum() / count.clamp(min=1)

    covariance = centred(given["advantages"].to(flat.dtype)) * centred(flat)
    eligible, score = mask, covariance
    if loss_mode == "clip_cov":
        eligible = mask & (covariance > lower) & (covariance < upper)
        if given["excluded"] is not None:
            eligible = eligible & ~given["excluded"]
        score = torch.rand(score.shape, generator=generator, device=score.device)
    order = torch.where(eligible, score, -torch.inf).argsort(descending=True, stable=True)
    wanted = (count.double() * ratio).long().clamp(min=1)
    first = torch.arange(order.numel(), device=order.device) < wanted
    selected = torch.zeros_like(mask)
    selected[order] = first
    return (selected & eligible).view(log_probs.shape)
