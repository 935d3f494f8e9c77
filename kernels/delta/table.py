"""ChangeTable: follow the changes of some elements through a table of strided slices.

What a dense sync does with `strided_copy` for all elements, in time proportional to the changes:
binary search for those inside a slice, then their coordinates by division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._backend import choose_backend, native, register_backends

register_backends("change_table", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_SIZE, _SRC, _DST = slice(4, 8), slice(8, 12), slice(12, 16)  # columns of a table


class ChangeTable:
    """The slices of a `strided_copy` table [P, 16], for changes of its sources on `device`.

    Changes of a source are `indices`, int32 or int64 [K], ascending, counted from its first
    element, and `values` [K] of a 16-bit dtype.

    Raises ValueError and IndexError for wrong tables and tensors.

    Examples:
        >>> row = [0, 0, 2, 0] + [1, 1, 2, 2] + [0, 0, 4, 1] + [0, 0, 2, 1]  # a 2 x 2 slice
        >>> table = ChangeTable(torch.tensor([row]), torch.device("cpu"))
        >>> positions, _ = table.map([torch.tensor([0, 2, 7])], [torch.ones(3).bfloat16()])
        >>> positions
        tensor([0, 3])
    """

    def __init__(self, table: Tensor, device: torch.device) -> None:
        rows = torch.from_numpy(_nested(table.numpy()))
        self._native: Any = None
        self._on_cpu = device.type == "cpu"
        if choose_backend("change_table", device) == "reference":
            self.rows = rows.to(device)
        else:
            self._native = native().ChangeTable(rows, device)

    def map(self, indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (positions int64, values) of all changes in the destination, ascending.

        All rows have one destination, and no two write the same element of it.
        """
        if self._native is not None:
            return self._native.map(list(indices), list(values))
        _, positions, mapped = self._follow(indices, values)
        positions, order = positions.sort()
        return positions, mapped[order]

    def scatter(
        self, indices: Sequence[Tensor], values: Sequence[Tensor], destinations: Sequence[Tensor]
    ) -> Tensor | None:
        """Write every change into the destinations, tensors of any strides and a 16-bit dtype.

        Positions count elements of the storage from the first element of a tensor, as in
        `strided_copy`. No two changes write the same element.

        Return by how much `bit_checksum` of each destination has grown, int64 [D], if it is
        contiguous and shares no memory with another. None: it was not computed (on GPUs).
        """
        if self._native is not None:
            checksums = self._native.scatter(list(indices), list(values), list(destinations))
            return checksums if self._on_cpu else None
        rows, positions, mapped = self._follow(indices, values)
        to = self.rows[rows, 1]
        for i, destination in enumerate(destinations):
            chosen = to == i
            start = destination.storage_offset()
            size = destination.untyped_storage().nbytes() // destination.element_size() - start
            flat = destination.as_strided((size,), (1,), start)
            flat[positions[chosen]] = mapped[chosen].view(flat.dtype)
        return None

    def _follow(
        self, indices: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (row, position in its destination, value) of every change: the specification."""
        table = self.rows
        sizes, strides = table[:, _SIZE], table[:, _SRC]
        ends = table[:, 2] + ((sizes - 1) * strides).sum(1) + 1
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for i, (index, value) in enumerate(zip(indices, values, strict=True)):
            rows = (table[:, 0] == i).nonzero()[:, 0]
            index = index.to(torch.int64)
            low = torch.searchsorted(index, table[rows, 2])
            counts = torch.searchsorted(index, ends[rows]) - low
            row = rows.repeat_interleave(counts)
            before = counts.cumsum(0) - counts
            first = (low - before).repeat_interleave(counts)
            at = first + torch.arange(len(row), device=row.device)
            rest, position = index[at] - table[row, 2], table[row, 3]
            inside = torch.ones_like(rest, dtype=torch.bool)
            for dim in range(4):
                steps = rest // strides[row, dim].clamp(min=1) * (sizes[row, dim] > 1)
                inside &= steps < sizes[row, dim]
                rest = rest - steps * strides[row, dim]
                position = position + steps * table[row, 12 + dim]
            inside &= rest == 0
            parts.append((row[inside], position[inside], value[at][inside]))
        if not parts:
            empty = table.new_empty(0)
            return empty, empty, empty.to(torch.bfloat16)
        row, position, value = (torch.cat(part) for part in zip(*parts, strict=True))
        return row, position, value


def _nested(table: np.ndarray) -> np.ndarray:
    """Return rows [P', 16] that visit each source element once, in nested dimensions.

    Dimensions are ordered by source stride, largest first, and each stride is larger than what all
    later dimensions reach together. Dimensions that repeat an element, or are not nested, are
    unrolled into rows. Rows are ordered by destination.
    """
    rows = table[(table[:, _SIZE] > 0).all(1)].copy()
    for dim in range(4):
        rows = _unrolled(rows, dim, (rows[:, 8 + dim] == 0) & (rows[:, 4 + dim] > 1))
    rows = _ordered(rows)
    for dim in range(3):
        reach = ((rows[:, _SIZE] - 1) * rows[:, _SRC])[:, dim + 1 :].sum(1)
        rows = _unrolled(rows, dim, (rows[:, 4 + dim] > 1) & (rows[:, 8 + dim] <= reach))
    return np.ascontiguousarray(rows[np.lexsort((rows[:, 3], rows[:, 1]))])


def _unrolled(rows: np.ndarray, dim: int, chosen: np.ndarray) -> np.ndarray:
    """Replace each chosen row by one for every step of a dimension."""
    if not chosen.any():
        return rows
    counts = np.where(chosen, rows[:, 4 + dim], 1)
    rows = rows.repeat(counts, axis=0)
    steps = np.arange(len(rows)) - (counts.cumsum() - counts).repeat(counts)
    rows[:, 2] += steps * rows[:, 8 + dim]
    rows[:, 3] += steps * rows[:, 12 + dim]
    rows[chosen.repeat(counts), 4 + dim] = 1
    return rows


def _ordered(rows: np.ndarray) -> np.ndarray:
    """Order the dimensions of each row by source stride, those of size 1 first."""
    unused = rows[:, _SIZE] == 1
    order = np.where(unused, np.iinfo(np.int64).min, -rows[:, _SRC]).argsort(1, kind="stable")
    for columns in (_SIZE, _SRC, _DST):
        rows[:, columns] = np.take_along_axis(rows[:, columns], order, 1)
    return rows
