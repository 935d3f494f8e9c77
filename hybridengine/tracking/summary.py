"""summary.json, and how sure a held-out accuracy is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.storage import atomic_file

__all__ = ["accuracy_interval", "gain_interval", "write_summary"]

_Z95 = 1.959964  # two-sided 95% of a normal distribution


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as JSON; non-finite numbers become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in summary.items()
    }
    with atomic_file(Path(path)) as temporary:
        temporary.write_text(json.dumps(clean, indent=2, allow_nan=False) + "\n")


def accuracy_interval(accuracy: float, n: int) -> tuple[float, float]:
    """95% interval of an accuracy measured on `n` problems (Wilson 1927, score interval)."""
    spread = _Z95**2 / n
    centre = (accuracy + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(accuracy * (1 - accuracy) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def gain_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """(gain, low, high): mean of `after - before` over the same problems, with its 95% interval.

    Problems are paired, so only what changed counts towards the spread (normal approximation).
    """
    gains = [b - a for a, b in zip(before, after, strict=True)]
    n = len(gains)
    mean = math.fsum(gains) / n
    variance = math.fsum((g - mean) ** 2 for g in gains) / max(1, n - 1)
    half = _Z95 * math.sqrt(variance / n)
    return mean, mean - half, mean + half
