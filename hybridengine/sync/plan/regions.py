"""Regions of a source that are sent once although several engine tensors read them.

Tied weights, replicated KV heads and values taken from the weight of the keys are examples: their
elements travel once and are written several times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hybridengine.sync.geometry import Block, cut, positions, reach

Writes = tuple[tuple[int, Block], ...]
"""Where one region of a source is written: (index of the copy, its part that reads the region).

All blocks read the same elements, with the same axes in the same order.
"""


def disjoint_regions(blocks: Sequence[Block]) -> list[Writes]:
    """Cut `blocks` into regions that have no source element in common, each with all its writes.

    Blocks that overlap in part are cut at each other's borders; the others are not cut.
    """
    parts = list(enumerate(blocks))
    for borders in (_ends, _all_positions):
        groups = _partly_overlapping([block for _, block in parts])
        if not groups:
            break
        parts = list(_cut_at_borders(parts, groups, borders))
    regions: dict[object, list[tuple[int, Block]]] = defaultdict(list)
    for part in parts:
        regions[_region(part[1])].append(part)
    return [
        tuple((i, _with_axes_of(region[0][1], block)) for i, block in region)
        for region in regions.values()
    ]


def _region(block: Block) -> object:
    """Return a key of the elements a block reads, independent of their order and repetition."""
    return block.start, tuple(sorted(axis[:3] for axis in block.read.axes))


def _with_axes_of(first: Block, block: Block) -> Block:
    """Reorder the axes of `block` as in `first`, which reads the same region.

    Repeating axes come first.
    """
    order = {(axis.dim, axis.step): i for i, axis in enumerate(first.axes)}
    axes = sorted(block.axes, key=lambda axis: order.get((axis.dim, axis.step), -1))
    return replace(block, axes=tuple(axes))


def _partly_overlapping(blocks: Sequence[Block]) -> list[list[int]]:
    """Return groups of overlapping blocks, except groups that read exactly one region."""
    first = {_region(block): i for i, block in reversed(list(enumerate(blocks)))}
    if len(first) < 2:
        return []
    distinct = sorted(first.values())
    dims = range(len(blocks[0].start))
    ends = np.array([[reach(blocks[i], dim) for dim in dims] for i in distinct])
    group = {i: i for i in distinct}
    for a, i in enumerate(distinct):
        near = np.all((ends[:, :, 0] < ends[a, :, 1]) & (ends[a, :, 0] < ends[:, :, 1]), axis=1)
        for b in np.flatnonzero(near[:a]).tolist():
            j = distinct[b]
            if group[i] != group[j] and _overlap(blocks[i], blocks[j]):
                old, new = group[i], group[j]
                group = {k: new if g == old else g for k, g in group.items()}
    members: dict[int, list[int]] = defaultdict(list)
    for i, block in enumerate(blocks):
        members[group[first[_region(block)]]].append(i)
    return [m for m in members.values() if len({_region(blocks[i]) for i in m}) > 1]


def _overlap(a: Block, b: Block) -> bool:
    """Return whether two blocks read a common element.

    A block reads a product of sets, one set of positions per dimension.
    """
    return all(
        np.intersect1d(positions(a, dim), positions(b, dim)).size for dim in range(len(a.start))
    )


def _ends(blocks: Sequence[Block], dim: int) -> set[int]:
    return {end for block in blocks for end in reach(block, dim)}


def _all_positions(blocks: Sequence[Block], dim: int) -> set[int]:
    """Every position on `dim`, unless all blocks step through it alike."""
    if len({(b.start[dim], *sorted(axis[:3] for axis in b.along(dim))) for b in blocks}) == 1:
        return set()
    every = {int(x) for block in blocks for x in positions(block, dim)}
    return every | {position + 1 for position in every}


def _cut_at_borders(
    parts: Sequence[tuple[int, Block]],
    groups: Iterable[Sequence[int]],
    borders: Callable[[Sequence[Block], int], set[int]],
) -> Iterator[tuple[int, Block]]:
    """Yield all parts; those of a group are cut at the borders of the group."""
    cuts: dict[int, list[list[int]]] = {}
    for members in groups:
        group = [parts[i][1] for i in members]
        edges = [sorted(borders(group, dim)) for dim in range(len(group[0].start))]
        cuts |= dict.fromkeys(members, edges)
    for i, (index, block) in enumerate(parts):
        blocks = [block]
        for dim, ends in enumerate(cuts.get(i, [])):
            if spans := list(pairwise(ends)):
                blocks = [p for b in blocks for low, high in spans for p in cut(b, dim, low, high)]
        yield from ((index, part) for part in blocks)
