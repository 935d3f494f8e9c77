"""Cutting a strided copy by an interval of one dimension of its source.

A copy iterates over `sizes`; iteration axis i moves the source by `strides[i]` elements. When the
source is a contiguous tensor, each such step advances exactly one source dimension by a whole
number of positions (a narrow, a view, a reshape, a transpose all do). `factor` finds that form;
`cut` keeps the part whose coordinate on one dimension lies in [low, high), exactly, as few pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Block",
    "NotABlock",
    "contiguous_strides",
    "count_below",
    "cut",
    "factor",
    "narrow",
    "reach",
]


class NotABlock(ValueError):
    """The copy does not step through its source one dimension at a time."""


@dataclass(frozen=True)
class Block:
    """A copy's iteration space, seen from the source's dimensions.

    start: the source coordinate of the first element, one entry per source dimension.
    sizes: extent of each iteration axis.
    axes: for each iteration axis (source dimension, positions per step); dimension -1 for an axis
      that repeats the same source element.
    offset, strides: where the axis walks in the destination, in elements.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[tuple[int, int], ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def read(self) -> Block:
        """The block without the axes that repeat the same source elements."""
        if all(dim >= 0 for dim, _ in self.axes):
            return self
        kept = [i for i, (dim, _) in enumerate(self.axes) if dim >= 0]
        sizes, axes, strides = (
            tuple(t[i] for i in kept) for t in (self.sizes, self.axes, self.strides)
        )
        return Block(self.start, sizes, axes, self.offset, strides)

    def address(self, strides: tuple[int, ...], origin: tuple[int, ...]) -> tuple[int, list[int]]:
        """(offset, stride per axis) in a source stored with `strides` from coordinate `origin`."""
        offset = sum((x - o) * s for x, o, s in zip(self.start, origin, strides, strict=True))
        return offset, [0 if dim < 0 else step * strides[dim] for dim, step in self.axes]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
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
    """Express a strided copy out of a contiguous tensor of `shape` as a Block.

    Raises NotABlock when an axis crosses a dimension's border unevenly.
    """
    full = contiguous_strides(shape)
    start = tuple((offset // f) % s if s else 0 for f, s in zip(full, shape, strict=True))
    reach = list(start)
    out_sizes: list[int] = []
    axes: list[tuple[int, int]] = []
    out_strides: list[int] = []
    # Inner axes first: an axis that wraps around a dimension is split there.
    todo = [a for a in zip(sizes, strides, destination_strides, strict=True) if a[0] != 1]
    while todo:
        size, stride, destination_stride = todo.pop()
        if stride == 0:
            out_sizes.insert(0, size)
            axes.insert(0, (-1, 0))
            out_strides.insert(0, destination_stride)
            continue
        dim = next(
            (d for d, f in enumerate(full) if shape[d] > 1 and f <= stride and stride % f == 0), -1
        )
        if dim < 0:
            raise NotABlock(f"an axis of stride {stride} fits no dimension of shape {shape}")
        step = stride // full[dim]
        inner = size
        if reach[dim] + step * (size - 1) >= shape[dim]:
            room = shape[dim] - reach[dim]
            inner = room // step
            if reach[dim] or room % step or inner < 1 or size % inner:
                raise NotABlock(
                    f"an axis of {size} steps of {stride} crosses a border of shape {shape}"
                )
            if inner < size:
                todo.append((size // inner, stride * inner, destination_stride * inner))
        if inner > 1:
            reach[dim] += step * (inner - 1)
            out_sizes.insert(0, inner)
            axes.insert(0, (dim, step))
            out_strides.insert(0, destination_stride)
    return Block(start, tuple(out_sizes), tuple(axes), destination_offset, tuple(out_strides))


def reach(block: Block, dim: int) -> tuple[int, int]:
    """[low, high) of the source coordinates on `dim` that the block touches."""
    axes = zip(block.axes, block.sizes, strict=True)
    steps = sum(step * (size - 1) for (d, step), size in axes if d == dim)
    return block.start[dim], block.start[dim] + steps + 1


def count_below(block: Block, dim: int, edges: np.ndarray) -> np.ndarray:
    """Elements of the block whose source coordinate on `dim` is below each of `edges` (int64)."""
    along = [(s, n) for (d, s), n in zip(block.axes, block.sizes, strict=True) if d == dim]
    if not along:
        return np.where(block.start[dim] < edges, block.numel, 0)
    (step, size), *others = sorted(along, key=lambda axis: -axis[1])
    starts = np.array([block.start[dim]])
    for other_step, other_size in others:
        starts = (starts[:, None] + other_step * np.arange(other_size)).reshape(-1)
    below = np.clip(-((starts[:, None] - edges) // step), 0, size)  # ceil((edge - start) / step)
    rest = block.numel // math.prod(n for _, n in along)
    return below.sum(0) * rest


def cut(block: Block, dim: int, low: int, high: int) -> Iterator[Block]:
    """The parts of `block` whose source coordinate on `dim` lies in [low, high)."""
    along = [i for i, (d, _) in enumerate(block.axes) if d == dim]
    x = block.start[dim]
    if not along:
        if low <= x < high:
            yield block
        return
    outer = max(along, key=lambda i: block.axes[i][1])
    step, size = block.axes[outer][1], block.sizes[outer]
    inner = sum(block.axes[i][1] * (block.sizes[i] - 1) for i in along if i != outer)
    # Steps i with every position x + i*step … x + i*step + inner inside, then the partial ones.
    first = max(0, -(-(low - x) // step))
    last = min(size, (high - 1 - inner - x) // step + 1)
    if first < last:
        yield narrow(block, outer, first, last)
    if inner == 0:
        return
    touched_first = max(0, -(-(low - x - inner) // step))
    touched_last = min(size, (high - 1 - x) // step + 1)
    for i in range(touched_first, touched_last):
        if first <= i < last:
            continue
        yield from cut(narrow(block, outer, i, i + 1), dim, low, high)


def narrow(block: Block, axis: int, first: int, last: int) -> Block:
    """The block restricted to steps [first, last) of one axis, without it if that is one step."""
    dim, step = block.axes[axis]
    start, sizes = list(block.start), list(block.sizes)
    if dim >= 0:
        start[dim] += first * step
    sizes[axis] = last - first
    kept = [i for i in range(len(sizes)) if i != axis or sizes[i] > 1]
    sizes, axes, strides = (tuple(t[i] for i in kept) for t in (sizes, block.axes, block.strides))
    return Block(tuple(start), sizes, axes, block.offset + first * block.strides[axis], strides)
