"""Strided copies in the coordinates of their source, and how to cut them along one dimension.

A strided copy iterates over `sizes`; iteration axis i advances the source by `strides[i]` elements.
Where the source is contiguous, each such step advances exactly one source dimension by a whole
number of positions (true of narrow, view, reshape and transpose). `factor` computes that form, a
`Block`; `cut` restricts a block to the coordinates [low, high) of one source dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
