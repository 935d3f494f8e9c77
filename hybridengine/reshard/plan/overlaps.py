"""Which blocks read the same source elements: what is sent once and unpacked several times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hybridengine.sharding.geometry import Block, cut, reach

__all__ = ["Read", "shared_reads"]

Read = tuple[tuple[int, Block], ...]
"""One region of a source: for each destination (number of the block given, its part that reads the
region). All parts step through the region with the same axes in the same order."""


def shared_reads(blocks: Sequence[Block]) -> list[Read]:
    """Cut `blocks` into regions that read no element in common, each with all its destinations.

    Blocks that overlap in part are cut at each other's borders; all others stay as they are.
    """
    parts = list(enumerate(blocks))
    for borders in (_reaches, _positions):
        crossing = _crossing([block for _, block in parts])
        if not crossing:
            break
        parts = list(_cut_apart(parts, crossing, borders))
    regions: dict[object, list[tuple[int, Block]]] = defaultdict(list)
    for part in parts:
        regions[_region(part[1])].append(part)
    return [
        tuple((i, _in_order_of(block, region[0][1])) for i, block in region)
        for region in regions.values()
    ]


def _region(block: Block) -> object:
    """What of the source a block reads, whatever the order and however often."""
    axes = sorted((d, s, n) for (d, s), n in zip(block.axes, block.sizes, strict=True) if d >= 0)
    return block.start, tuple(axes)


def _in_order_of(block: Block, first: Block) -> Block:
    """`block` with its axes in the order of `first`, which reads the same region; repeats first."""
    order = {axis: i for i, axis in enumerate(first.axes)}
    at = sorted(range(len(block.axes)), key=lambda i: order.get(block.axes[i], -1))
    axes, sizes, strides = (
        tuple(walk[i] for i in at) for walk in (block.axes, block.sizes, block.strides)
    )
    return replace(block, axes=axes, sizes=sizes, strides=strides)


def _crossing(blocks: Sequence[Block]) -> list[list[int]]:
    """Groups of blocks that overlap, without those whose members all read one region."""
    first = {_region(block): i for i, block in reversed(list(enumerate(blocks)))}
    if len(first) < 2:
        return []
    distinct = sorted(first.values())
    dims = range(len(blocks[0].start))
    ends = np.array([[reach(blocks[i], dim) for dim in dims] for i in distinct])
    group = {i: i for i in distinct}
    for a, i in enumerate(distinct):
        meet = (ends[:, :, 0] < ends[a, :, 1]) & (ends[a, :, 0] < ends[:, :, 1])
        for b in np.flatnonzero(meet.all(1)[:a]).tolist():
            j = distinct[b]
            if group[i] != group[j] and _overlap(blocks[i], blocks[j]):
                old, new = group[i], group[j]
                group = {k: new if g == old else g for k, g in group.items()}
    members: dict[int, list[int]] = defaultdict(list)
    for i, block in enumerate(blocks):
        members[group[first[_region(block)]]].append(i)
    return [m for m in members.values() if len({_region(blocks[i]) for i in m}) > 1]


def _overlap(a: Block, b: Block) -> bool:
    """Whether two blocks read an element in common: a block is a product of sets of positions."""
    return all(
        np.intersect1d(_positions_of(a, dim), _positions_of(b, dim)).size
        for dim in range(len(a.start))
    )


def _positions_of(block: Block, dim: int) -> np.ndarray:
    positions = np.array([block.start[dim]])
    for (d, step), size in zip(block.axes, block.sizes, strict=True):
        if d == dim:
            positions = (positions[:, None] + step * np.arange(size)).reshape(-1)
    return positions


def _reaches(blocks: Sequence[Block], dim: int) -> set[int]:
    return {end for block in blocks for end in reach(block, dim)}


def _positions(blocks: Sequence[Block], dim: int) -> set[int]:
    """Every position, on a dimension through which the blocks do not step alike."""
    if len({_steps_on(block, dim) for block in blocks}) == 1:
        return set()
    every = {int(x) for block in blocks for x in _positions_of(block, dim)}
    return every | {position + 1 for position in every}


def _steps_on(block: Block, dim: int) -> tuple:
    axes = zip(block.axes, block.sizes, strict=True)
    return block.start[dim], tuple(sorted((s, n) for (d, s), n in axes if d == dim))


def _cut_apart(
    parts: Sequence[tuple[int, Block]],
    crossing: Iterable[Sequence[int]],
    borders: Callable[[Sequence[Block], int], set[int]],
) -> Iterator[tuple[int, Block]]:
    """All parts, those of each crossing group cut at the borders of the group."""
    cuts: dict[int, list[list[int]]] = {}
    for members in crossing:
        blocks = [parts[i][1] for i in members]
        edges = [sorted(borders(blocks, dim)) for dim in range(len(blocks[0].start))]
        cuts |= dict.fromkeys(members, edges)
    for i, (number, block) in enumerate(parts):
        pieces = [block]
        for dim, edges in enumerate(cuts.get(i, [])):
            spans = list(pairwise(edges))
            if spans:
                pieces = [p for b in pieces for low, high in spans for p in cut(b, dim, low, high)]
        yield from ((number, piece) for piece in pieces)
