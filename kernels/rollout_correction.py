"""Correction for the gap between the engine that generated and the policy that trains.

Importance weights (per token or per sequence; truncated or masked beyond a threshold) and
rejection of tokens and sequences, as verl's rollout correction defines them; what goes into
policy_loss is `rollout_is_weights` and a smaller `response_mask`. Nothing waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import Segments, as_mask, check_shapes, denominator, kept

_MAX_LOG_RATIO = 20.0

REJECTION_CRITERIA = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)


class RolloutCorrection(NamedTuple):
    """What `rollout_correction` found; tensors [T], without gradient."""

    weights: Tensor | None  # for policy_loss(rollout_is_weights=); 0 where masked
    response_mask: Tensor  # bool, what rejection left
    metrics: dict[str, Tensor]


def rollout_correction(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    cu_seqlens: Tensor,
    response_mask: Tensor | None = None,
    rollout_is: str | None = "token",
    rollout_is_threshold: float = 2.0,
    rollout_is_lower: float | None = None,
    rejection: Mapping[str, float | tuple[float, float]] | None = None,
    global_num_tokens: float | Tensor | None = None,
) -> RolloutCorrection:
    """Importance weights and rejection from rho_t = exp(old_log_probs - rollout_log_probs).

    Args:
        old_log_probs, rollout_log_probs: [T] of the training policy and of the engine.
        cu_seqlens: [N + 1] int32.
        response_mask: [T] bool; what masked tokens hold does not matter.
        rollout_is: "token": rho_t; "sequence": the product of rho over the sequence; None: no
            weights. The exponent is clamped to [-20, 20].
        rollout_is_threshold: weights are truncated to it (TIS, arXiv 1802.01561's rho-bar).
        rollout_is_lower: given, weights outside [lower, threshold] become 0 instead (IcePop).
        rejection: criterion -> threshold; a token stays if every criterion keeps it. Criteria are
            token_k1, token_k2, token_k3, seq_sum_k1 ... seq_mean_k3, seq_max_k2, seq_max_k3, with
            k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho. k2 and k3 take an upper
            bound; k1 takes (lower, upper) for exp(k1), the ratio rollout / training.
        global_num_tokens: N for the metrics, as in policy_loss.

    Returns:
        weights, the remaining mask, and metrics: kl (rollout || training), k3_kl, chi2_token,
        is_weight_mean, is_clipped_fraction, rejected_fraction: sums over unmasked tokens divided
        by N, to be added up over micro-batches and ranks; is_weight_max: a maximum.

    Raises:
        ValueError: an unknown level or criterion, thresholds of the wrong kind, shapes.
    """
    per_token = {"rollout_log_probs": rollout_log_probs, "response_mask": response_mask}
    check_shapes("rollout_correction", "old_log_probs", old_log_probs, per_token)
    _check_options(rollout_is, rollout_is_threshold, rollout_is_lower, rejection or {})
    with torch.no_grad():
        mask = as_mask(response_mask, old_log_probs)
        num_tokens = denominator(global_num_tokens, mask.device, mask.sum)
        segments = Segments.of(cu_seqlens, mask)
        log_rho = kept(old_log_probs, mask) - kept(rollout_log_probs, mask)
        safe = log_rho.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)

        def mean(values: Tensor) -> Tensor:
            return kept(values, mask).sum(dtype=torch.float64) / num_tokens

        metrics = {
            "kl": mean(-log_rho),
            "k3_kl": mean(safe.expm1() - safe),
            "chi2_token": mean((2 * safe).expm1()),
        }
        weights = None
        if rollout_is is not None:
            exponent = safe
            if rollout_is == "sequence":
                total = segments.mean(log_rho, mask) * segments.counts[segments.ids]
                exponent = total.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            raw = exponent.exp()
            outside = raw > rollout_is_threshold
            if rollout_is_lower is None:
                weights = raw.clamp(max=rollout_is_threshold)
            else:
                outside |= raw < rollout_is_lower
                weights = raw.masked_fill(outside, 0)
            weights = kept(weights, mask)
            metrics["is_weight_mean"] = mean(weights)
            metrics["is_clipped_fraction"] = mean(outside.to(raw.dtype))
            metrics["is_weight_max"] = torch.cat([weights.new_zeros(1), weights]).max()
        keep = mask
        for criterion, threshold in (rejection or {}).items():
            keep = keep & _accepts(criterion, threshold, safe, mask, segments)
        metrics["rejected_fraction"] = mean((~keep).to(safe.dtype))
    return RolloutCorrection(weights, keep, metrics)


def _accepts(criterion, threshold, log_rho, mask, segments: Segments) -> Tensor:
    """[T] bool: the tokens (of the sequences) within the threshold."""
    level, _, kind = criterion.rpartition("_")
    if kind == "k1":
        divergence = -log_rho
    elif kind == "k2":
        divergence = 0.5 * log_rho.square()
    else:
        divergence = log_rho.expm1() - log_rho
    if level == "seq_mean":
        divergence = segments.mean(divergence, mask)
    elif level == "seq_sum":
        divergence = segments.mean(divergence, mask) * segments.counts[segments.ids]
    elif level == "seq_max":
        most = torch.zeros(segments.counts.shape, dtype=log_rho.dtype, device=mask.device)
        most.scatter_reduce_(0, segments.ids, kept(divergence, mask), "amax")
        divergence = most[segments.ids]
    if kind == "k1":
        return (divergence >= math.log(threshold[0])) & (divergence <= math.log(threshold[1]))
    return divergence <= threshold


def _check_options(rollout_is, threshold, lower, rejection) -> None:
    if rollout_is not in (None, "token", "sequence"):
        raise ValueError(
            f"rollout_correction: rollout_is is {rollout_is!r}; expected 'token', 'sequence' "
            "or None"
        )
    if threshold <= 0 or (lower is not None and not 0 < lower <= threshold):
        raise ValueError(
            f"rollout_correction: rollout_is_threshold {threshold} and rollout_is_lower {lower}; "
            "expected 0 < lower <= threshold"
        )
    for criterion, bound in rejection.items():
        if criterion not in REJECTION_CRITERIA:
            raise ValueError(
                f"rollout_correction: unknown criterion {criterion!r}; expected one of "
                f"{', '.join(REJECTION_CRITERIA)}"
            )
        is_pair = isinstance(bound, tuple) and len(bound) == 2 and 0 < bound[0] <= bound[1]
        if criterion.endswith("k1") and not is_pair:
            raise ValueError(
                f"rollout_correction: {criterion} has threshold {bound!r}; expected a pair "
                "(lower, upper) of positive ratios"
            )
        if not criterion.endswith("k1") and not (isinstance(bound, int | float) and bound > 0):
            raise ValueError(
                f"rollout_correction: {criterion} has threshold {bound!r}; expected a positive "
                "upper bound"
            )
