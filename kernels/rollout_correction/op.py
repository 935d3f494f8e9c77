"""rollout_correction: correct for the mismatch between rollout engine and training policy.

Importance weights (per token or per sequence, truncated or masked beyond a threshold) and rejection
of tokens and sequences, as in verl's rollout correction. The results are `rollout_is_weights` and a
smaller `response_mask` for policy_loss. Nothing waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .. import _check as check
from .._aggregation import kernel_denominators
from .._backend import choose_backend, register_backends
from .._library import custom_op
from .._per_token import compute_dtype, token_arguments
from ..policy_loss.importance import ImportanceBounds
from .reference import REJECTION_CRITERIA, Bounds, RolloutTokens, correct

register_backends("rollout_correction", cpu=("reference",), cuda=("triton", "reference"))

# Of the kernels' metrics, in their order; those of weights only where there are weights.
_METRICS = (
    *("kl", "k3_kl", "chi2_token", "rejected_fraction"),
    *("is_weight_mean", "is_clipped_fraction", "is_weight_max"),
)


class RolloutCorrection(NamedTuple):
    """Results of `rollout_correction`, of the shape of its inputs, without gradient."""

    weights: Tensor | None  # for policy_loss(rollout_is_weights=); 0 where masked
    response_mask: Tensor  # bool, the tokens that were not rejected
    metrics: dict[str, Tensor]


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    response_mask: Tensor | None = None,
    rollout_is: str | None = "token",
    rollout_is_threshold: float | None = 2.0,
    rollout_is_lower: float | None = None,
    rejection: Mapping[str, float | tuple[float, float]] | None = None,
    global_num_tokens: float | Tensor | None = None,
    backend: str | None = None,
) -> RolloutCorrection:
    """Compute importance weights and rejection from rho_t = exp(old_log_probs - rollout_log_probs).

    A token whose log-prob is -inf in both has rho 1, as in policy_loss. In float64 for float64
    old_log_probs, else in float32.

    Args:
        old_log_probs, rollout_log_probs: [T], packed tokens, or [B, L], whose rows are the
            sequences; of the training policy and of the engine.
        cu_seqlens: [N + 1] int32 or int64; needed with [T]. Tokens past its end must be masked.
        response_mask: the same shape, bool or 0/1; what masked tokens hold does not matter.
        rollout_is: "token": rho_t; "sequence": the product of rho over the sequence, which is the
            unbiased weight; "sequence_mean": its geometric mean, biased, whose size does not grow
            with the length; None: no weights. The exponent is clamped to [-20, 20].
        rollout_is_threshold: weights are truncated to it (TIS, arXiv 1802.01561's rho-bar); None
            does not truncate.
        rollout_is_lower: given, weights outside [lower, threshold] become 0 instead (IcePop).
        rejection: criterion -> threshold; a token that fails any criterion is rejected. Criteria:
            token_k1, token_k2, token_k3, seq_sum_k1 ... seq_mean_k3, seq_max_k2, seq_max_k3, with
            k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho. k2 and k3 take an upper
            bound; k1 takes (lower, upper) for exp(k1), the ratio rollout / training.
        global_num_tokens: N for the metrics, as in policy_loss.
        backend: `triton` or `reference`; None takes the best one. float64 old_log_probs are always
            computed by the reference.

    Returns:
        weights, the remaining mask, and metrics: kl (rollout || training), k3_kl, chi2_token,
        is_weight_mean, is_clipped_fraction, rejected_fraction: sums over unmasked tokens divided
        by N, to be added up over micro-batches and ranks; is_weight_max: a maximum. kl is infinite
        where one of the two log-probs is -inf.

    Raises:
        ValueError: an unknown level or criterion, thresholds of the wrong kind, NaN or inverted,
            shapes, dtypes, devices, cu_seqlens that does not fit.
    """
    op = "rollout_correction"
    check.not_none(op, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if rollout_is is not None:
        check.choice(op, "rollout_is", rollout_is, ("token", "sequence", "sequence_mean"))
    is_bounds = ImportanceBounds.checked(op, rollout_is_threshold, rollout_is_lower)
    bounds = _check_rejection(rejection or {})
    tokens, cu_seqlens = token_arguments(
        op,
        {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs},
        {"response_mask": response_mask},
        cu_seqlens,
    )
    if cu_seqlens is None:
        raise ValueError(f"{op}: old_log_probs is [T]; give cu_seqlens, or [B, L].")
    device = old_log_probs.device
    denominators, (num_tokens, _) = kernel_denominators(
        op, "token-mean", cu_seqlens, global_num_tokens, None, device
    )
    backend = choose_backend(op, device, backend, old_log_probs.dtype)
    old, rollout = (tokens[k].detach() for k in ("old_log_probs", "rollout_log_probs"))
    mask = tokens.get("response_mask")
    weights, accepted, values = _rollout_correction(
        old.contiguous(),
        rollout.contiguous(),
        None if mask is None else mask.contiguous(),
        cu_seqlens,
        denominators,
        num_tokens,
        rollout_is,
        is_bounds.upper,
        is_bounds.lower,
        [REJECTION_CRITERIA.index(name) for name in bounds],
        [bound for pair in bounds.values() for bound in pair],
        backend,
    )
    names = _METRICS if rollout_is is not None else _METRICS[:4]
    shape = old_log_probs.shape
    return RolloutCorrection(
        weights.view(shape) if rollout_is is not None else None,
        accepted.view(shape),
        dict(zip(names, values.unbind(), strict=False)),
    )


@custom_op("hybridengine::rollout_correction", mutates_args=())
def _rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor,
    denominators: Tensor | None,
    num_tokens: float,
    rollout_is: str | None,
    upper: float,
    lower: float | None,
    criteria: list[int],
    bounds: list[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (weights [T] or [0], remaining mask bool [T], metrics float64 [7]).

    criteria: indices into REJECTION_CRITERIA; bounds: lower and upper of the divergence of each.
    num_tokens: NaN to count them; the first of `denominators` where those are given.
    """
    limits = ImportanceBounds(upper, lower)
    names = [REJECTION_CRITERIA[i] for i in criteria]
    pairs: Bounds = dict(zip(names, zip(bounds[::2], bounds[1::2], strict=True), strict=True))
    tokens = RolloutTokens(old_log_probs, rollout_log_probs, mask, cu_seqlens)
    count: float | Tensor = num_tokens if denominators is None else denominators
    if backend == "reference":
        return correct(tokens, count, rollout_is, limits, pairs)
    from .triton import correct_triton

    return correct_triton(tokens, count, rollout_is, limits, pairs)


@_rollout_correction.register_fake
def _(old_log_probs: Tensor, rollout_is: str | None) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(old_log_probs)
    tokens = old_log_probs.numel()
    return (
        old_log_probs.new_empty(tokens if rollout_is is not None else 0, dtype=dtype),
        old_log_probs.new_empty(tokens, dtype=torch.bool),
        old_log_probs.new_empty(len(_METRICS), dtype=torch.float64),
    )


def _check_rejection(rejection: Mapping[str, float | tuple[float, float]]) -> Bounds:
    """Return the bounds of the divergence of every criterion."""
    op = "rollout_correction"
    bounds: Bounds = {}
    if not isinstance(rejection, Mapping):
        raise TypeError(
            f"{op}: rejection is {rejection!r}; expected a mapping, criterion -> threshold."
        )
    for criterion, bound in rejection.items():
        check.choice(op, "a criterion of rejection", criterion, REJECTION_CRITERIA)
        name = f"rejection[{criterion!r}]"
        if not criterion.endswith("k1"):
            upper = cast(float, bound)
            bounds[criterion] = -math.inf, check.number(op, name, upper, above=0, infinite=True)
            continue
        if not isinstance(bound, tuple | list) or len(bound) != 2:
            raise ValueError(
                f"{op}: {name} is {bound!r}; expected a pair (lower, upper) of positive ratios."
            )
        low = check.number(op, f"{name}[0]", bound[0], above=0)
        high = check.number(op, f"{name}[1]", bound[1], above=0, infinite=True)
        check.ordered(op, f"{name}[0]", low, f"{name}[1]", high)
        bounds[criterion] = math.log(low), math.log(high)
    return bounds
