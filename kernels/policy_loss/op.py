"""policy_loss: policy-gradient losses over packed tokens, normalised by the global batch.

Every aggregation mode is one weight per token:

    loss = sum_t weight_t (pg_t + kl_coef kl_t - entropy_coeff entropy_t)

With the denominators of the global batch, the losses and gradients of micro-batches and ranks add
up to the loss of the batch, however it is split.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._aggregation import (
    LOSS_AGG_MODES,
    Counts,
    kernel_denominators,
    loss_denominators,
    token_weights,
)
from .._backend import native, register_backends
from .._library import apply, custom_op
from .._per_token import as_mask
from .arguments import LossInputs, check_inputs
from .centering import centering_terms
from .reference import policy_loss_reference
from .terms import KERNEL_MODES, KL_TYPES, LossOptions

register_backends("policy_loss", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference"))


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    *,
    response_mask: Tensor | None = None,
    loss_mode: str = "ppo_clip",
    clip_ratio_low: float | None = 0.2,
    clip_ratio_high: float | None = 0.2,
    clip_ratio_c: float | None = 3.0,
    seq_clip_ratio_c: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    selected: Tensor | None = None,
    cov_kl_coef: float = 1.0,
    dro_beta: float = 1.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
    seq_num_tokens: Tensor | None = None,
    global_num_tokens: float | Tensor | None = None,
    global_num_seqs: float | Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "low_var_kl",
    kl_times_ratio: bool = False,
    kl_input_clamp: float | None = 20.0,
    kl_output_clamp: float | None = 10.0,
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
    rollout_is_weights: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_is_lower: float | None = None,
    score_centering: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss to minimise and its metrics.

    Per-token arguments are [T], packed tokens with the sequences at cu_seqlens, or [B, L], whose
    rows are the sequences; all of one shape and on one device. Numbers are of floating point; masks
    are bool or 0/1 numbers.

    Args:
        log_probs: the log-probs of the policy being trained; differentiable.
        old_log_probs: constants; None: log_probs themselves, as in the only optimizer step of a
            batch, so that every ratio is 1.
        advantages: constants.
        response_mask: the tokens in the loss; what masked tokens hold, NaN included, does not
            matter. None: all tokens.
        loss_mode: a row of the table in terms.py, which has the formulas and their sources:
            ppo_clip (vanilla), gspo, gmpo (geo_mean), cispo, sapo, dppo_tv, dppo_kl, clip_cov,
            kl_cov, reinforce (gpg), dro, seq_sapo.
        clip_ratio_low, clip_ratio_high, clip_ratio_c: lo, hi and c of that table; lo and hi are not
            negative (hi of cispo: at least -1 and -lo), c is above 1. None (or infinity) switches
            that clip off.
        seq_clip_ratio_c: c of gspo, in place of clip_ratio_c.
        tau_pos, tau_neg: the temperatures of sapo and seq_sapo; positive.
        selected: for clip_cov and kl_cov: the tokens `select_by_covariance` chose.
        cov_kl_coef, dro_beta: the coefficients of kl_cov and of dro.
        loss_agg_mode: the weight of an unmasked token; N tokens and S sequences with a token,
            both global, and L the unmasked tokens of its own sequence:
            token-mean 1/N, token-sum 1, seq-mean-token-sum 1/S, seq-mean-token-mean 1/(S L),
            seq-mean-token-sum-norm 1/(S loss_scale_factor).
        cu_seqlens: [n + 1] int32 or int64, with [T] only; needed by gspo, gmpo, seq_sapo and the
            seq-mean modes. Tokens past its end must be masked.
        seq_num_tokens: [n] numbers, with seq-mean-token-mean: L of the sequences, where this call
            sees a part of their tokens only; below 1 they become 1. None: the unmasked tokens.
        global_num_tokens, global_num_seqs: N and S, a number or a tensor with one element; None
            counts those of this call, which is right only where it sees the whole global batch.
            Values below 1 become 1.
        ref_log_probs, kl_coef, kl_type: adds kl_coef * kl; kl_type is k1 (kl), abs, k2 (mse) or
            k3 (low_var_kl), with a trailing "+" for the gradient of k2.
        kl_times_ratio: multiply kl by the ratio of the mode, with the gradient of both.
        kl_input_clamp, kl_output_clamp: the bounds of k3, as in `token_kl`.
        entropy: differentiable; subtracts entropy_coeff * entropy.
        rollout_is_weights: constants that multiply pg (of gmpo: its sequence's geometric mean); see
            rollout_correction.
        rollout_log_probs, rollout_is_threshold, rollout_is_lower: of the rollout engine, constants;
            given, rollout_is_weights are formed here from exp(old_log_probs - rollout_log_probs)
            per token, with the bounds of rollout_correction.
        score_centering: C of every token, which the operator `score_centering` computes;
            differentiable; adds advantages * C, so that the gradient of a constant advantage is 0
            over the engine's distribution. Not in the modes by sequence.
        backend: `cpp`, `cuda`, `triton` or `reference`; None takes the best one. float64 log_probs
            are always computed in float64, by the reference; everything else in float32.

    Returns:
        (loss, metrics). loss is a 0-d tensor; metrics are 0-d tensors on the device, without
        gradient. pg_loss, kl_loss, entropy and score_centering are aggregated like the loss;
        pg_clipfrac, pg_clipfrac_lower, ppo_kl (of old_log_probs - log_probs, not clamped) and
        ratio_mean are sums over unmasked tokens divided by N: add these up over micro-batches and
        ranks. ratio_max is a maximum (-inf with no token). Keys whose input is not given are left
        out.

    The kernels can be differentiated once, in reverse mode; other derivatives raise an error. The
    reference supports them, those of the formulas with their stop-gradients.

    The values of tensors are checked on the CPU only: elsewhere reading them would wait for the
    device. There a wrong cu_seqlens gives wrong results, but no access outside the tensors.

    Raises:
        ValueError: an unknown mode, a tensor of another shape, dtype or device, a number out of its
            range, cu_seqlens that does not fit, an argument that a mode needs, a coefficient
            without its tensor.

    Examples:
        >>> log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> loss, metrics = policy_loss(log_probs, log_probs.detach(), torch.tensor([1.0, -3.0]))
        >>> loss.item(), metrics["pg_clipfrac"].item()
        (1.0, 0.0)
    """
    op = "policy_loss"
    inputs = check_inputs(
        op,
        log_probs,
        old_log_probs,
        advantages,
        response_mask=response_mask,
        loss_mode=loss_mode,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        seq_clip_ratio_c=seq_clip_ratio_c,
        tau_pos=tau_pos,
        tau_neg=tau_neg,
        selected=selected,
        cov_kl_coef=cov_kl_coef,
        dro_beta=dro_beta,
        loss_agg_mode=loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        cu_seqlens=cu_seqlens,
        seq_num_tokens=seq_num_tokens,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        kl_type=kl_type,
        kl_times_ratio=kl_times_ratio,
        kl_input_clamp=kl_input_clamp,
        kl_output_clamp=kl_output_clamp,
        entropy=entropy,
        entropy_coeff=entropy_coeff,
        rollout_is_weights=rollout_is_weights,
        rollout_log_probs=rollout_log_probs,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_lower=rollout_is_lower,
        score_centering=score_centering,
        backend=backend,
    ).complete()
    return evaluate(op, inputs, (global_num_tokens, global_num_seqs))


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(policy_loss).parameters.items()
    if parameter.kind == parameter.KEYWORD_ONLY
}


