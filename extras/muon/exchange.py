"""The exchange of matrices: slices of each travel to its owner, those of the result back.

Both ways of a round are plans of the weight sync (`hybridengine.sync`), from shards to the owner's
matrices and from these to shards, packed and unpacked by `strided_copy`. Values travel in the dtype
of the computation. While a rank orthogonalizes the matrices of a round, those of the next one and
the results of the one before are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import orthogonalize
from hybridengine.kernels.strided_copy import CopyTable
from hybridengine.muon.owners import Matrix, Round, assign, held_part, rounds
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.planner import build_plan
from hybridengine.sync.shards import Box, ShardSpec
from hybridengine.sync.tables import Exchange, ExchangeBuilder

_ONE_BUCKET = 1 << 62
_MATRICES = "matrices"  # of a rank, in a layout


class _Tables(NamedTuple):
    """The tables of one way; the dtypes of what is sent and of what it is copied to may differ."""

    exchange: Exchange[np.ndarray]
    pack: CopyTable
    local: CopyTable
    unpack: CopyTable


class _Trip(NamedTuple):
    """A round as one rank executes it.

    shape: of this rank's matrices, [B, M, N].
    gather, scatter: from shards to matrices, and back.
    parts: destination of `scatter` → (parameter, index of the part in its shard).
    """

    shape: tuple[int, int, int]
    gather: _Tables
    scatter: _Tables
    parts: dict[str, tuple[str, tuple[slice, ...]]]


class OrthogonalExchange:
    """Orthogonalizes all matrices of sharded parameters, each on one rank.

    specs: parameter [M, N] or [E, M, N] → its placement; the same on every rank.
    dtype: of the computation.
    rows: of each matrix of a parameter, where these are not M.

    Attributes:
        bytes_received, bytes_sent: of this rank, each time.
        owned: the matrices of each rank.
    """

    def __init__(
        self,
        specs: Mapping[str, ShardSpec],
        rank: int,
        world_size: int,
        device: torch.device,
        dtype: torch.dtype,
        rows: Mapping[str, int] | None = None,
    ) -> None:
        self._dtype, self._is_alone, self._device = dtype, world_size == 1, device
        self.owned = assign(specs, world_size, rows)
        self._trips = [
            _trip(specs, part, rank, device, dtype) for part in rounds(self.owned, dtype)
        ]
        exchanges = [e.exchange for trip in self._trips for e in (trip.gather, trip.scatter)]
        self.bytes_received = sum(sum(e.bytes_received) for e in exchanges)
        self.bytes_sent = sum(sum(e.bytes_sent) for e in exchanges)

    def run(self, shards: Mapping[str, Tensor]) -> None:
        """Replace every matrix by `orthogonalize` of it. Collective.

        shards: parameter → this rank's shard, contiguous.
        """
        arriving = [self._gather(trip, shards) for trip in self._trips[:1]]
        returning: list[Callable[[], None]] = []
        for i, trip in enumerate(self._trips):
            matrices, finish = arriving.pop()
            arriving = [self._gather(following, shards) for following in self._trips[i + 1 : i + 2]]
            finish()
            result = orthogonalize(matrices)
            del matrices
            for done in returning:
                done()
            exchange = trip.scatter.exchange
            parts = [trip.parts[name] for name in exchange.destinations]
            targets = [shards[parameter][index] for parameter, index in parts]
            sources = [result] * len(exchange.sources)  # this rank's own is the one it reads
            returning = [self._start(trip.scatter, sources, targets)]
        for done in returning:
            done()

    def _gather(
        self, trip: _Trip, shards: Mapping[str, Tensor]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Start to move a round's slices; return this rank's matrices, and what completes them."""
        matrices = torch.empty(trip.shape, dtype=self._dtype, device=self._device)
        sources = [shards[name] for name, _ in trip.gather.exchange.sources]
        return matrices, self._start(trip.gather, sources, [matrices])

    def _start(
        self, tables: _Tables, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Pack and post; return what waits and unpacks."""
        sent, received = tables.exchange.bytes_sent, tables.exchange.bytes_received
        outgoing = torch.empty(sum(sent), dtype=torch.uint8, device=self._device)
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        tables.pack.copy(sources, [outgoing.view(self._dtype)])
        work = None
        if not self._is_alone:
            work = dist.all_to_all_single(incoming, outgoing, received, sent, async_op=True)
        tables.local.copy(sources, targets)

        def finish() -> None:
            if work is not None:
                work.wait()
            arrived = [part.view(self._dtype) for part in incoming.split(received)]
            tables.unpack.copy(arrived, targets)

        return finish


def _trip(
    specs: Mapping[str, ShardSpec],
    work: Round,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
) -> _Trip:
    rows, columns = next(m.shape for matrices in work for m in matrices)
    shapes = [(len(matrices), rows, columns) for matrices in work]
    involved = {m.parameter: specs[m.parameter] for matrices in work for m in matrices}
    strides = {}
    for name, spec in involved.items():
        shard = spec.shard_of(rank)
        strides[name] = contiguous_strides(tuple(b - a for a, b in spec.box(shard)))
    gather = _exchange(involved, [_owner_layout(m, dtype) for m in work], rank, strides, device)
    owners = {
        str(owner): ShardSpec.along(shape, dtype, 0, ((owner,),))
        for owner, shape in enumerate(shapes)
        if shape[0]
    }
    own = {str(rank): contiguous_strides(shapes[rank])}
    layouts = [_shard_layout(specs, work, r, dtype) for r in range(len(work))]
    scatter = _exchange(owners, layouts, rank, own, device)
    parts = {}
    for matrices in work:
        for _, matrix, part, box in _held(specs, matrices, rank):
            within = (
                slice(a.start - b.start, a.stop - b.start)
                for a, b in zip(part[:-1], box[:-1], strict=True)
            )
            parts[_destination(matrix)] = matrix.parameter, tuple(within)
    return _Trip(shapes[rank], gather, scatter, parts)


def _exchange(
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    rank: int,
    strides: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> _Tables:
    plan = build_plan(sources, layouts, _ONE_BUCKET)
    [bucket] = plan.buckets
    rows = ExchangeBuilder(plan, rank, strides, device).rows(bucket)
    tables = rows.pack, rows.local, rows.unpack
    return _Tables(rows, *(CopyTable(torch.from_numpy(table), device) for table in tables))


def _owner_layout(matrices: Sequence[Matrix], dtype: torch.dtype) -> EngineLayout:
    """Return how an owner's matrices, [B, M, N], derive from the parameters."""
    copies = []
    for i, (parameter, number, (rows, columns), _) in enumerate(matrices):
        size, strides = rows * columns, (columns, 1)
        offsets = number * size, i * size
        copies.append(Copy(parameter, _MATRICES, *offsets, (rows, columns), strides, strides))
    shape = (len(matrices), *(matrices[0].shape if matrices else (0, 0)))
    spec = TensorSpec(shape, contiguous_strides(shape), dtype)
    return EngineLayout({_MATRICES: spec} if matrices else {}, copies)


def _shard_layout(
    specs: Mapping[str, ShardSpec], work: Round, rank: int, dtype: torch.dtype
) -> EngineLayout:
    """Return how the parts of a rank's shards derive from the owners' matrices.

    A destination is `<number>/<parameter>`: the rank's part of one matrix, contiguous.
    """
    destinations, copies = {}, []
    for owner, matrices in enumerate(work):
        for i, matrix, (*_, (top, bottom), (left, right)), _ in _held(specs, matrices, rank):
            name, sizes = _destination(matrix), (bottom - top, right - left)
            strides = contiguous_strides(sizes)
            destinations[name] = TensorSpec(sizes, strides, dtype)
            rows, columns = matrix.shape
            offset = (i * rows + top % rows) * columns + left
            copies.append(Copy(str(owner), name, offset, 0, sizes, (columns, 1), strides))
    return EngineLayout(destinations, copies)


def _destination(matrix: Matrix) -> str:
    return f"{matrix.number}/{matrix.parameter}"


def _held(
    specs: Mapping[str, ShardSpec], matrices: Sequence[Matrix], rank: int
) -> Iterator[tuple[int, Matrix, Box, Box]]:
    """Yield the matrices that a rank has a part of: index, matrix, part, and the rank's box."""
    for i, matrix in enumerate(matrices):
        spec = specs[matrix.parameter]
        box = spec.box(spec.shard_of(rank))
        if part := held_part(matrix, spec, box):
            yield i, matrix, part, box
