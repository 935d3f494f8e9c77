"""The layouts of all data-parallel ranks of an engine from those of three.

DP ranks of an engine with expert parallelism hold equal weights but for their experts, and expert
number e of DP rank d is read where that of rank 0 is, some multiple of d further. Of 64 such ranks
recording all takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hybridengine.sync.copies import Copy
from hybridengine.sync.layout import EngineLayout


def record_dp_ranks(record: Callable[[int], EngineLayout], dp_size: int) -> list[EngineLayout]:
    """Return `record(dp_rank)` of every DP rank, each calculated from others where possible.

    Ranks 0, 1 and the last are recorded. If their copies differ in source offsets alone, by equal
    steps from rank to rank, the others follow; else all ranks are recorded.
    """
    if dp_size <= 3:
        return [record(rank) for rank in range(dp_size)]
    first, second, last = (record(rank) for rank in (0, 1, dp_size - 1))
    steps, derive = _source_steps(first, second), record
    if steps is not None and _shifted(first, steps, dp_size - 1).digest() == last.digest():
        derive = partial(_shifted, first, steps)
    return [first, second, *map(derive, range(2, dp_size - 1)), last]


def _source_steps(first: EngineLayout, second: EngineLayout) -> dict[Copy, int] | None:
    """Return how much further `second` reads for each copy of `first`; None if more differs."""

    def keyed(layout: EngineLayout) -> dict[Copy, Copy]:
        return {replace(copy, source_offset=0): copy for copy in layout.copies}

    ours, theirs = keyed(first), keyed(second)
    if ours.keys() != theirs.keys() or len(ours) != len(first.copies):
        return None
    return {copy: theirs[key].source_offset - copy.source_offset for key, copy in ours.items()}


def _shifted(layout: EngineLayout, steps: dict[Copy, int], times: int) -> EngineLayout:
    """Return the layout with `times` steps added to each source offset."""
    copies = [
        replace(copy, source_offset=copy.source_offset + step * times)
        for copy, step in steps.items()
    ]
    return replace(layout, copies=copies).ordered()