def evaluate(op: str, inputs: LossInputs, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute loss and metrics of complete inputs; counts: global_num_tokens, global_num_seqs."""
    tokens = inputs.tokens
    if inputs.backend == "reference":
        mask = as_mask(tokens.get("response_mask"), tokens["log_probs"])
        mode = inputs.settings.loss_agg_mode
        denominators = loss_denominators(op, mode, mask, inputs.cu_seqlens, *counts)
        loss, sums, *_ = policy_loss_reference(
            *inputs[:3], denominators, inputs.settings, inputs.options
        )
    else:
        loss, sums = run_kernel(op, inputs, counts)
    metrics = dict(zip(_METRICS, sums.unbind(), strict=True))
    if "score_centering" in tokens:
        centering = _centering_loss(op, inputs, counts)
        loss, metrics["score_centering"] = loss + centering, centering.detach()
    if "ref_log_probs" not in tokens:
        del metrics["kl_loss"]
    if "entropy" not in tokens:
        del metrics["entropy"]
    return loss, metrics


def _centering_loss(op: str, inputs: LossInputs, counts: Counts) -> Tensor:
    """Aggregate advantages * C as the loss."""
    terms = centering_terms(inputs.tokens)
    mask = as_mask(inputs.tokens.get("response_mask"), terms)
    mode, factor = inputs.settings.loss_agg_mode, inputs.settings.loss_scale_factor
    denominators = loss_denominators(op, mode, mask, inputs.cu_seqlens, *counts)
    weights = token_weights(
        mode, mask, inputs.cu_seqlens, denominators, factor, inputs.seq_num_tokens
    )
    return (weights.to(terms.dtype) * terms).sum()


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


class LossModes(NamedTuple):
    """The modes of the op policy_loss, and which results are wanted: `modes`, a list of int."""

    loss_mode: int  # in KERNEL_MODES
    loss_agg_mode: int  # in LOSS_AGG_MODES
    kl_type: int  # in KL_TYPES
    kl_straight_through: int
    kl_times_ratio: int
    wants_tokens: int  # their terms and clip masks
    wants_gradient: int  # of log_probs
    wants_entropy_gradient: int


class LossCoefficients(NamedTuple):
    """The coefficients of the op policy_loss, which follow the LossOptions in its `numbers`."""

    kl_coef: float
    entropy_coeff: float
    loss_scale_factor: float = 1.0
    num_tokens: float = 1.0  # as `kernel_denominators` returns them; unread with `denominators`
    num_seqs: float = 1.0


class LossArguments(NamedTuple):
    """The arguments of the op policy_loss, of which the first two are differentiable."""

    log_probs: Tensor
    entropy: Tensor | None
    old_log_probs: Tensor | None
    advantages: Tensor | None
    mask: Tensor | None
    selected: Tensor | None
    ref_log_probs: Tensor | None
    is_weights: Tensor | None
    cu_seqlens: Tensor | None
    seq_num_tokens: Tensor | None
    denominators: Tensor | None
    modes: list[int]
    numbers: list[float]
    backend: str

    @property
    def wants_gradients(self) -> bool:
        return any(self.modes[-2:])  # wants_gradient, wants_entropy_gradient


NO_GRADIENTS = (None,) * (len(LossArguments._fields) - 2)  # of the constants


def kernel_tensors(tokens: dict[str, Any], *names: str) -> list[Tensor | None]:
    """Return constants as the kernels take them: contiguous, bool or float32, None if not given."""
    given = [tokens.get(name) for name in names]
    return [None if t is None else _constant(t) for t in given]


def _constant(values: Tensor) -> Tensor:
    values = values.detach() if values.requires_grad else values
    dtype = torch.bool if values.dtype == torch.bool else torch.float32
    return check.as_contiguous(values, dtype)


def run_kernel(op: str, inputs: LossInputs, counts: Counts) -> tuple[Tensor, Tensor]:
    """Compute (loss, metrics in the order of _METRICS) of policy_loss or value_loss with a kernel.

    counts: global_num_tokens and global_num_seqs.
    """
    arguments = kernel_arguments(op, inputs, counts)
    if not arguments.wants_gradients:
        loss, metrics, *_ = policy_loss_op(*arguments)
        return loss, metrics
    loss, metrics = apply(_FUNCTIONS[op], *arguments)
    return loss, metrics


def kernel_arguments(
    op: str,
    inputs: LossInputs,
    counts: Counts,
    wants_tokens: bool = False,
) -> LossArguments:
    """Return the arguments of the op policy_loss."""
    tokens, cu_seqlens, seq_num_tokens, settings, options, backend, _ = inputs
    log_probs, entropy = tokens["log_probs"], tokens.get("entropy")
    denominators, numbers = kernel_denominators(
        op, settings.loss_agg_mode, cu_seqlens, *counts, log_probs.device
    )
    enabled = torch.is_grad_enabled()
    wanted = [enabled and t is not None and t.requires_grad for t in (log_probs, entropy)]
    named = {"values" if op == "value_loss" else "log_probs": log_probs, "entropy": entropy}
    refuse = check.untransformed if any(wanted) else check.reverse_mode_only
    refuse(op, **named)
    modes = LossModes(
        KERNEL_MODES.index(settings.loss_mode),
        LOSS_AGG_MODES.index(settings.loss_agg_mode),
        KL_TYPES.index(settings.kl_type),
        settings.kl_straight_through,
        settings.kl_times_ratio,
        wants_tokens,
        *wanted,
    )
    coefficients = LossCoefficients(
        settings.kl_coef, settings.entropy_coeff, settings.loss_scale_factor or 1.0, *numbers
    )
    old, advantages, mask, selected, ref, weights = kernel_tensors(
        tokens,
        *("old_log_probs", "advantages", "response_mask", "selected"),
        *("ref_log_probs", "rollout_is_weights"),
    )
    return LossArguments(
        check.as_contiguous(log_probs, torch.float32),
        None if entropy is None else check.as_contiguous(entropy, torch.float32),
        old,
        advantages,
        mask,
        selected,
        ref,
        weights,
        cu_seqlens,
        None if seq_num_tokens is None else check.as_contiguous(seq_num_tokens, torch.float32),
        denominators,
        [*modes],
        [*options, *coefficients],
        backend,
    )


class _PolicyLoss(torch.autograd.Function):
    """The op policy_loss, differentiated by the gradients that it returns.

    A Function, because the set-up of torch.library.register_autograd takes a time that grows with
    the square of the number of arguments, about ten times that of the kernel.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, metrics, _, _, *gradients = policy_loss_op(*arguments)
        ctx.set_materialize_grads(False)  # else autograd makes zeros for the metrics
        ctx.mark_non_differentiable(metrics)
        # The two inputs let a second derivative find the node that raises.
        ctx.save_for_backward(*gradients, *arguments[:2])
        return loss, metrics

    @staticmethod
    @check.differentiable_once("policy_loss")
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_loss)


