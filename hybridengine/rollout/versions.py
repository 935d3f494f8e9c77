"""Which weights sampled which tokens of a response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

__all__ = ["VersionRuns", "first_tokens", "join_runs"]

VersionRuns = Sequence[
    tuple[int, int]
]  # (weight version, number of sampled tokens), in their order


def join_runs(*parts: VersionRuns) -> list[tuple[int, int]]:
    """Return the runs of successive parts of a response.

    Examples:
        >>> join_runs([(3, 5)], [(3, 2), (4, 1)])
        [(3, 7), (4, 1)]
    """
    runs = [run for part in parts for run in part]
    return [(v, sum(n for _, n in same)) for v, same in groupby(runs, key=lambda run: run[0])]


def first_tokens(runs: VersionRuns, count: int) -> list[tuple[int, int]]:
    """Return the runs of the first `count` tokens.

    Examples:
        >>> first_tokens([(3, 5), (4, 2), (6, 1)], 6)
        [(3, 5), (4, 1)]
    """
    kept, left = list[tuple[int, int]](), count
    for version, size in runs:
        if left > 0:
            kept.append((version, min(size, left)))
        left -= size
    return kept
