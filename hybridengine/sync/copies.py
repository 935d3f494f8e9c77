"""Strided copies between two named tensors: composing and merging them.

A → T followed by T → B is a copy A → B; `compose` computes it. So intermediate tensors need not
exist: a checkpoint tensor that is a slice of a trained parameter (one expert of a fused weight), or
a temporary of the loader (a concatenation).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hybridengine.sync.geometry import Block, NotABlock, cut, factor, positions, reach

Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides, in elements


@dataclass(frozen=True, order=True)
class Copy:
    """One strided copy from tensor `source` to tensor `destination`.

    Offsets and strides are in elements; both sides share `sizes`. The source is addressed as the
    contiguous global tensor.
    """

    source: str
    destination: str
    source_offset: int
    destination_offset: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def read(self) -> Region:
        """What it reads of the source."""
        return self.source_offset, self.sizes, self.source_strides

    @property
    def written(self) -> Region:
        """What it writes of the destination."""
        return self.destination_offset, self.sizes, self.destination_strides

    def block(self, shape: tuple[int, ...]) -> Block:
        """Return this copy in the coordinates of its source, which has `shape`."""
        return factor(shape, *self.read, self.destination_offset, self.destination_strides)


def compose(read: Copy, writes: Iterable[Copy]) -> list[Copy]:
    """Return copies from the sources of `writes` to the destination of `read`.

    writes: copies into the tensor that `read` copies from. Elements that no write fills are left
    out. Raises NotABlock if the strides of the two are incompatible, or if two writes fill the same
    element.
    """
    composed = [copy for write in writes for copy in _through(read, write)]
    if sum(copy.numel for copy in composed) > read.numel:
        raise NotABlock("an element is written twice before it is read")
    return composed


def _through(read: Copy, write: Copy) -> Iterable[Copy]:
    """Compose one read and one write: copies of the elements that both have in common."""
    first, last = read.source_offset, _last(*read.read)
    if 0 in (*read.sizes, *write.sizes) or last < write.destination_offset:
        return
    if first > _last(*write.written):
        return
    if write.written == read.read:
        yield replace(
            write,
            destination=read.destination,
            destination_offset=read.destination_offset,
            destination_strides=read.destination_strides,
        )
        return
    # View the tensor with dimensions […, s1/s2, s2/s3, s3], s the strides of the write.
    walk = zip(write.destination_strides, write.sizes, write.source_strides, strict=True)
    axes = sorted((axis for axis in walk if axis[1] > 1), reverse=True)
    steps = [stride for stride, _, _ in axes]
    outer = steps[0] if steps else 1
    end = max(last, write.destination_offset + outer * (axes[0][1] if axes else 1)) // outer + 1
    shape, low = [end], [write.destination_offset // outer]
    for inner in [*steps[1:], 1] if steps else []:
        if outer % inner:
            raise NotABlock(f"strides {write.destination_strides} do not divide one another")
        shape.append(outer // inner)
        low.append(write.destination_offset // inner % shape[-1])
        outer = inner
    extents = [size for _, size, _ in axes] + [1]
    source_strides = [stride for _, _, stride in axes] + [0]
    high = [start + extent for start, extent in zip(low, extents, strict=False)]
    if any(h > n for h, n in zip(high, shape, strict=True)):
        raise NotABlock(f"a write with strides {write.destination_strides} crosses a dimension")
    blocks: list[Block] = [read.block(tuple(shape))]
    for dim, (first, stop) in enumerate(zip(low, high, strict=True)):
        blocks = [part for block in blocks for part in cut(block, dim, first, stop)]
    for block in blocks:
        offset, strides = block.address(tuple(source_strides[: len(low)]), tuple(low))
        yield Copy(
            write.source,
            read.destination,
            write.source_offset + offset,
            block.offset,
            block.sizes,
            tuple(strides),
            block.strides,
        )


def _last(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the highest address of a strided region."""
    return offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def merge(
    copies: Iterable[Copy],
    source_shapes: Mapping[str, tuple[int, ...]],
    destination_shapes: Mapping[str, tuple[int, ...]],
) -> list[Copy]:
    """Merge copies of equal boxes at equal distances into one copy with one more axis.

    A fused weight of E experts, loaded expert by expert, is E copies that merge into one.
    source_shapes, destination_shapes: the shapes of the tensors, by name.
    """
    alike: dict[tuple, dict[tuple[int, int], Copy]] = {}
    for c in copies:
        key = (c.source, c.destination, c.sizes, c.source_strides, c.destination_strides)
        alike.setdefault(key, {})[c.source_offset, c.destination_offset] = c
    merged: list[Copy] = []
    for group in alike.values():
        while group:
            first = group[min(group)]
            for run, (source_step, destination_step) in _runs(group):
                joined = replace(
                    first,
                    sizes=(run, *first.sizes),
                    source_strides=(source_step, *first.source_strides),
                    destination_strides=(destination_step, *first.destination_strides),
                )
                if _is_box(source_shapes[first.source], joined.read) and _is_box(
                    destination_shapes[first.destination], joined.written
                ):
                    break
            else:
                run, source_step, destination_step, joined = 1, 0, 0, first
            merged.append(joined)
            for i in range(run):
                del group[
                    first.source_offset + i * source_step,
                    first.destination_offset + i * destination_step,
                ]
    return merged


_NEIGHBOURS = 4  # candidates for the next copy of a run: gate and up of all experts alternate


def _runs(offsets: Iterable[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """Return (length, step) of the arithmetic runs from the smallest offset on, longest first.

    offsets: (source, destination). Runs have at least two entries and ascend on both sides.
    """
    known = set(offsets)
    s, d = min(known)
    runs = []
    for near in heapq.nsmallest(_NEIGHBOURS + 1, known)[1:]:
        step = (near[0] - s, near[1] - d)
        run = 1
        while min(step) > 0 and (s + run * step[0], d + run * step[1]) in known:
            run += 1
        if run > 1:
            runs.append((run, step))
    return sorted(runs, reverse=True)


def _is_box(shape: tuple[int, ...], region: Region) -> bool:
    """Return whether a region of a tensor of `shape` is a box: one range of each dimension."""
    try:
        axes = factor(shape, *region, 0, region[2]).axes
    except NotABlock:
        return False
    return all(axis.step == 1 for axis in axes) and len({axis.dim for axis in axes}) == len(axes)


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
