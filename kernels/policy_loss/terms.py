"""Per-token policy-gradient terms: the specification of csrc/policy_loss/terms.h.

Plain PyTorch in the dtype of its inputs, differentiated by autograd; in float64 the oracle of every
backend. All tensors are [T]; `seq_` arguments hold a value of the sequence at each of its tokens.
With x = log_probs - old_log_probs and r = exp(x), the loss of a token, to be minimised, is

    ppo_clip   -min(r A, clip(r, 1-lo, 1+hi) A), and for A < 0 at most -c A
               PPO, arXiv 1707.06347 eq. 7; two epsilons: DAPO, arXiv 2503.14476;
               dual clip: arXiv 1912.09729
    gspo       ppo_clip on s = sg[exp(mean_seq x)] p / sg[p]    arXiv 2507.18071
    gmpo       -A_seq exp(mean_seq of x clipped to [-lo, hi] where A pushes out)
                                                                          arXiv 2507.20673
    cispo      -sg[clip(r, 1-lo, 1+hi)] A log p                           arXiv 2506.13585
    sapo       -A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A      arXiv 2511.20347
    dppo_tv    -sg[min(r, c)] A log p unless p - p_old passed hi / -lo where A pushes
    dppo_kl    the same with the binary KL(p_old || p)                    arXiv 2602.04879
    clip_cov   ppo_clip without c, 0 for the selected tokens              arXiv 2505.22617
    kl_cov     -r A, plus cov_kl_coef |x| for the selected tokens         arXiv 2505.22617
    reinforce  -A log p                                        (GPG: arXiv 2504.02546)
    dro        -A log p + dro_beta x^2 / 2                                arXiv 2405.19107
    seq_sapo   sapo on gspo's s

x is clamped to [-20, 20], where its gradient is then zero, so that r stays finite. No finite step
makes a token possible whose log p is -inf: it has no gradient, and a term A log p is 0. Where
log p_old is -inf too, x = 0 and the ratio is 1: neither policy can produce the token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._per_token import choose_number, compute_dtype

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
    "dro",
    "seq_sapo",
)
KERNEL_MODES = (*LOSS_MODES, "value")  # in the order of LossMode; value is that of value_loss
SEQUENCE_RATIO_MODES = ("gspo", "seq_sapo")  # the ratio of a token is that of its sequence
SEQUENCE_MODES = (*SEQUENCE_RATIO_MODES, "gmpo")
SELECTION_MODES = ("clip_cov", "kl_cov")
MODE_ALIASES = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "gpg": "reinforce"}

# In the order of KlType in csrc/policy_loss/terms.h.
KL_TYPES = ("k1", "abs", "k2", "k3")
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}

# A larger difference of log-probs would overflow in k3.
_MAX_KL_INPUT = 80.0

MAX_LOG_RATIO = 20.0
MAX_LOG_SEQUENCE_RATIO = 10.0
_NO_CLIP = float("inf")


_OPTION_BOUNDS: dict[str, dict[str, Any]] = {
    "clip_ratio_low": {"at_least": 0, "infinite": True},
    "clip_ratio_high": {"at_least": 0, "infinite": True},
    "clip_ratio_c": {"above": 1, "infinite": True},
    "tau_pos": {"above": 0},
    "tau_neg": {"above": 0},
    "cov_kl_coef": {"at_least": 0},
    "dro_beta": {"above": 0},
    "kl_input_clamp": {"above": 0, "at_most": _MAX_KL_INPUT},
    "kl_output_clamp": {"above": 0, "infinite": True},
}


class LossOptions(NamedTuple):
    """The numbers in the formulas; a mode reads those that its formula names.

    A clip ratio or a clamp of infinity does not clip.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    cov_kl_coef: float = 1.0
    dro_beta: float = 1.0
    kl_input_clamp: float = 20.0
    kl_output_clamp: float = 10.0

    @staticmethod
    def checked(op: str, loss_mode: str = "", **given: Any) -> LossOptions:
        """Check the options of operator `op`; None as a clip ratio or clamp is infinity.

        Raises ValueError for a negative or NaN clip ratio (cispo takes a clip_ratio_high of -1 or
        more, not below -clip_ratio_low), a clip_ratio_c of 1 or less, a tau, dro_beta or clamp
        that is not positive, a cov_kl_coef that is negative or not finite.
        """
        if given["kl_input_clamp"] is None:
            given["kl_input_clamp"] = _MAX_KL_INPUT
        for name, bounds in _OPTION_BOUNDS.items():
            value = _NO_CLIP if given[name] is None and "infinite" in bounds else given[name]
            if loss_mode == "cispo" and name == "clip_ratio_high":
                bounds = {**bounds, "at_least": max(-1.0, -given["clip_ratio_low"])}
            given[name] = check.number(op, name, value, **bounds)
        return LossOptions(**given)