class _ValueLoss(_PolicyLoss):
    @staticmethod
    @check.differentiable_once("value_loss")
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_loss)


_FUNCTIONS = {"policy_loss": _PolicyLoss, "value_loss": _ValueLoss}


def _gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    gradients = list(ctx.saved_tensors[:2])
    # On the CPU reading is free, and the usual scale of 1 saves a pass.
    if not (check.readable(grad_loss) and grad_loss.item() == 1):
        gradients = list(torch._foreach_mul(gradients, grad_loss))  # in one launch
    needed = zip(gradients, ctx.needs_input_grad[:2], strict=True)
    return *[gradient if needs else None for gradient, needs in needed], *NO_GRADIENTS


def split_numbers(numbers: list[float]) -> tuple[LossOptions, LossCoefficients]:
    """Return what the op's `numbers` are."""
    count = len(LossOptions._fields)
    return LossOptions(*numbers[:count]), LossCoefficients(*numbers[count:])


@custom_op("hybridengine::policy_loss", mutates_args=())
def policy_loss_op(
    log_probs: Tensor,
    entropy: Tensor | None,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    selected: Tensor | None,
    ref_log_probs: Tensor | None,
    is_weights: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_num_tokens: Tensor | None,
    denominators: Tensor | None,
    modes: list[int],
    numbers: list[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (loss, metrics [8], terms [3, T] and clip masks [2, T] of the tokens, d loss /
    d log_probs, d loss / d entropy).

    What is not wanted is empty. modes: LossModes. numbers: LossOptions, then LossCoefficients.
    """
    if backend == "triton":
        from .triton import policy_loss_triton as run
    else:
        run = native().policy_loss
    mode, agg_mode, kl_type, *flags = modes
    straight_through, times_ratio, *wants = map(bool, flags)
    options, coefficients = split_numbers(numbers)
    return run(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        selected,
        ref_log_probs,
        entropy,
        is_weights,
        cu_seqlens,
        seq_num_tokens,
        denominators,
        mode,
        agg_mode,
        kl_type,
        straight_through,
        times_ratio,
        options,
        coefficients,
        *wants,
    )


@policy_loss_op.register_fake
def _(log_probs: Tensor, modes: list[int]) -> tuple[Tensor, ...]:
    wants = LossModes(*modes)
    num_tokens = log_probs.size(0)
    return (
        log_probs.new_empty(()),
        log_probs.new_empty(len(_METRICS)),
        log_probs.new_empty(3 if wants.wants_tokens else 0, num_tokens),
        log_probs.new_empty(2 if wants.wants_tokens else 0, num_tokens, dtype=torch.bool),
        log_probs.new_empty(num_tokens if wants.wants_gradient else 0),
        log_probs.new_empty(num_tokens if wants.wants_entropy_gradient else 0),
    )
