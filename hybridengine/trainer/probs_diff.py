"""How far the engine's probabilities are from the trainer's on the same tokens.

Names as verl's: a mean below 0.005 is healthy, above 0.01 the two run different models.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ProbsDiff"]


class ProbsDiff:
    """Sums over response tokens, on the device; one all-reduce at the end."""

    def __init__(self, device: torch.device) -> None:
        # count, Σ|p-q|, Σp, Σq, Σp², Σq², Σpq, in float64 for the correlation
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        self._max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> None:
        """log_probs (trainer), rollout_log_probs (engine), mask: [R]."""
        with torch.no_grad():
            weight = mask.double()
            p, q = log_probs.double().exp(), rollout_log_probs.double().exp()
            gap = (p - q).abs() * weight
            terms = (torch.ones_like(p), gap, p, q, p * p, q * q, p * q)
            self._sums += torch.stack([(t * weight).sum() for t in terms])
            self._max = torch.maximum(self._max, gap.max() if gap.numel() else self._max)

    def metrics(self) -> dict[str, float]:
        """Collective: over all ranks."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._max, dist.ReduceOp.MAX)
        n, gap, p, q, pp, qq, pq = (float(v) for v in self._sums)
        n = max(n, 1.0)
        covariance = pq / n - p * q / n**2
        variances = max(pp / n - (p / n) ** 2, 0.0), max(qq / n - (q / n) ** 2, 0.0)
        spread = (variances[0] * variances[1]) ** 0.5
        return {
            "training/rollout_probs_diff_mean": gap / n,
            "training/rollout_probs_diff_max": float(self._max),
            "training/rollout_actor_probs_pearson_corr": covariance / spread if spread else 1.0,
        }
