"""Strided copies in the coordinates of their source, and how to cut them along one dimension.

A strided copy iterates over `sizes`; iteration axis i advances the source by `strides[i]` elements.
Where the source is contiguous, each such step advances exactly one source dimension by a whole
number of positions (true of narrow, view, reshape and transpose). `factor` computes that form, a
`Block`; `cut` restricts a block to the coordinates [low, high) of one source dimension, and
`disjoint_regions` cuts blocks that overlap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class NotABlock(ValueError):
    """A strided copy whose axes do not each follow one dimension of its source."""


class Axis(NamedTuple):
    """One iteration axis of a Block.

    size: number of steps.
    dim: the source dimension it follows, -1 for an axis that repeats the same source elements.
    step: positions per step.
    stride: elements per step in the destination.
    """

    size: int
    dim: int
    step: int
    stride: int


@dataclass(frozen=True)
class Block:
    """A strided copy, its source side given by coordinates.

    start: source coordinate of the first element, one entry per source dimension.
    axes: outermost first.
    offset: address of the first element in the destination, in elements.
    """

    start: tuple[int, ...]
    axes: tuple[Axis, ...]
    offset: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in the destination."""
        return tuple(axis.stride for axis in self.axes)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def read(self) -> Block:
        """The block without repeating axes: each source element once."""
        return Block(self.start, tuple(a for a in self.axes if a.dim >= 0), self.offset)

    def along(self, dim: int) -> list[Axis]:
        """Return the axes that follow source dimension `dim`."""
        return [axis for axis in self.axes if axis.dim == dim]

    def address(self, strides: tuple[int, ...], origin: tuple[int, ...]) -> tuple[int, list[int]]:
        """Return (offset, stride per axis) in a tensor that stores the source from `origin` on.

        strides: the strides of that tensor, in elements.
        origin: source coordinate of its first element.
        """
        offset = sum((x - o) * s for x, o, s in zip(self.start, origin, strides, strict=True))
        return offset, [0 if a.dim < 0 else a.step * strides[a.dim] for a in self.axes]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def factor(
    shape: tuple[int, ...],
    offset: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    destination_offset: int,
    destination_strides: tuple[int, ...],
) -> Block:
    """Return a strided copy out of a contiguous tensor of `shape` as a Block.

    Raises NotABlock where an axis crosses the border of a dimension and cannot be split there.
    """
    full = contiguous_strides(shape)
    start = tuple((offset // f) % s if s else 0 for f, s in zip(full, shape, strict=True))
    last = list(start)  # coordinate of the last element
    axes: list[Axis] = []
    # Innermost axis first. An axis that wraps around a dimension is split into two.
    todo = [a for a in zip(sizes, strides, destination_strides, strict=True) if a[0] != 1]
    while todo:
        size, stride, destination_stride = todo.pop()
        if stride == 0:
            axes.append(Axis(size, -1, 0, destination_stride))
            continue
        dim = next(
            (d for d, f in enumerate(full) if shape[d] > 1 and f <= stride and stride % f == 0), -1
        )
        if dim < 0:
            raise NotABlock(f"stride {stride} is a step along no dimension of shape {shape}")
        step = stride // full[dim]
        inner = size
        if last[dim] + step * (size - 1) >= shape[dim]:
            room = shape[dim] - last[dim]
            inner = room // step
            if last[dim] or room % step or inner < 1 or size % inner:
                raise NotABlock(
                    f"an axis of {size} steps of {stride} crosses a border of shape {shape}"
                )
            if inner < size:
                todo.append((size // inner, stride * inner, destination_stride * inner))
        if inner > 1:
            last[dim] += step * (inner - 1)
            axes.append(Axis(inner, dim, step, destination_stride))
    return Block(start, tuple(reversed(axes)), destination_offset)


def reach(block: Block, dim: int) -> tuple[int, int]:
    """Return the smallest [low, high) with all source coordinates of the block on `dim`."""
    steps = sum(axis.step * (axis.size - 1) for axis in block.along(dim))
    return block.start[dim], block.start[dim] + steps + 1


def positions(block: Block, dim: int) -> np.ndarray:
    """Return the source coordinates of the block on `dim`, int64, in order of iteration."""
    return _positions(block.start[dim], block.along(dim))


def _positions(start: int, axes: list[Axis]) -> np.ndarray:
    found = np.array([start])
    for axis in axes:
        found = (found[:, None] + axis.step * np.arange(axis.size)).reshape(-1)
    return found


def count_below(block: Block, dim: int, edges: np.ndarray) -> np.ndarray:
    """For each of `edges`, count the block's positions on `dim` that are below it: int64.

    Times the numbers of positions on all other dimensions, and of repetitions, these are elements.
    """
    along = block.along(dim)
    if not along:
        return (block.start[dim] < edges).astype(np.int64)
    longest, *others = sorted(along, key=lambda axis: -axis.size)
    starts = _positions(block.start[dim], others).reshape(-1, *[1] * edges.ndim)
    # ceil((edge - start) / step)
    below = np.clip(-((starts - edges) // longest.step), 0, longest.size)
    return below.sum(0)


def cut(block: Block, dim: int, low: int, high: int) -> Iterator[Block]:
    """Yield the parts of `block` with source coordinates in [low, high) on `dim`."""
    x, along = block.start[dim], block.along(dim)
    if not along:
        if low <= x < high:
            yield block
        return
    widest = max(along, key=lambda axis: axis.step)
    outer, step, size = block.axes.index(widest), widest.step, widest.size
    inner = reach(block, dim)[1] - x - 1 - step * (size - 1)
    # First the steps i whose positions x + i*step … x + i*step + inner are all inside [low, high).
    first = max(0, -(-(low - x) // step))
    last = min(size, (high - 1 - inner - x) // step + 1)
    if first < last:
        yield narrow(block, outer, first, last)
    if inner == 0:
        return
    # Then the steps that are inside in part, one at a time.
    touched_first = max(0, -(-(low - x - inner) // step))
    touched_last = min(size, (high - 1 - x) // step + 1)
    for i in range(touched_first, touched_last):
        if not first <= i < last:
            yield from cut(narrow(block, outer, i, i + 1), dim, low, high)


def narrow(block: Block, axis: int, first: int, last: int) -> Block:
    """Restrict the block to steps [first, last) of one axis; an axis of one step is dropped."""
    axes, start = list(block.axes), list(block.start)
    _, dim, step, stride = axes[axis]
    if dim >= 0:
        start[dim] += first * step
    axes[axis : axis + 1] = [Axis(last - first, dim, step, stride)] if last - first > 1 else []
    return Block(tuple(start), tuple(axes), block.offset + first * stride)


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
