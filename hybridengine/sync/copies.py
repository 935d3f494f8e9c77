"""Strided copies between two named tensors: composing and merging them.

A → T followed by T → B is a copy A → B; `compose` computes it. So intermediate tensors need not
exist: a checkpoint tensor that is a slice of a trained parameter (one expert of a fused weight), or
a temporary of the loader (a concatenation).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hybridengine.sync.geometry import Block, NotABlock, cut, factor

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
