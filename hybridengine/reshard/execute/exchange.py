"""One bucket as one rank runs it: its copy tables and split sizes.

The rows of a table are made once per structurally equal source; every further source of the kind
takes them with its own tensor numbers and its own places in the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hybridengine.kernels.strided_copy import TABLE_COLUMNS, CopyTable
from hybridengine.reshard.plan.planner import Bucket, ReshardPlan, Slice, Unit
from hybridengine.sharding.geometry import Block, contiguous_strides

__all__ = ["Exchange", "Slab", "TableMaker"]

_ALIGNMENT = 16  # bytes
_AXES = 4  # axes of one row of the strided_copy table
_Side = tuple[int, Sequence[int]]  # offset and strides, in elements


class Slab(NamedTuple):
    """What a bucket reads of one source: [low, high) on its sharded dimension."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Exchange:
    """pack: slabs → outbox; local: slabs → engine tensors; unpack: inbox → engine tensors.

    send_counts, receive_counts: elements per peer. once: its sources do not change.
    """

    engine_dtype: torch.dtype
    once: bool
    slabs: list[Slab]
    destinations: list[str]
    pack: CopyTable
    local: CopyTable
    unpack: CopyTable
    send_counts: list[int]
    receive_counts: list[int]

    def halves(self, limit: int) -> tuple[int, int, int]:
        """Bytes at which the outbox ends, the inbox begins and ends in a staging buffer.

        The inbox is aligned for vector accesses unless the buffer would be larger than `limit`.
        """
        size = self.engine_dtype.itemsize
        out, into = sum(self.send_counts) * size, sum(self.receive_counts) * size
        start = -(-out // _ALIGNMENT) * _ALIGNMENT
        if start + into > limit:
            start = out
        return out, start, start + into


class _Rows(NamedTuple):
    """Table rows of some slices; the dense side begins at 0 for each slice."""

    table: np.ndarray  # int64 [R, 16]; the tensor columns hold 0 and the slice's `need`
    slice_of: np.ndarray  # [R]: which slice the row is of
    peers: np.ndarray  # [P]
    numel: np.ndarray  # [P]


class TableMaker:
    """Makes the exchanges of one rank.

    strides: source → strides of this rank's shard of it, in elements. device: of shards and engine.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._plan, self._rank, self._strides, self._device = plan, rank, strides, device
        self._rows: dict[tuple, _Rows] = {}

    def exchange(self, bucket: Bucket) -> Exchange:
        slabs: list[Slab] = []
        known: dict[tuple, int] = {}  # a shard is read in place by all units; merged rows by one
        places: dict[str, int] = {}
        parts: dict[str, list[_Rows]] = {"pack": [], "local": [], "unpack": []}
        for unit in bucket.units:
            key = (unit.source, unit.share if bucket.merged else None)
            if key not in known:
                known[key] = len(slabs)
                slabs.append(self._slab(bucket, unit))
            names = self._plan.destinations(bucket, unit, self._rank)
            to = np.array([places.setdefault(n, len(places)) for n in names], np.int64)
            for way, rows in self._unit_rows(bucket, unit).items():
                table = rows.table.copy()
                table[:, 0] = 0 if way == "unpack" else known[key]
                table[:, 1] = 0 if way == "pack" else to[table[:, 1]]
                parts[way].append(rows._replace(table=table))
        pack, send_counts = self._table(parts["pack"], dense=3)
        unpack, receive_counts = self._table(parts["unpack"], dense=2)
        local, _ = self._table(parts["local"])
        tables, counts = (pack, local, unpack), (send_counts, receive_counts)
        return Exchange(bucket.engine_dtype, bucket.frozen, slabs, list(places), *tables, *counts)

    def _slab(self, bucket: Bucket, unit: Unit) -> Slab:
        """The whole shard, or the rows that are merged for this unit."""
        spec = self._plan.sources[unit.source]
        shard = self._plan.shard(bucket, unit, self._rank)
        if shard is None:
            return Slab(unit.source, 0, 0)
        if bucket.merged:  # its parts are parts of the shard's rows
            return Slab(unit.source, *spec.interval(shard, unit.share.part, unit.share.parts))
        return Slab(unit.source, *spec.interval(shard))

    def _unit_rows(self, bucket: Bucket, unit: Unit) -> dict[str, _Rows]:
        """Rows of every way for one unit, without tensor numbers and places in the buffers."""
        slab, spec = self._slab(bucket, unit), self._plan.sources[unit.source]
        origin = [0] * len(spec.shape)
        strides = self._strides[unit.source]
        origin[spec.dim] = slab.low
        if bucket.merged:
            held = list(spec.shape)
            held[spec.dim] = slab.high - slab.low
            strides = contiguous_strides(tuple(held))
        incoming = self._plan.incoming(bucket, unit, self._rank)
        outgoing = self._plan.outgoing(bucket, unit, self._rank)

        made = {}
        for way, slices in (("pack", outgoing), ("local", incoming), ("unpack", incoming)):
            key = (way, id(slices), strides, tuple(origin))
            if key not in self._rows:
                own = way == "local"
                chosen = [s for s in slices if way == "pack" or (s.sender == self._rank) == own]
                self._rows[key] = _rows_of(chosen, way, strides, tuple(origin))
            made[way] = self._rows[key]
        return made

    def _table(self, parts: list[_Rows], dense: int | None = None) -> tuple[CopyTable, list[int]]:
        """One table of all units; in column `dense` go the places in a buffer ordered by peer."""
        table = np.concatenate([p.table for p in parts] or [np.empty((0, TABLE_COLUMNS), np.int64)])
        counts = np.zeros(self._plan.world_size, np.int64)
        if dense is not None and len(table):
            peers, numel = (
                np.concatenate([getattr(p, f) for p in parts]) for f in ("peers", "numel")
            )
            order = np.argsort(peers, kind="stable")
            place = np.empty_like(numel)
            place[order] = np.cumsum(numel[order]) - numel[order]
            before = np.cumsum([0, *(len(p.peers) for p in parts[:-1])])
            slices = np.concatenate([p.slice_of + b for p, b in zip(parts, before, strict=True)])
            table[:, dense] += place[slices]
            np.add.at(counts, peers, numel)
        return CopyTable(torch.from_numpy(table), self._device), counts.tolist()


def _rows_of(
    slices: Sequence[Slice], way: str, strides: tuple[int, ...], origin: tuple[int, ...]
) -> _Rows:
    """The rows of one way. strides, origin: of the shard that "pack" and "local" read."""
    rows: list[list[int]] = []
    slice_of: list[int] = []
    for i, piece in enumerate(slices):
        if way == "pack":
            dense = (0, contiguous_strides(piece.block.sizes))
            made = _rows(0, piece.block, piece.block.address(strides, origin), dense)
        else:
            made = []
            for need, block in piece.targets:
                read = block.address(strides, origin) if way == "local" else (0, _dense(block))
                made += _rows(need, block, read, (block.offset, block.strides))
        rows += made
        slice_of += [i] * len(made)
    return _Rows(
        np.array(rows, np.int64).reshape(-1, TABLE_COLUMNS),
        np.array(slice_of, np.int64),
        np.array([s.receiver if way == "pack" else s.sender for s in slices], np.int64),
        np.array([s.block.numel for s in slices], np.int64),
    )


def _dense(block: Block) -> list[int]:
    """The stride of each axis where the elements a block reads lie in the order it reads them."""
    read = iter(contiguous_strides(block.read.sizes))
    return [0 if dim < 0 else next(read) for dim, _ in block.axes]


def _rows(need: int, block: Block, source: _Side, destination: _Side) -> list[list[int]]:
    """Table rows of one slice: adjacent axes merged, more than four axes unrolled outermost."""
    axes: list[tuple[int, int, int]] = []
    for axis in zip(block.sizes, source[1], destination[1], strict=True):
        size, s, d = axis
        if axes and axes[-1][1] == s * size and axes[-1][2] == d * size:
            axes[-1] = (axes[-1][0] * size, s, d)
        else:
            axes.append(axis)
    rows = [(source[0], destination[0])]
    while len(axes) > _AXES:
        size, s, d = axes.pop(0)
        rows = [(a + i * s, b + i * d) for a, b in rows for i in range(size)]
    axes = [(1, 0, 0)] * (_AXES - len(axes)) + axes
    sizes, ss, ds = (list(column) for column in zip(*axes, strict=True))
    return [[0, need, a, b, *sizes, *ss, *ds] for a, b in rows]
