"""Importance weights against the rollout engine, and old log-probs that are the step's own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import _check as check
from .._per_token import compute_dtype, zero_masked
from .terms import MAX_LOG_RATIO, log_ratio


class ImportanceBounds(NamedTuple):
    """Weights are truncated to `upper` (TIS, arXiv 1802.01561's rho-bar).

    With `lower`, those outside [lower, upper] are 0 instead (IcePop).
    """

    upper: float
    lower: float | None = None

    @staticmethod
    def checked(op: str, threshold: float | None, lower: float | None) -> ImportanceBounds:
        """Check rollout_is_threshold (None: no truncation) and rollout_is_lower of `op`."""
        threshold = float("inf") if threshold is None else threshold
        threshold = check.number(op, "rollout_is_threshold", threshold, above=0, infinite=True)
        if lower is not None:
            lower = check.number(op, "rollout_is_lower", lower, above=0)
            check.ordered(op, "rollout_is_lower", lower, "rollout_is_threshold", threshold)
        return ImportanceBounds(threshold, lower)

    def weights(self, log_rho: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights, bool: outside the bounds) of rho; log rho is clamped to [-20, 20]."""
        rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = rho > self.upper
        if self.lower is None:
            return rho.clamp(max=self.upper), outside
        outside |= rho < self.lower
        return rho.masked_fill(outside, 0), outside

    def token_weights(self, old_log_probs: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
        """Return the weights of rho = exp(old_log_probs - rollout) per token, 0 where masked."""
        dtype = compute_dtype(old_log_probs)
        old, rollout = (zero_masked(x.detach().to(dtype), mask) for x in (old_log_probs, rollout))
        return zero_masked(self.weights(log_ratio(old, rollout))[0], mask)
