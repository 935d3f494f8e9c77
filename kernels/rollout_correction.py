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

from . import _check as check
from ._aggregation import global_count
from ._per_token import TokenSequences, as_mask, compute_dtype, token_arguments, zero_masked
from .policy_loss.importance import ImportanceBounds
from .policy_loss.terms import MAX_LOG_RATIO, log_ratio

# Bound of a token's log-ratio in a sum, far beyond real ones: infinities of both signs then cancel.
_MAX_TERM = 2.0**20

REJECTION_CRITERIA = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
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
) -> RolloutCorrection:
    """Compute importance weights and rejection from rho_t = exp(old_log_probs - rollout_log_probs).

    A token whose log-prob is -inf in both has rho 1, as in policy_loss. In float64 for float64
    old_log_probs, else in float32.

    Args:
        old_log_probs, rollout_log_probs: [T], packed tokens, or [B, L], whose rows are the
            sequences; of the training policy and of the engine.
        cu_seqlens: [N + 1] int32 or int64; needed with [T]. Tokens past its end must be masked.
        response_mask: the same shape, bool or 0/1; what masked tokens hold does not matter.
        rollout_is: "token": rho_t; "sequence": the product of rho over the sequence; None: no
            weights. The exponent is clamped to [-20, 20].
        rollout_is_threshold: weights are truncated to it (TIS, arXiv 1802.01561's rho-bar); None
            does not truncate.
        rollout_is_lower: given, weights outside [lower, threshold] become 0 instead (IcePop).
        rejection: criterion -> threshold; a token that fails any criterion is rejected. Criteria:
            token_k1, token_k2, token_k3, seq_sum_k1 ... seq_mean_k3, seq_max_k2, seq_max_k3, with
            k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho. k2 and k3 take an upper
            bound; k1 takes (lower, upper) for exp(k1), the ratio rollout / training.
        global_num_tokens: N for the metrics, as in policy_loss.

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
        check.choice(op, "rollout_is", rollout_is, ("token", "sequence"))
    is_bounds = ImportanceBounds.checked(op, rollout_is_threshold, rollout_is_lower)
    bounds = _check_rejection(rejection or {})
    with torch.no_grad():
        tokens, cu_seqlens = token_arguments(
            op,
            {"old_log_probs": old_log_probs, "rollout_log_probs": rollout_log_probs},
            {"response_mask": response_mask},
            cu_seqlens,
        )
        if cu_seqlens is None:
            raise ValueError(f"{op}: old_log_probs is [T]; give cu_seqlens, or [B, L].")
        dtype = compute_dtype(old_log_probs)
        old, rollout = (tokens[k].to(dtype) for k in ("old_log_probs", "rollout_log_probs"))
        mask = as_mask(tokens.get("response_mask"), old)
        num_tokens = global_count(op, "global_num_tokens", global_num_tokens, mask.device, mask.sum)
        sequences = TokenSequences.of(cu_seqlens, mask)
        log_rho = log_ratio(zero_masked(old, mask), zero_masked(rollout, mask))
        safe = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

        def mean(values: Tensor) -> Tensor:
            return zero_masked(values, mask).sum(dtype=torch.float64) / num_tokens

        metrics = {
            "kl": mean(-log_rho),
            "k3_kl": mean(safe.expm1() - safe),
            "chi2_token": mean((2 * safe).expm1()),
        }
        weights = None
        if rollout_is is not None:
            exponent = safe
            if rollout_is == "sequence":
                terms = log_rho.clamp(-_MAX_TERM, _MAX_TERM)
                exponent = sequences.sum(terms, mask)
            weights, outside = is_bounds.weights(exponent)
            weights = zero_masked(weights, mask)
            metrics["is_weight_mean"] = mean(weights)
            metrics["is_clipped_fraction"] = mean(outside.to(weights.dtype))
            metrics["is_weight_max"] = torch.cat([weights.new_zeros(1), weights]).max()
            weights = weights.view(old_log_probs.shape)
        accepted = mask
        for criterion, bound in bounds.items():
            accepted = accepted & _within(criterion, bound, safe, mask, sequences)
        metrics["rejected_fraction"] = mean((~accepted).to(safe.dtype))
    return RolloutCorrection(weights, accepted.view(old_log_probs.shape), metrics)


def _within(
    criterion: str,
    threshold: float | tuple[float, float],
    log_rho: Tensor,
    mask: Tensor,
    sequences: TokenSequences,
) -> Tensor:
    """Return the tokens whose divergence, or that of their sequence, is within the threshold."""
    level, _, kind = criterion.rpartition("_")
    if kind == "k1":
        divergence = -log_rho
    elif kind == "k2":
        divergence = 0.5 * log_rho.square()
    else:
        divergence = log_rho.expm1() - log_rho
    if level == "seq_mean":
        divergence = sequences.mean(divergence, mask)
    elif level == "seq_sum":
        divergence = sequences.sum(divergence, mask)
    elif level == "seq_max":
        largest = torch.zeros(sequences.lengths.shape, dtype=log_rho.dtype, device=mask.device)
        largest.scatter_reduce_(0, sequences.ids, zero_masked(divergence, mask), "amax")
        divergence = largest[sequences.ids]
    if isinstance(threshold, tuple):
        return (divergence >= math.log(threshold[0])) & (divergence <= math.log(threshold[1]))
    return divergence <= threshold


def _check_rejection(
    rejection: Mapping[str, float | tuple[float, float]],
) -> dict[str, float | tuple[float, float]]:
    """Return the thresholds as numbers, for k1 as pairs of numbers."""
    op = "rollout_correction"
    bounds: dict[str, float | tuple[float, float]] = {}
    if not isinstance(rejection, Mapping):
        raise TypeError(
            f"{op}: rejection is {rejection!r}; expected a mapping, criterion -> threshold."
        )
    for criterion, bound in rejection.items():
        check.choice(op, "a criterion of rejection", criterion, REJECTION_CRITERIA)
        name = f"rejection[{criterion!r}]"
        if not criterion.endswith("k1"):
            upper = cast(float, bound)
            bounds[criterion] = check.number(op, name, upper, above=0, infinite=True)
            continue
        if not isinstance(bound, tuple | list) or len(bound) != 2:
            raise ValueError(
                f"{op}: {name} is {bound!r}; expected a pair (lower, upper) of positive ratios."
            )
        low = check.number(op, f"{name}[0]", bound[0], above=0)
        high = check.number(op, f"{name}[1]", bound[1], above=0, infinite=True)
        check.ordered(op, f"{name}[0]", low, f"{name}[1]", high)
        bounds[criterion] = low, high
    return bounds
