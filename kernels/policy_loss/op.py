"""policy_loss: the policy-gradient losses of the field over packed tokens, globally normalised.

All aggregation modes are one weight per token, so

    loss = sum_t weight_t (pg_t + kl_coef kl_t - entropy_coeff entropy_t)

and, the denominators being those of the whole global batch, the losses (and gradients) of
micro-batches and ranks add up to the loss of the batch, however it is split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .aggregation import (
    LOSS_AGG_MODES,
    as_mask,
    check_aggregation,
    check_given,
    denominators,
    token_arguments,
)
from .reference import LossPlan, policy_loss_reference
from .terms import (
    KL_TYPES,
    LOSS_MODES,
    MODE_ALIASES,
    SELECTION_MODES,
    SEQUENCE_MODES,
    LossOptions,
    check_kl_type,
)

register_backends("policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    response_mask: Tensor | None = None,
    loss_mode: str = "ppo_clip",
    clip_ratio_low: float | None = 0.2,
    clip_ratio_high: float | None = 0.2,
    clip_ratio_c: float | None = 3.0,
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
    """Compute the loss to minimise, and its metrics.

    Per-token arguments are [T], packed tokens with the sequences at cu_seqlens, or [B, L], whose
    rows are the sequences; all of one shape and on one device. Numbers are of floating point; masks
    are bool or 0/1 numbers.

    Args:
        log_probs: of the policy being trained; differentiable.
        old_log_probs, advantages: constants.
        response_mask: the tokens that count; what masked tokens hold, NaN included, does not
            matter. None: all count.
        loss_mode: a row of the table in token_loss.py, which has the formulas and their sources:
            ppo_clip (vanilla), gspo, gmpo (geo_mean), cispo, sapo, dppo_tv, dppo_kl, clip_cov,
            kl_cov, reinforce (gpg).
        clip_ratio_low, clip_ratio_high, clip_ratio_c: lo, hi and c of that table; lo and hi are not
            negative, c is above 1. None (or infinity) switches that clip off.
        tau_pos, tau_neg: of sapo; positive.
        selected: for clip_cov and kl_cov: the tokens `select_by_covariance` chose.
        cov_kl_coef: of kl_cov.
        loss_agg_mode: the weight of an unmasked token; N tokens and S sequences with a token,
            both global, and L the unmasked tokens of its own sequence:
            token-mean 1/N, token-sum 1, seq-mean-token-sum 1/S, seq-mean-token-mean 1/(S L),
            seq-mean-token-sum-norm 1/(S loss_scale_factor).
        cu_seqlens: [n + 1] int32 or int64, beside [T]; needed by gspo, gmpo and the seq-mean
            modes. Tokens past its end must be masked.
        global_num_tokens, global_num_seqs: N and S, a number or a tensor with one element; None
            counts what is here, which is right only where this call sees the whole global batch.
            Below 1 they count as 1.
        ref_log_probs, kl_coef, kl_type: adds kl_coef * kl; kl_type is k1 (kl), abs, k2 (mse) or
            k3 (low_var_kl), with a "+" behind it for the gradient of k2.
        entropy: differentiable; subtracts entropy_coeff * entropy.
        rollout_is_weights: constants that multiply pg (of gmpo: its sequence's geometric mean); see
            rollout_correction.
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one. float64 log_probs
            are always computed in float64, by the reference; everything else in float32.

    Returns:
        (loss, metrics). loss is a 0-d tensor; metrics are 0-d tensors on the device, without
        gradient. pg_loss, kl_loss and entropy are aggregated like the loss; pg_clipfrac,
        pg_clipfrac_lower, ppo_kl (of old_log_probs - log_probs, not clamped) and ratio_mean are
        sums over unmasked tokens divided by N: add these up over micro-batches and ranks. ratio_max
        is a maximum (-inf with no token). Keys whose input is absent are absent.

    The kernels can be differentiated once, in reverse mode; other derivatives raise an error. The
    reference supports them, those of the formulas with their stop-gradients.

    What tensors hold is checked on the CPU only: elsewhere looking would wait for the device. There
    cu_seqlens is trusted, but never followed out of the tensors.

    Raises:
        ValueError: an unknown mode, a tensor of another shape, dtype or device, a number out of its
            range, cu_seqlens that does not fit, an argument that a mode needs, a coefficient
            without its tensor.

    Example:
        >>> log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> loss, metrics = policy_loss(log_probs, log_probs.detach(), torch.tensor([1.0, -3.0]))
        >>> loss.item(), metrics["pg_clipfrac"].item()
        (1.0, 0.0)
    """
    op = "policy_loss"
    check_given(op, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check.choice(op, "loss_mode", loss_mode, LOSS_MODES, tuple(MODE_ALIASES))
    loss_mode = MODE_ALIASES.get(loss_mode, loss_mode)
    loss_scale_factor = check_aggregation(op, loss_agg_mode, loss_scale_factor)
    options = LossOptions.checked(
        op, clip_ratio_low, clip_ratio_high, clip_ratio_c, tau_pos, tau_neg, cov_kl_coef
    )
    plan = LossPlan(
        loss_mode,
        loss_agg_mode,
        check_kl_type(op, kl_type),
        kl_type.endswith("+"),
        check_coefficient(op, "kl_coef", kl_coef, "ref_log_probs", ref_log_probs),
        check_coefficient(op, "entropy_coeff", entropy_coeff, "entropy", entropy),
        loss_scale_factor,
    )
    floats = {
        "log_probs": log_probs,
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "ref_log_probs": ref_log_probs,
        "entropy": entropy,
        "rollout_is_weights": rollout_is_weights,
    }
    masks = {"response_mask": response_mask, "selected": selected}
    tokens, cu_seqlens = token_arguments(op, floats, masks, cu_seqlens)
    _check_needs(loss_mode, cu_seqlens, selected)
    backend = choose_backend(op, log_probs.device, backend)
    if log_probs.dtype == torch.float64:
        backend = "reference"
    counted = denominators(
        op,
        loss_agg_mode,
        as_mask(tokens["response_mask"], tokens["log_probs"]),
        cu_seqlens,
        global_num_tokens,
        global_num_seqs,
    )
    if backend == "reference":
        loss, sums = policy_loss_reference(tokens, cu_seqlens, counted, plan, options)
    else:
        loss, sums = _kernel(backend, tokens, cu_seqlens, counted, plan, options)
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


def check_coefficient(op: str, name: str, value: float, needs: str, tensor: Tensor | None) -> float:
    """A finite coefficient, which must have the tensor it multiplies."""
    number = check.number(op, name, value)
    if number and tensor is None:
        raise ValueError(
            f"{op}: {name} is {value}, but {needs} is not given; give both or neither."
        )
    return number


def _check_needs(loss_mode: str, cu_seqlens: Tensor | None, selected: Tensor | None) -> None:
    if cu_seqlens is None and loss_mode in SEQUENCE_MODES:
        raise ValueError(
            f"policy_loss: loss_mode {loss_mode!r} works on sequences; give cu_seqlens."
        )
    if loss_mode in SELECTION_MODES and selected is None:
        raise ValueError(
            f"policy_loss: loss_mode {loss_mode!r} needs selected, a mask of tokens; "
            "select_by_covariance makes it."
        )


def _kernel(backend, tokens, cu_seqlens, counted, plan, options):
    """(loss, metrics in the order of _METRICS) from a kernel."""
    log_probs, entropy = tokens["log_probs"], tokens["entropy"]
    check.no_forward_ad("policy_loss", log_probs=log_probs, entropy=entropy)

    def floats(name):
        tensor = tokens[name]
        return None if tensor is None else tensor.detach().float().contiguous()

    def bools(name):
        tensor = tokens[name]
        return None if tensor is None else tensor.contiguous()

    enabled = torch.is_grad_enabled()
    loss, sums, *_ = torch.ops.hybridengine.policy_loss(
        log_probs.float().contiguous(),
        None if entropy is None else entropy.float().contiguous(),
        floats("old_log_probs"),
        floats("advantages"),
        bools("response_mask"),
        bools("selected"),
        floats("ref_log_probs"),
        floats("rollout_is_weights"),
        cu_seqlens,
        counted,
        [
            LOSS_MODES.index(plan.loss_mode),
            LOSS_AGG_MODES.index(plan.loss_agg_mode),
            KL_TYPES.index(plan.kl_type),
            plan.kl_straight_through,
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
        from .triton import policy_loss_triton as run
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
    # The two inputs are there for second derivatives to find, and raise.
    ctx.save_for_backward(gradient, entropy_gradient, *inputs[:2])


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    # On the CPU looking costs nothing, and the usual scale of 1 saves a pass; a traced tensor (a
    # subclass) has no value to look at.
    if type(scale) is Tensor and scale.device.type == "cpu" and scale == 1:
        return gradient
    return gradient * scale


@check.differentiable_once("policy_loss")
def _backward_policy_loss(ctx, grad_loss, *_):
    gradient, entropy_gradient, *_ = ctx.saved_tensors
    for_log_probs = _scaled(gradient, grad_loss) if ctx.needs_input_grad[0] else None
    for_entropy = _scaled(entropy_gradient, grad_loss) if ctx.needs_input_grad[1] else None
    return for_log_probs, for_entropy, *[None] * 11


_policy_loss.register_autograd(_backward_policy_loss, setup_context=_setup_policy_loss)