class TokenTerms(NamedTuple):
    """Terms of every token, [T]."""

    loss: Tensor
    clipped: Tensor  # bool: the upper clip, mask or selection took effect
    clipped_lower: Tensor  # bool: the second bound (dual clip, truncation) took effect
    log_ratio: Tensor  # x before it is clamped, without gradient
    ratio: Tensor  # importance ratio that the mode uses, without gradient


def log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Return log_probs - other_log_probs; 0, without gradient, where both are -inf."""
    neither = log_probs.isneginf() & other_log_probs.isneginf()
    return torch.where(neither, 0, log_probs - other_log_probs)


def clamped_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return log_ratio(log_probs, old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def gmpo_log_ratio(log_ratio: Tensor, advantages: Tensor, options: LossOptions) -> Tensor:
    """Clip x to [-lo, hi] where moving further would raise the objective (GMPO eq. 4)."""
    clipped = log_ratio.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    sign = advantages.sign()
    return torch.where(sign * log_ratio <= sign * clipped, log_ratio, clipped)


def sequence_ratio(log_probs: Tensor, seq_log_ratio: Tensor) -> Tensor:
    """Return s of gspo, whose gradient is s times that of each token's own log-prob."""
    straight_through = torch.where(log_probs.isneginf(), 0, log_probs - log_probs.detach())
    return (straight_through + seq_log_ratio).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()


def _clip(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    clipped = bounded > unclipped
    return torch.where(clipped, bounded, unclipped), clipped


def _dual_clip(
    ratio: Tensor, advantages: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    loss, clipped = _clip(ratio, advantages, options)
    bound = -advantages * options.clip_ratio_c
    lower = (advantages < 0) & (loss > bound)
    return torch.where(lower, bound, loss), clipped, lower


def _sapo(ratio: Tensor, advantages: Tensor, options: LossOptions) -> Tensor:
    tau = choose_number(advantages > 0, options.tau_pos, options.tau_neg, ratio.dtype)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


def _times_log_prob(factor: Tensor, log_probs: Tensor) -> Tensor:
    """Return factor * log_probs; 0, without gradient, for a log-prob of -inf."""
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
    tokens: tuple[Tensor, Tensor, Tensor],
    options: LossOptions,
    seq_log_ratio: Tensor | None = None,
    seq_advantages: Tensor | None = None,
    selected: Tensor | None = None,
) -> TokenTerms:
    """Compute one row of the table above; all tensors are [T].

    tokens: log-probs, old log-probs and advantages.
    seq_log_ratio: mean over the token's sequence of x (gspo, seq_sapo; without gradient) or of
      `gmpo_log_ratio` (gmpo; with its gradient).
    seq_advantages: mean advantage of the token's sequence (gmpo).
    selected: bool, the tokens that `select_by_covariance` chose (clip_cov, kl_cov).
    """
    log_probs, old_log_probs, advantages = tokens
    x = clamped_log_ratio(log_probs, old_log_probs)
    ratio = x.exp()
    clipped = lower = torch.zeros_like(x, dtype=torch.bool)
    if mode == "ppo_clip":
        loss, clipped, lower = _dual_clip(ratio, advantages, options)
    elif mode in SEQUENCE_RATIO_MODES:
        assert seq_log_ratio is not None
        ratio = sequence_ratio(log_probs, seq_log_ratio)
        if mode == "gspo":
            loss, clipped, lower = _dual_clip(ratio, advantages, options)
        else:
            loss = _sapo(ratio, advantages, options)
    elif mode == "gmpo":
        assert seq_log_ratio is not None and seq_advantages is not None
        ratio = seq_log_ratio.exp()
        loss = -seq_advantages * ratio
        outside = x != x.clamp(-options.clip_ratio_low, options.clip_ratio_high)
        clipped, lower = outside & (advantages > 0), outside & (advantages < 0)
    elif mode == "cispo":
        bounded = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high).detach()
        loss = _times_log_prob(-bounded * advantages, log_probs)
        clipped = ratio != bounded
    elif mode == "sapo":
        loss = _sapo(ratio, advantages, options)
    elif mode in ("dppo_tv", "dppo_kl"):
        with torch.no_grad():
            allowed = _dppo_allows(mode, log_probs, old_log_probs, advantages, options)
        weight = ratio.detach().clamp(max=options.clip_ratio_c)
        loss = _times_log_prob(torch.where(allowed, -advantages * weight, 0), log_probs)
        clipped, lower = ~allowed, allowed & (ratio > options.clip_ratio_c)
    elif mode == "clip_cov":
        assert selected is not None
        loss, _ = _clip(ratio, advantages, options)
        loss = torch.where(selected, 0, loss)
        clipped = selected
    elif mode == "kl_cov":
        assert selected is not None
        loss = -advantages * ratio
        loss = torch.where(selected, loss + options.cov_kl_coef * x.abs(), loss)
        clipped = selected
    else:
        loss = _times_log_prob(-advantages, log_probs)
        if mode == "dro":
            loss = loss + 0.5 * options.dro_beta * x.square()
    unclamped = log_ratio(log_probs, old_log_probs).detach()
    return TokenTerms(loss, clipped, lower, unclamped, ratio.detach())


