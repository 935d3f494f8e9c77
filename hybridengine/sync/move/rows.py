"""The rows of slices in the tables of an exchange, before their place in the buffers is known.

An encoding makes them: `Plain`, or `fp8.BlockScales`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridengine.kernels.strided_copy import TABLE_COLUMNS, CopyTable
from hybridengine.sync.geometry import Block, contiguous_strides
from hybridengine.sync.plan.source_class import SliceCopy

_MAX_AXES = 4  # axes of one row of the strided_copy table
Shape = tuple[int, ...]
_Address = tuple[int, Sequence[int]]  # offset and strides, in elements


class SliceRows(NamedTuple):
    """Table rows of S slices, R in all. In the buffer every slice starts at 0."""

    table: np.ndarray  # int64 [R, 16 or 17]; src_index is 0, dst_index the index of the write
    slice_of: np.ndarray  # [R]: the slice of a row
    ranks: np.ndarray  # [S]: the rank at the other end
    numel: np.ndarray  # [S]

    def elements_by_rank(self, world_size: int) -> list[int]:
        counts = np.bincount(self.ranks, self.numel, world_size)
        return counts.astype(np.int64).tolist()


def joined(parts: list[SliceRows]) -> SliceRows:
    """Concatenate rows, numbering their slices on."""
    if not parts:
        return Plain().rows("", (), "local", (), ())
    before = np.cumsum([0, *(len(p.ranks) for p in parts[:-1])])
    slice_of = [p.slice_of + b for p, b in zip(parts, before, strict=True)]
    table, ranks, numel = ([getattr(p, f) for p in parts] for f in ("table", "ranks", "numel"))
    return SliceRows(*map(np.concatenate, (table, slice_of, ranks, numel)))


def offsets_by_rank(rows: SliceRows) -> np.ndarray:
    """Return where each slice starts among those of the same rank: int64 [S]."""
    order = np.argsort(rows.ranks, kind="stable")
    ranks, numel = rows.ranks[order], rows.numel[order]
    before = np.cumsum(numel) - numel
    first = np.searchsorted(ranks, ranks)  # the first slice of the same rank
    offset = np.empty_like(numel)
    offset[order] = before - before[first]
    return offset


class Plain:
    """The encoding of values that are cast to the engine's dtype as they are packed."""

    def shapes(self, name: str) -> tuple:
        """Return the properties of a parameter's engine tensors that `rows` depends on."""
        return ()

    def rows(
        self, name: str, slices: Sequence[SliceCopy], way: str, strides: Shape, origin: Shape
    ) -> SliceRows:
        """Return the rows of one way. strides, origin: of the shard that pack and local read."""
        table: list[list[int]] = []
        slice_of: list[int] = []
        for i, slice_copy in enumerate(slices):
            for index, block in [(0, slice_copy.read)] if way == "pack" else slice_copy.writes:
                buffer = (0, _buffer_strides(block))
                source = buffer if way == "unpack" else block.address(strides, origin)
                destination = buffer if way == "pack" else (block.offset, block.strides)
                rows = _rows_of_block(index, block, source, destination)
                table += rows
                slice_of += [i] * len(rows)
        array = np.array(table, np.int64).reshape(-1, TABLE_COLUMNS)
        return slice_rows(array, np.array(slice_of, np.int64), slices, way)

    def number(self, table: np.ndarray, rows: SliceRows, name: str) -> None:
        """Add to the rows of one source what is particular to it."""

    def table(self, rows: np.ndarray, device: torch.device) -> CopyTable:
        """Return the table that encodes as it copies."""
        return CopyTable(torch.from_numpy(rows), device)

    def measuring(self, tables: Sequence[np.ndarray], device: torch.device) -> None:
        """Return the table that measures what is encoded: nothing."""


def slice_rows(
    table: np.ndarray, slice_of: np.ndarray, slices: Sequence[SliceCopy], way: str
) -> SliceRows:
    """Return rows that were made of `slices` for one way."""
    return SliceRows(
        table,
        slice_of,
        np.array([s.receiver if way == "pack" else s.sender for s in slices], np.int64),
        np.array([s.read.numel for s in slices], np.int64),
    )


def _buffer_strides(block: Block) -> list[int]:
    """Return the stride of each axis in a buffer with the elements in the order of reading."""
    read = iter(contiguous_strides(block.read.sizes))
    return [0 if axis.dim < 0 else next(read) for axis in block.axes]


def _rows_of_block(
    index: int, block: Block, source: _Address, destination: _Address
) -> list[list[int]]:
    """Return table rows of one block.

    Axes that are contiguous on both sides are merged. Of more than four axes, the outermost are
    unrolled into rows.
    """
    axes: list[tuple[int, int, int]] = []
    for axis in zip(block.sizes, source[1], destination[1], strict=True):
        size, s, d = axis
        if axes and axes[-1][1] == s * size and axes[-1][2] == d * size:
            axes[-1] = (axes[-1][0] * size, s, d)
        else:
            axes.append(axis)
    offsets = [(source[0], destination[0])]
    while len(axes) > _MAX_AXES:
        size, s, d = axes.pop(0)
        offsets = [(a + i * s, b + i * d) for a, b in offsets for i in range(size)]
    axes = [(1, 0, 0)] * (_MAX_AXES - len(axes)) + axes
    sizes, ss, ds = (list(column) for column in zip(*axes, strict=True))
    return [[0, index, a, b, *sizes, *ss, *ds] for a, b in offsets]
