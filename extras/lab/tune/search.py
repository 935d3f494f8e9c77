"""Search the largest size that fits, without ever running one that is predicted not to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Probe", "best_limit", "probe_limits", "smallest_fast"]

_STEP = 256  # limits between two doublings are multiples of this
_WORTH = 1.25  # a limit is tried if it is larger than the last one by this factor
_SAME_SPEED = 0.97  # of the fastest rate: measurements differ by that much


@dataclass(frozen=True)
class Probe:
    """One measured size.

    limit: the size, in tokens of a micro-batch or MiB of a bucket.
    memory: bytes of the fullest rank at its peak.
    rate: of work, larger is better: tokens per second, or bytes per second.
    """

    limit: int
    memory: float
    rate: float


def probe_limits(
    shortest: int, longest: int, allowed: float, measure: Callable[[int], Probe]
) -> Iterator[Probe]:
    """Yield probes of growing limits, from `shortest` to `longest`, as far as they fit.

    The limit doubles. Where the memory of the next one, extrapolated from the last two, is above
    `allowed` bytes, the largest limit that is predicted to fit is the last one.
    """
    probes, limit = list[Probe](), shortest
    while True:
        probes.append(measure(limit))
        yield probes[-1]
        if limit >= longest or probes[-1].memory > allowed:
            return
        doubled = min(2 * limit, longest)
        fitting = _largest_fitting(probes, allowed)
        following = doubled if doubled <= fitting else int(fitting) // _STEP * _STEP
        if following < doubled and following < _WORTH * limit:
            return
        limit = following


def _largest_fitting(probes: Sequence[Probe], allowed: float) -> float:
    """Extrapolate the limit whose memory is `allowed`; from one probe as if all of it grew."""
    last = probes[-1]
    slope = last.memory / last.limit
    if len(probes) > 1:
        before = probes[-2]
        slope = (last.memory - before.memory) / (last.limit - before.limit)
    return last.limit + (allowed - last.memory) / slope if slope > 0 else float("inf")


def best_limit(probes: Sequence[Probe], allowed: float) -> Probe | None:
    """Return the smallest of the fastest probes that fit in `allowed` bytes; None if none fits."""
    fitting = [probe for probe in probes if probe.memory <= allowed]
    return smallest_fast(fitting) if fitting else None


def smallest_fast(probes: Sequence[Probe]) -> Probe:
    """Return the smallest limit whose rate is within 3% of the best."""
    enough = _SAME_SPEED * max(probe.rate for probe in probes)
    return min((p for p in probes if p.rate >= enough), key=lambda probe: probe.limit)
