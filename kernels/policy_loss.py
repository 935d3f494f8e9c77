"""policy_loss: the policy-gradient losses of the field over packed tokens, globally normalised.

All aggregation modes are one weight per token, so

    loss = sum_t weight_t (pg_t + kl_coef kl_t - entropy_coeff entropy_t)

and, the denominators being those of the whole global batch, the losses (and gradients) of
micro-batches and ranks add up to the loss of the batch, however it is split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .token_loss import (
    KL_ALIASES,
    KL_TYPES,
    LOSS_MODES,
    MODE_ALIASES,
    SELECTION_MODES,
    SEQUENCE_MODES,
    LossOptions,
    clamped_log_ratio,
    gmpo_log_ratio,
    token_kl,
    token_loss,
)

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    response_mask: Tensor | None = None,
    loss_mode: str = "ppo_clip",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    selected: Tensor | None = None,
    cov_kl_coef: float = 1.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
    global_num_tokens: float | Tensor | None = None,
    global_num_seqs: float | Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
    rollout_is_weights: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and its metrics.

    Args:
        log_probs: [T] of the policy being trained; differentiable.
        old_log_probs, advantages: [T], constants.
        response_mask: [T] bool, the tokens that count; what masked tokens hold, NaN included, does
            not matter. None: all count.
        loss_mode: a row of the table in token_loss.py, which has the formulas and their sources:
            ppo_clip (vanilla), gspo, gmpo (geo_mean), cispo, sapo, dppo_tv, dppo_kl, clip_cov,
            kl_cov, reinforce (gpg).
        clip_ratio_low, clip_ratio_high, clip_ratio_c: lo, hi and c of that table. clip_ratio_c
            must exceed 1; float("inf") switches the dual clip off.
        tau_pos, tau_neg: of sapo.
        selected: [T] bool, for clip_cov and kl_cov: the tokens `select_by_covariance` chose.
        cov_kl_coef: of kl_cov.
        loss_agg_mode: the weight of an unmasked token; N tokens and S sequences with a token,
            both global, and L the unmasked tokens of its own sequence:
            token-mean 1/N, token-sum 1, seq-mean-token-sum 1/S, seq-mean-token-mean 1/(S L),
            seq-mean-token-sum-norm 1/(S loss_scale_factor).
        cu_seqlens: [n + 1] int32; needed by gspo, gmpo and the seq-mean modes.
        global_num_tokens, global_num_seqs: N and S, a number or a 0-d tensor; None counts what is
            here, which is right only where this call sees the whole global batch.
        ref_log_probs, kl_coef, kl_type: adds kl_coef * kl; kl_type is k1 (kl), abs, k2 (mse) or
            k3 (low_var_kl), with a "+" behind it for the gradient of k2.
        entropy: [T], differentiable; subtracts entropy_coeff * entropy.
        rollout_is_weights: [T], constants that multiply pg (of gmpo: its sequence's geometric
            mean); see rollout_correction.

    Returns:
        (loss, metrics). loss is a 0-d tensor; metrics are 0-d tensors on the device, without
        gradient. pg_loss, kl_loss and entropy are aggregated like the loss; pg_clipfrac,
        pg_clipfrac_lower, ppo_kl and ratio_mean are sums over unmasked tokens divided by N: add
        these up over micro-batches and ranks. ratio_max is a maximum (-inf with no token).
        Keys whose input is absent are absent.

    Raises:
        ValueError: an unknown mode, a tensor of another shape, an argument that a mode needs.

    Example:
        >>> log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> loss, metrics = policy_loss(log_probs, log_probs.detach(), torch.tensor([1.0, -3.0]))
        >>> loss.item(), metrics["pg_clipfrac"].item()
        (1.0, 0.0)
    """
    loss_mode = MODE_ALIASES.get(loss_mode, loss_mode)
    _check_choice("loss_mode", loss_mode, LOSS_MODES, MODE_ALIASES)
    _check_choice("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    _check_choice("kl_type", kl_type.removesuffix("+"), KL_TYPES, KL_ALIASES)
    _check_needs(loss_mode, loss_agg_mode, cu_seqlens, selected, loss_scale_factor, clip_ratio_c)
    per_token = {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "response_mask": response_mask,
        "selected": selected if loss_mode in SELECTION_MODES else None,
        "ref_log_probs": ref_log_probs,
        "entropy": entropy,
        "rollout_is_weights": rollout_is_weights,
    }
    _check_shapes(log_probs, per_token)
    mask = _as_mask(response_mask, log_probs)
    num_tokens = _denominator(global_num_tokens, mask.sum())
    segments = None
    if cu_seqlens is not None:
        segments = Segments.of(cu_seqlens, mask)
        local_seqs = (segments.counts > 0).sum()
    else:
        local_seqs = torch.ones((), device=mask.device)
    num_seqs = _denominator(global_num_seqs, local_seqs)
    weights = _token_weights(loss_agg_mode, mask, segments, num_tokens, num_seqs, loss_scale_factor)
    options = LossOptions(
        clip_ratio_low, clip_ratio_high, clip_ratio_c, tau_pos, tau_neg, cov_kl_coef
    )
    terms = _reference_terms(loss_mode, log_probs, per_token, mask, segments, options)

    metrics = {"pg_loss": (weights * terms.loss).sum()}
    loss = metrics["pg_loss"]
    if ref_log_probs is not None:
        ref = torch.where(mask, ref_log_probs, 0).detach()
        metrics["kl_loss"] = (weights * token_kl(kl_type, _kept(log_probs, mask), ref)).sum()
        loss = loss + kl_coef * metrics["kl_loss"]
    if entropy is not None:
        metrics["entropy"] = (weights * _kept(entropy, mask)).sum()
        loss = loss - entropy_coeff * metrics["entropy"]
    for name, value in (
        ("pg_clipfrac", terms.clipped),
        ("pg_clipfrac_lower", terms.clipped_lower),
        ("ppo_kl", -terms.log_ratio),
        ("ratio_mean", terms.ratio),
    ):
        metrics[name] = torch.where(mask, value, 0).sum() / num_tokens
    lowest = torch.full((1,), -torch.inf, dtype=terms.ratio.dtype, device=mask.device)
    metrics["ratio_max"] = torch.cat([lowest, torch.where(mask, terms.ratio, -torch.inf)]).max()
    return loss, {name: value.detach() for name, value in metrics.items()}


class Segments(NamedTuple):
    """Which sequence a token belongs to; those past the last belong to an extra, ignored one."""

    ids: Tensor  # [T] int64
    counts: Tensor  # [n + 1] int64, unmasked tokens

    @staticmethod
    def of(cu_seqlens: Tensor, mask: Tensor) -> Segments:
        places = torch.arange(mask.numel(), device=mask.device)
        ids = torch.searchsorted(cu_seqlens[1:].long(), places, right=True)
        counts = torch.zeros(cu_seqlens.numel(), dtype=torch.int64, device=mask.device)
        return Segments(ids, counts.index_add(0, ids, mask.long()))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the unmasked tokens of the sequence, spread to its tokens, [T]."""
        sums = torch.zeros(self.counts.shape, dtype=values.dtype, device=values.device)
        sums = sums.index_add(0, self.ids, torch.where(mask, values, 0))
        return (sums / self.counts.clamp(min=1))[self.ids]


def _reference_terms(loss_mode, log_probs, per_token, mask, segments, options):
    """Per-token terms in plain PyTorch; masked tokens are replaced before any arithmetic."""
    log_probs = _kept(log_probs, mask)
    old = _kept(per_token["old_log_probs"].detach(), mask)
    advantages = _kept(per_token["advantages"].detach(), mask)
    is_weights = per_token["rollout_is_weights"]
    if is_weights is not None:
        is_weights = torch.where(mask, is_weights.detach(), 1)
    selected = per_token["selected"]
    segment_log_ratio = segment_advantages = None
    if loss_mode in SEQUENCE_MODES:
        x = clamped_log_ratio(log_probs.detach(), old)
        if loss_mode == "gmpo":
            x = gmpo_log_ratio(x, advantages, options)
            segment_advantages = segments.mean(advantages, mask)
            if is_weights is not None:
                is_weights = segments.mean(torch.log(is_weights + 1e-10), mask).exp()
        segment_log_ratio = segments.mean(x, mask)
    terms = token_loss(
        loss_mode,
        log_probs,
        old,
        advantages,
        options,
        segment_log_ratio=segment_log_ratio,
        segment_advantages=segment_advantages,
        selected=None if selected is None else selected & mask,
    )
    loss = terms.loss if is_weights is None else terms.loss * is_weights
    return terms._replace(loss=torch.where(mask, loss, 0))


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0)


def _as_mask(response_mask: Tensor | None, log_probs: Tensor) -> Tensor:
    if response_mask is None:
        return torch.ones_like(log_probs, dtype=torch.bool)
    return response_mask.bool()


def _denominator(given: float | Tensor | None, counted: Tensor) -> Tensor:
    value = counted if given is None else torch.as_tensor(given, device=counted.device)
    return value.clamp(min=1)


def _token_weights(loss_agg_mode, mask, segments, num_tokens, num_seqs, loss_scale_factor):
    """[T], what each token's terms are multiplied by in the loss; 0 where masked."""
    if loss_agg_mode == "token-mean":
        weight = 1 / num_tokens
    elif loss_agg_mode == "token-sum":
        weight = torch.ones_like(num_tokens)
    elif loss_agg_mode == "seq-mean-token-sum":
        weight = 1 / num_seqs
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        weight = 1 / (num_seqs * loss_scale_factor)
    else:
        weight = 1 / (num_seqs * segments.counts.clamp(min=1)[segments.ids])
    return torch.where(mask, weight, 0)


def _check_choice(name: str, value: str, known: tuple[str, ...], aliases=()) -> None:
    if value not in known and value not in aliases:
        raise ValueError(
            f"policy_loss: {name} is {value!r}; expected one of {', '.join((*known, *aliases))}"
        )


def _check_needs(loss_mode, loss_agg_mode, cu_seqlens, selected, scale, clip_ratio_c) -> None:
    if cu_seqlens is None and (loss_mode in SEQUENCE_MODES or loss_agg_mode.startswith("seq")):
        raise ValueError(
            f"policy_loss: loss_mode {loss_mode!r} with loss_agg_mode {loss_agg_mode!r} works on "
            "sequences; give cu_seqlens"
        )
    if loss_mode in SELECTION_MODES and selected is None:
        raise ValueError(
            f"policy_loss: loss_mode {loss_mode!r} needs selected [T] bool; "
            "select_by_covariance makes it"
        )
    if loss_agg_mode == "seq-mean-token-sum-norm" and not scale:
        raise ValueError(
            "policy_loss: loss_agg_mode 'seq-mean-token-sum-norm' needs loss_scale_factor, "
            "usually the longest response allowed"
        )
    if not clip_ratio_c > 1:
        raise ValueError(f"policy_loss: clip_ratio_c is {clip_ratio_c}; expected more than 1")


def _check_shapes(log_probs: Tensor, per_token: dict[str, Tensor | None]) -> None:
    if log_probs.dim() != 1:
        raise ValueError(
            f"policy_loss: log_probs has shape {list(log_probs.shape)}; expected [T], packed: "
            "see hybridengine.kernels.pack"
        )
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != log_probs.shape:
            raise ValueError(
                f"policy_loss: {name} has shape {list(tensor.shape)}; expected "
                f"{list(log_probs.shape)} like log_probs"
            )
