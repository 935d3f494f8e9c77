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

from ._backend import choose_backend, native, register_backends
from .aggregation import (
    LOSS_AGG_MODES,
    Segments,
    as_mask,
    check_choice,
    check_shapes,
    denominators,
    kept,
    token_weights,
)
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

register_backends("policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))


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
    check_choice("policy_loss", "loss_mode", loss_mode, LOSS_MODES, MODE_ALIASES)
    check_choice("policy_loss", "loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    check_choice("policy_loss", "kl_type", kl_type.removesuffix("+"), KL_TYPES, KL_ALIASES)
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
    check_shapes("policy_loss", "log_probs", log_probs, per_token)
    backend = choose_backend("policy_loss", log_probs.device, backend)
    counted = denominators(
        "policy_loss",
        loss_agg_mode,
        as_mask(response_mask, log_probs),
        cu_seqlens,
        global_num_tokens,
        global_num_seqs,
    )
    options = LossOptions(
        clip_ratio_low, clip_ratio_high, clip_ratio_c, tau_pos, tau_neg, cov_kl_coef
    )
    plan = _Plan(loss_mode, loss_agg_mode, kl_type, kl_coef, entropy_coeff, loss_scale_factor)
    if backend == "reference":
        loss, sums = _reference(log_probs, per_token, cu_seqlens, counted, plan, options)
    else:
        loss, sums = _kernel(backend, log_probs, per_token, cu_seqlens, counted, plan, options)
    metrics = dict(zip(_METRICS, sums.unbind(), strict=True))
    if ref_log_probs is None:
        del metrics["kl_loss"]
    if entropy is None:
        del metrics["entropy"]
    return loss, metrics


# The order is that of PolicyLossSum in csrc/policy_loss/params.h.
_METRICS = (
    "pg_loss",
    "kl_loss",
    "entropy",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "ratio_mean",
    "ratio_max",
)


class _Plan(NamedTuple):
    loss_mode: str
    loss_agg_mode: str
    kl_type: str
    kl_coef: float
    entropy_coeff: float
    loss_scale_factor: float | None


def _reference(log_probs, per_token, cu_seqlens, counted, plan, options):
    """(loss, metrics in the order of _METRICS): plain PyTorch, differentiated by autograd."""
    mask = as_mask(per_token["response_mask"], log_probs)
    segments = None if cu_seqlens is None else Segments.of(cu_seqlens, mask)
    num_tokens, num_seqs = counted.unbind()
    weights = token_weights(
        plan.loss_agg_mode, mask, segments, num_tokens, num_seqs, plan.loss_scale_factor
    ).to(log_probs.dtype)
    terms = _reference_terms(plan.loss_mode, log_probs, per_token, mask, segments, options)
    pg_loss = (weights * terms.loss).sum()
    kl_loss = entropy = pg_loss.new_zeros(())
    if per_token["ref_log_probs"] is not None:
        ref = kept(per_token["ref_log_probs"].detach(), mask)
        kl_loss = (weights * token_kl(plan.kl_type, kept(log_probs, mask), ref)).sum()
    if per_token["entropy"] is not None:
        entropy = (weights * kept(per_token["entropy"], mask)).sum()
    loss = pg_loss + plan.kl_coef * kl_loss - plan.entropy_coeff * entropy
    means = [
        kept(value.to(weights.dtype), mask).sum() / num_tokens
        for value in (terms.clipped, terms.clipped_lower, -terms.log_ratio, terms.ratio)
    ]
    lowest = weights.new_full((1,), -torch.inf)
    ratio_max = torch.cat([lowest, torch.where(mask, terms.ratio, -torch.inf)]).max()
    sums = [pg_loss, kl_loss, entropy, *means, ratio_max]
    return loss, torch.stack([value.detach().to(weights.dtype) for value in sums])


def _reference_terms(loss_mode, log_probs, per_token, mask, segments, options):
    """Per-token terms in plain PyTorch; masked tokens are replaced before any arithmetic."""
    log_probs = kept(log_probs, mask)
    old = kept(per_token["old_log_probs"].detach(), mask)
    advantages = kept(per_token["advantages"].detach(), mask)
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


def _check_needs(loss_mode, loss_agg_mode, cu_seqlens, selected, scale, clip_ratio_c) -> None:
    if cu_seqlens is None and loss_mode in SEQUENCE_MODES:
        raise ValueError(
            f"policy_loss: loss_mode {loss_mode!r} works on sequences; give cu_seqlens"
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


def _kernel(backend, log_probs, per_token, cu_seqlens, counted, plan, options):
    """(loss, metrics in the order of _METRICS) from a kernel."""

    def floats(name):
        tensor = per_token[name]
        return None if tensor is None else tensor.detach().float().contiguous()

    def bools(name):
        tensor = per_token[name]
        return None if tensor is None else tensor.bool().contiguous()

    entropy = per_token["entropy"]
    enabled = torch.is_grad_enabled()
    base = plan.kl_type.removesuffix("+")
    loss, sums, *_ = torch.ops.hybridengine.policy_loss(
        log_probs.float().contiguous(),
        None if entropy is None else entropy.float().contiguous(),
        floats("old_log_probs"),
        floats("advantages"),
        bools("response_mask"),
        bools("selected"),
        floats("ref_log_probs"),
        floats("rollout_is_weights"),
        None if cu_seqlens is None else cu_seqlens.int().contiguous(),
        counted,
        [
            LOSS_MODES.index(plan.loss_mode),
            LOSS_AGG_MODES.index(plan.loss_agg_mode),
            KL_TYPES.index(KL_ALIASES.get(base, base)),
            plan.kl_type.endswith("+"),
            enabled and log_probs.requires_grad,
            enabled and entropy is not None and entropy.requires_grad,
        ],
        [*options, plan.kl_coef, plan.entropy_coeff, plan.loss_scale_factor or 1.0],
        backend,
    )
    return loss, sums


@torch.library.custom_op("hybridengine::policy_loss", mutates_args=())
def _policy_loss(
    log_probs: Tensor,
    entropy: Tensor | None,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    selected: Tensor | None,
    ref_log_probs: Tensor | None,
    is_weights: Tensor | None,
    cu_seqlens: Tensor | None,
    denominators: Tensor,
    plan: list[int],
    numbers: list[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, metrics [8], d loss / d log_probs, d loss / d entropy; those empty if unwanted).

    plan: loss mode, aggregation mode, KL type, its straight-through form or not, whether each of
    the two gradients is wanted. numbers: LossOptions, kl_coef, entropy_coeff, loss_scale_factor.
    Few arguments on purpose: torch.library's time per call grows with the square of their number.
    """
    if backend == "triton":
        from .policy_loss_triton import policy_loss_triton as run
    else:
        run = native().policy_loss
    *modes, straight_through, wants_gradient, wants_entropy_gradient = plan
    sums, gradient, entropy_gradient = run(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        selected,
        ref_log_probs,
        entropy,
        is_weights,
        cu_seqlens,
        denominators,
        *modes,
        bool(straight_through),
        numbers[:-3],
        numbers[-3:],
        bool(wants_gradient),
        bool(wants_entropy_gradient),
    )
    return sums[0].clone(), sums[1:].clone(), gradient, entropy_gradient


@_policy_loss.register_fake
def _(log_probs, *args):
    *_, wants_gradient, wants_entropy_gradient = args[-3]
    num_tokens = log_probs.size(0)
    return (
        log_probs.new_empty(()),
        log_probs.new_empty(len(_METRICS)),
        log_probs.new_empty(num_tokens if wants_gradient else 0),
        log_probs.new_empty(num_tokens if wants_entropy_gradient else 0),
    )


def _setup_policy_loss(ctx, inputs, output):
    _, sums, gradient, entropy_gradient = output
    ctx.set_materialize_grads(False)  # else zeros as large as the gradients, for nobody
    ctx.mark_non_differentiable(sums, gradient, entropy_gradient)
    ctx.save_for_backward(gradient, entropy_gradient)


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    # On the CPU looking costs nothing, and the usual scale of 1 saves a pass; a traced tensor (a
    # subclass) has no value to look at.
    if type(scale) is Tensor and scale.device.type == "cpu" and scale == 1:
        return gradient
    return gradient * scale


def _backward_policy_loss(ctx, grad_loss, *_):
    gradient, entropy_gradient = ctx.saved_tensors
    for_log_probs = _scaled(gradient, grad_loss) if ctx.needs_input_grad[0] else None
    for_entropy = _scaled(entropy_gradient, grad_loss) if ctx.needs_input_grad[1] else None
    return for_log_probs, for_entropy, *[None] * 11


_policy_loss.register_autograd(_backward_policy_loss, setup_context=_setup_policy_loss)
