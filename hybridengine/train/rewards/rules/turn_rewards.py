"""No score of its own: the rewards of the turns are all that counts (multi-turn rollouts)."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return 0."""
    return 0.0