def token_kl(
    kl_type: str,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    kl_input_clamp: float | None = 20.0,
    kl_output_clamp: float | None = 10.0,
) -> Tensor:
    """Estimate KL(policy || reference) per token (joschu.net/blog/kl-approx.html).

    Args:
        kl_type: k1 (alias kl), abs, k2 (mse), k3 (low_var_kl). A trailing "+" keeps the value but
            takes the gradient of k2, the unbiased one.
        log_probs, ref_log_probs: of one shape, floating point; differentiable in both. A token with
            -inf in both has a KL of 0. Exchanged they give KL(reference || policy).
        kl_input_clamp, kl_output_clamp: of k3: ref_log_probs - log_probs is clamped to
            [-kl_input_clamp, kl_input_clamp], the result to kl_output_clamp; the gradient is 0
            there. None: 80, where it would overflow, and no bound.

    Returns:
        The shape of the inputs, float64 for float64, else float32.

    Raises:
        ValueError: an unknown kl_type, a clamp that is not positive, tensors of different shapes or
            on different devices.
    """
    check.not_none("token_kl", log_probs=log_probs, ref_log_probs=ref_log_probs)
    base = check_kl_type("token_kl", kl_type)
    check.same_device("token_kl", log_probs=log_probs, ref_log_probs=ref_log_probs)
    check.floats("token_kl", log_probs=log_probs, ref_log_probs=ref_log_probs)
    if ref_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"token_kl: ref_log_probs has shape {list(ref_log_probs.shape)}; expected "
            f"{list(log_probs.shape)} like log_probs."
        )
    options = LossOptions.checked(
        "token_kl",
        **LossOptions()._asdict()
        | {"kl_input_clamp": kl_input_clamp, "kl_output_clamp": kl_output_clamp},
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
        negative = (-difference).clamp(-options.kl_input_clamp, options.kl_input_clamp)
        value = (negative.expm1() - negative).clamp(max=options.kl_output_clamp)
    if kl_type.endswith("+"):
        return half_square - half_square.detach() + value.detach()
    return value


def check_kl_type(op: str, kl_type: str) -> str:
    """Return the member of KL_TYPES that `kl_type` names, without its "+"."""
    base = str(kl_type).removesuffix("+")
    if base not in KL_TYPES and base not in KL_ALIASES:
        check.choice(op, "kl_type", kl_type, KL_TYPES, tuple(KL_ALIASES))
    return KL_ALIASES.get(base, base)
