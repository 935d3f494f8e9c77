"""rollout_correction in plain PyTorch: its specification."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._per_token import TokenSequences, as_mask, compute_dtype, zero_masked
from ..policy_loss.importance import ImportanceBounds
from ..policy_loss.terms import MAX_LOG_RATIO, log_ratio

# Bound of a token's log-ratio in a sum, far beyond real ones: infinities of both signs then cancel,
# and in float64 they leave the others as they are.
MAX_TERM = 2.0**20

REJECTION_CRITERIA = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)

Bounds = dict[str, tuple[float, float]]  # criterion -> lower and upper bound of its divergence


class RolloutTokens(NamedTuple):
    """T tokens of packed sequences; mask: bool [T], None: all tokens count."""

    old_log_probs: Tensor
    rollout_log_probs: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor


def correct(
    tokens: RolloutTokens,
    num_tokens: float | Tensor,
    rollout_is: str | None,
    limits: ImportanceBounds,
    bounds: Bounds,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (weights [T], [0] for no level; the remaining mask, bool [T]; metrics, float64 [7]).

    num_tokens: N of the metrics, NaN to count the tokens, or a tensor whose first element it is.
    """
    old_log_probs, rollout_log_probs, mask, cu_seqlens = tokens
    dtype = compute_dtype(old_log_probs)
    unmasked = as_mask(mask, old_log_probs)
    old, rollout = (zero_masked(x.to(dtype), unmasked) for x in (old_log_probs, rollout_log_probs))
    if isinstance(num_tokens, Tensor):
        count = num_tokens.double().flatten()[0]
    elif math.isnan(num_tokens):
        count = unmasked.sum().double()
    else:
        count = old.new_full((), num_tokens, dtype=torch.float64)
    by_sequences = rollout_is not in ("token", None) or any(x.startswith("seq") for x in bounds)
    sequences = TokenSequences.of(cu_seqlens, unmasked) if by_sequences else None
    log_rho = log_ratio(old, rollout)
    safe = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    accepted = unmasked
    for criterion, (low, high) in bounds.items():
        divergence = _divergence(criterion, safe, unmasked, sequences)
        accepted = accepted & (divergence >= low) & (divergence <= high)
    averaged = [-log_rho, safe.expm1() - safe, (2 * safe).expm1(), (~accepted).to(dtype)]
    weights = old.new_zeros(0)
    if rollout_is is not None:
        exponent = safe
        if rollout_is != "token":
            assert sequences is not None
            terms = log_rho.double().clamp(-MAX_TERM, MAX_TERM)
            reduce = sequences.sum if rollout_is == "sequence" else sequences.mean
            exponent = reduce(terms, unmasked).to(dtype)
        weights, outside = limits.weights(exponent)
        weights = zero_masked(weights, unmasked)
        averaged += [weights, outside.to(dtype)]
    sums = zero_masked(torch.stack(averaged), unmasked).sum(1, dtype=torch.float64)
    largest = torch.cat([weights.new_zeros(1), weights]).max().double()
    metrics = [sums / count.clamp(min=1), sums.new_zeros(6 - len(averaged)), largest[None]]
    # A custom operator returns no alias of its inputs.
    return weights, accepted.clone() if accepted is mask else accepted, torch.cat(metrics)


def _divergence(
    criterion: str, log_rho: Tensor, mask: Tensor, sequences: TokenSequences | None
) -> Tensor:
    """Return the divergence of every token, or of its sequence, with `sequences`."""
    level, _, kind = criterion.rpartition("_")
    if kind == "k1":
        divergence = -log_rho
    elif kind == "k2":
        divergence = 0.5 * log_rho.square()
    else:
        divergence = log_rho.expm1() - log_rho
    if sequences is None:
        return divergence
    if level == "seq_mean":
        return sequences.mean(divergence, mask)
    if level == "seq_sum":
        return sequences.sum(divergence, mask)
    if level == "seq_max":
        largest = torch.zeros(sequences.lengths.shape, dtype=log_rho.dtype, device=mask.device)
        largest.scatter_reduce_(0, sequences.ids, zero_masked(divergence, mask), "amax")
        return largest[sequences.ids]
    return divergence
