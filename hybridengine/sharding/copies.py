"""One strided copy between two named tensors, and how copies chain.

If T is filled by copies and then read, the read is itself a copy from what filled T: `compose`
finds it. So a checkpoint tensor that is cut out of a trained parameter (one expert of a fused
weight), or a temporary that a loader fills (a concatenation), never has to exist.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hybridengine.sharding.geometry import Block, NotABlock, cut, factor

__all__ = ["Copy", "compose", "merge"]


@dataclass(frozen=True, order=True)
class Copy:
    """One strided copy: checkpoint tensor `source` → engine tensor `destination`.

    Offsets and strides count elements from the start of each tensor; both sides share `sizes`.
    The source is addressed as the contiguous global tensor.
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

    def block(self, shape: tuple[int, ...]) -> Block:
        """This copy seen from the dimensions of its source of `shape`."""
        return factor(
            shape,
            self.source_offset,
            self.sizes,
            self.source_strides,
            self.destination_offset,
            self.destination_strides,
        )


def compose(read: Copy, writes: Iterable[Copy]) -> list[Copy]:
    """What `read` copies out of a tensor, taken from where `writes` brought it into that tensor.

    Elements that no write brought are left out. Raises NotABlock when the two do not step through
    the tensor in compatible strides, or when writes overlap in what is read.
    """
    composed = [copy for write in writes for copy in _through(read, write)]
    if sum(copy.numel for copy in composed) > read.numel:
        raise NotABlock("an element is written twice before it is read")
    return composed


def _through(read: Copy, write: Copy) -> Iterable[Copy]:
    """The part of `read` that lies in the region `write` fills, as copies from its source."""
    first, last = read.source_offset, _last(read.source_offset, read.sizes, read.source_strides)
    region = (write.destination_offset, write.sizes, write.destination_strides)
    if 0 in read.sizes or 0 in write.sizes or last < region[0] or first > _last(*region):
        return
    if region == (read.source_offset, read.sizes, read.source_strides):
        yield replace(
            write,
            destination=read.destination,
            destination_offset=read.destination_offset,
            destination_strides=read.destination_strides,
        )
        return
    # The write's own strides say into which dimensions the tensor falls: […, s1/s2, s2/s3, s3].
    walk = zip(write.destination_strides, write.sizes, write.source_strides, strict=True)
    axes = sorted((axis for axis in walk if axis[1] > 1), reverse=True)
    steps = [stride for stride, _, _ in axes]
    outer = steps[0] if steps else 1
    end = max(last, write.destination_offset + outer * (axes[0][1] if axes else 1)) // outer + 1
    shape, low = [end], [write.destination_offset // outer]
    for inner in [*steps[1:], 1] if steps else []:
        if outer % inner:
            raise NotABlock(f"a write with strides {write.destination_strides} is no lattice")
        shape.append(outer // inner)
        low.append(write.destination_offset // inner % shape[-1])
        outer = inner
    extents = [size for _, size, _ in axes] + [1]
    source_strides = [stride for _, _, stride in axes] + [0]
    high = [start + extent for start, extent in zip(low, extents, strict=False)]
    if any(h > n for h, n in zip(high, shape, strict=True)):
        raise NotABlock(f"a write with strides {write.destination_strides} wraps around")
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
    """The highest address of a strided region."""
    return offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def merge(
    copies: Iterable[Copy],
    source_shapes: Mapping[str, tuple[int, ...]],
    destination_shapes: Mapping[str, tuple[int, ...]],
) -> list[Copy]:
    """Fewer copies that do the same: boxes at equal distances along a dimension become one.

    A fused weight of E experts, loaded expert by expert, is E copies and merges into one.
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
                whole = replace(
                    first,
                    sizes=(run, *first.sizes),
                    source_strides=(source_step, *first.source_strides),
                    destination_strides=(destination_step, *first.destination_strides),
                )
                read = whole.source_offset, whole.sizes, whole.source_strides
                write = whole.destination_offset, whole.sizes, whole.destination_strides
                shapes = source_shapes[first.source], destination_shapes[first.destination]
                if _is_box(shapes[0], *read) and _is_box(shapes[1], *write):
                    break
            else:
                run, source_step, destination_step, whole = 1, 0, 0, first
            merged.append(whole)
            for i in range(run):
                del group[
                    first.source_offset + i * source_step,
                    first.destination_offset + i * destination_step,
                ]
    return merged


_NEIGHBOURS = 4  # gate and up of all experts interleave: the next of the same kind is near


def _runs(offsets: Iterable[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """(length, step) of the arithmetic runs of `offsets` that begin at the smallest, longest first.

    Only runs of two or more, ascending on both sides.
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


def _is_box(
    shape: tuple[int, ...], offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> bool:
    """Whether a region of a tensor of `shape` is a box, each dimension along one axis."""
    try:
        axes = factor(shape, offset, sizes, strides, 0, strides).axes
    except NotABlock:
        return False
    return all(step == 1 for _, step in axes) and len({dim for dim, _ in axes}) == len(axes)
