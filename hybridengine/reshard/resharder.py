"""Executes a reshard plan: pack → all-to-all-v → unpack, straight into the live engine weights.

Two buckets are in flight: while bucket k travels, bucket k's local slices are copied and bucket
k-1 is unpacked. The engine refuses to generate from the first byte until every rank is done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridengine.kernels import strided_copy
from hybridengine.reshard.geometry import contiguous_strides, reach
from hybridengine.reshard.layout import LayoutError, TensorSpec
from hybridengine.reshard.lora import Adapter, Merger, Slab
from hybridengine.reshard.plan import Bucket, Piece, ReshardPlan, build_plan
from hybridengine.reshard.shards import ShardSpec
from hybridengine.reshard.verify import find_mismatches

if TYPE_CHECKING:
    from hybridengine.rollout.engine import RolloutEngine

__all__ = ["ReshardError", "Resharder", "SyncReport"]

_AXES = 4  # axes of one row of the strided_copy table


class ReshardError(RuntimeError):
    """A sync that arrived damaged."""


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved on this rank. Bytes are counted at the collective."""

    version: int
    bytes_received: int
    bytes_sent: int
    milliseconds: float


@dataclass
class _Exchange:
    """One bucket as this rank runs it."""

    source_dtype: torch.dtype
    engine_dtype: torch.dtype
    pack: torch.Tensor  # tables of strided_copy rows, int64 [P, 16]
    local: torch.Tensor
    unpack: torch.Tensor
    send_counts: list[int]  # elements per peer
    receive_counts: list[int]
    frozen: bool
    slabs: list[Slab]  # the sources, where they are merged; else the shards are
    factor_bytes: int  # received to merge them


class Resharder:
    """Moves trained FSDP2 parameters into a rollout engine's weights, in place.

    parameters: checkpoint name → DTensor (FSDP2) or replicated tensor, on every rank.
    engine: the rollout engine on this rank.
    bucket_bytes: staging memory (send + receive) of one all-to-all; two are alive at a time.
    adapters: parameter name → its adapter, merged as the parameter is packed. The model then is
    frozen but for its adapters: a parameter without one travels again only if it was written to.

    The plan is made once, agreed by digest across ranks, and reused by every `sync()`.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        engine: RolloutEngine,
        bucket_bytes: int = 64 << 20,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.engine = engine
        self.parameters = dict(parameters)
        adapters = adapters or {}
        specs = {
            name: ShardSpec.of(name, tensor, self.world_size, adapters)
            for name, tensor in self.parameters.items()
        }
        layouts = self._gather_layouts()
        self.plan: ReshardPlan = build_plan(specs, layouts, bucket_bytes)
        self._agree_on_digest()
        self._source_index = {name: i for i, name in enumerate(self.parameters)}
        self._destination_index = {name: i for i, name in enumerate(engine.layout.destinations)}
        self._weights = self._live_weights()
        self._merger = Merger(self.parameters, specs, adapters, self.rank)
        self._exchanges = [self._compile(bucket) for bucket in self.plan.buckets]
        self._write_constants()
        self._frozen_state: list[int] | None = None  # as it was when the engine got it

    def _gather_layouts(self) -> list:
        gathered: list = [None] * self.world_size
        dist.all_gather_object(gathered, (self.engine.tp_rank, self.engine.layout))
        by_tp_rank: dict = {}
        return [by_tp_rank.setdefault(tp_rank, layout) for tp_rank, layout in gathered]

    def _agree_on_digest(self) -> None:
        digests: list = [None] * self.world_size
        dist.all_gather_object(digests, self.plan.digest)
        odd = [rank for rank, d in enumerate(digests) if d != digests[0]]
        if odd:
            raise LayoutError(
                f"ranks {odd} made another reshard plan than rank 0: their model, engine or "
                "bucket size differs. Start every rank with the same configuration."
            )

    def _live_weights(self) -> dict[str, torch.Tensor]:
        weights = self.engine.weights()
        for name, spec in self.engine.layout.destinations.items():
            live = weights.get(name)
            if live is None or TensorSpec.of(live) != spec:
                found = "nothing" if live is None else str(TensorSpec.of(live))
                raise LayoutError(
                    f"rank {self.rank}: engine tensor {name!r} was recorded as {spec} but is "
                    f"{found}; the engine changed it after loading: it cannot be written in place"
                )
        return weights

    def _write_constants(self) -> None:
        for name, offset, sizes, strides, value in self.engine.layout.constants:
            with torch.no_grad():
                weight = self._weights[name]
                weight.as_strided(sizes, strides, weight.storage_offset() + offset).fill_(value)

    def _shard(self, name: str) -> torch.Tensor:
        tensor = self.parameters[name]
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _compile(self, bucket: Bucket) -> _Exchange:
        """Turn the pieces that touch this rank into copy tables and split sizes."""
        slabs = self._merger.slabs(bucket)
        send_counts, receive_counts = [0] * self.world_size, [0] * self.world_size
        sends: list[list[Piece]] = [[] for _ in range(self.world_size)]
        receives: list[list[Piece]] = [[] for _ in range(self.world_size)]
        local: list[list[int]] = []
        for piece in self.plan.arrivals(bucket, self.rank):
            if piece.sender == self.rank:
                local += _rows(*self._from_shard(piece, slabs), *self._to_engine(piece), piece)
                continue
            receives[piece.sender].append(piece)
            receive_counts[piece.sender] += piece.block.numel
        for piece in self.plan.departures(bucket, self.rank):
            sends[piece.receiver].append(piece)
            send_counts[piece.receiver] += piece.block.numel
        pack: list[list[int]] = []
        unpack: list[list[int]] = []
        at = 0
        for piece in (p for peer in sends for p in peer):
            dense = (0, at, list(contiguous_strides(piece.block.sizes)))
            pack += _rows(*self._from_shard(piece, slabs), *dense, piece)
            at += piece.block.numel
        at = 0
        for piece in (p for peer in receives for p in peer):
            dense = (0, at, list(contiguous_strides(piece.block.sizes)))
            unpack += _rows(*dense, *self._to_engine(piece), piece)
            at += piece.block.numel
        return _Exchange(
            bucket.source_dtype,
            bucket.engine_dtype,
            *(
                torch.tensor(t, dtype=torch.int64).reshape(-1, 4 + 3 * _AXES)
                for t in (pack, local, unpack)
            ),
            send_counts,
            receive_counts,
            bucket.frozen,
            slabs,
            self._merger.bytes_gathered(slabs),
        )

    def _from_shard(self, piece: Piece, slabs: Sequence[Slab]) -> tuple[int, int, list[int]]:
        """(index of the source, offset, strides): sources are `slabs`, else the shards."""
        if slabs:
            return self._merger.locate(piece, slabs)
        origin = self.plan.sources[piece.source].origin(piece.shard)
        stride = tuple(self._shard(piece.source).stride())
        return self._source_index[piece.source], *piece.block.address(stride, origin)

    def _to_engine(self, piece: Piece) -> tuple[int, int, list[int]]:
        index = self._destination_index[piece.destination]
        return index, piece.block.offset, list(piece.block.strides)

    def sync(self, version: int, *, verify: bool = False) -> SyncReport:
        """Write the current parameters into the engine and set its weight version.

        Collective: every rank calls it. On return every rank's engine generates from `version`.
        verify: afterwards compare checksums of every slice, shards against engine weights.

        Raises ReshardError on every rank when a checksum differs. After any error the engine
        refuses to generate until the next whole sync.
        """
        started = time.perf_counter()
        with self.engine.weight_update(version), torch.no_grad():
            frozen_state, everything = self._merger.frozen_state(), self._all_moves()
            self._frozen_state = None
            received, sent = self._move(everything)
            self._gather_fallback(everything)
            if verify:
                self._verify()
            dist.barrier()  # the version moves only when all ranks are in
            self._frozen_state = frozen_state
        elapsed = (time.perf_counter() - started) * 1e3
        return SyncReport(version, received, sent, elapsed)

    def _all_moves(self) -> bool:
        """Whether frozen parameters move too: some rank wrote to one, or its engine has none."""
        if not self._merger.adapters:
            return True
        moves = self.engine.weight_version is None
        moves |= self._merger.frozen_state() != self._frozen_state
        flag = torch.tensor(int(moves), device=self._shard(next(iter(self.parameters))).device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _verify(self) -> None:
        adapters = {name: a.gathered() for name, a in self._merger.adapters.items()}

        def of_shard(piece: Piece) -> torch.Tensor:
            slabs, source = [], self._shard(piece.source).detach()
            if piece.source in adapters:
                spec = self.plan.sources[piece.source]
                span = reach(piece.block, spec.dim)
                slabs = [Slab(piece.source, spec.interval(piece.shard)[0], *span)]
                source = self._merger.form(slabs, adapters)[0]
            _, offset, strides = self._from_shard(piece, slabs)
            return source.as_strided(piece.block.sizes, strides, source.storage_offset() + offset)

        def of_engine(piece: Piece) -> torch.Tensor:
            weight, block = self._weights[piece.destination], piece.block
            offset = weight.storage_offset() + block.offset
            return weight.as_strided(block.sizes, block.strides, offset)

        wrong = find_mismatches(self.plan, self.rank, of_shard, of_engine)
        if wrong:
            rank, destination, source = wrong[0]
            raise ReshardError(
                f"the checksum of engine tensor {destination!r} on rank {rank} differs from its "
                f"source {source!r} ({len(wrong)} slices differ in all): bytes were damaged on the "
                "way, or something else wrote to the engine. Sync again."
            )

    def _move(self, everything: bool) -> tuple[int, int]:
        shards = [self._shard(name).detach() for name in self.parameters]
        device = shards[0].device
        received = sent = 0
        in_flight: tuple[_Exchange, torch.Tensor, torch.Tensor, dist.Work] | None = None
        for exchange in self._exchanges:
            if exchange.frozen and not everything:
                continue
            sources = self._merger.form(exchange.slabs) or shards
            outbox = torch.empty(
                sum(exchange.send_counts), dtype=exchange.engine_dtype, device=device
            )
            inbox = torch.empty(
                sum(exchange.receive_counts), dtype=exchange.engine_dtype, device=device
            )
            _copy(sources, [outbox], exchange.pack, exchange.source_dtype, exchange.engine_dtype)
            work = _all_to_all(inbox, outbox, exchange)
            received += inbox.numel() * inbox.element_size() + exchange.factor_bytes
            sent += outbox.numel() * outbox.element_size()
            self._copy_into_engine(sources, exchange.local, exchange, exchange.source_dtype)
            if in_flight is not None:
                self._arrive(*in_flight)
            in_flight = (exchange, inbox, outbox, work)
        if in_flight is not None:
            self._arrive(*in_flight)
        return received, sent

    def _arrive(
        self, exchange: _Exchange, inbox: torch.Tensor, outbox: torch.Tensor, work: dist.Work
    ) -> None:
        work.wait()  # the outbox is only here to live until now
        self._copy_into_engine([inbox], exchange.unpack, exchange, exchange.engine_dtype)

    def _copy_into_engine(
        self,
        sources: list[torch.Tensor],
        table: torch.Tensor,
        exchange: _Exchange,
        source_dtype: torch.dtype,
    ) -> None:
        weights = [self._weights[name] for name in self._destination_index]
        _copy(sources, weights, table, source_dtype, exchange.engine_dtype)

    def _gather_fallback(self, everything: bool) -> None:
        """Gather the few parameters that are no pure copy, one at a time, for the engine's loader.

        They keep their dtype: what the loader computes, it computes from the masters.
        """
        if self.plan.fallback and (everything or self._merger.adapters.keys() & self.plan.fallback):
            self.engine.load_whole((name, self._whole(name)) for name in self.plan.fallback)

    def _whole(self, name: str) -> torch.Tensor:
        """A copy: some loaders zero in place what belongs to another rank."""
        tensor = self.parameters[name].detach()
        if name in self._merger.adapters:
            return self._merger.adapters[name].merge_whole(tensor)
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _copy(
    sources: list[torch.Tensor],
    destinations: list[torch.Tensor],
    table: torch.Tensor,
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
) -> None:
    """strided_copy over those tensors of the lists that have the table's dtypes."""
    if table.numel():
        empty_in = torch.empty(0, dtype=source_dtype, device=sources[0].device)
        empty_out = torch.empty(0, dtype=destination_dtype, device=sources[0].device)
        strided_copy(
            [s if s.dtype == source_dtype else empty_in for s in sources],
            [d if d.dtype == destination_dtype else empty_out for d in destinations],
            table,
        )


def _all_to_all(inbox: torch.Tensor, outbox: torch.Tensor, exchange: _Exchange) -> dist.Work:
    size = exchange.engine_dtype.itemsize
    return dist.all_to_all_single(
        inbox.view(torch.uint8),
        outbox.view(torch.uint8),
        [n * size for n in exchange.receive_counts],
        [n * size for n in exchange.send_counts],
        async_op=True,
    )


def _rows(
    source: int,
    source_offset: int,
    source_strides: list[int],
    destination: int,
    destination_offset: int,
    destination_strides: list[int],
    piece: Piece,
) -> list[list[int]]:
    """Table rows of one piece: adjacent axes merged, more than four axes unrolled outermost."""
    axes: list[tuple[int, int, int]] = []
    for axis in zip(piece.block.sizes, source_strides, destination_strides, strict=True):
        size, s, d = axis
        if axes and axes[-1][1] == s * size and axes[-1][2] == d * size:
            axes[-1] = (axes[-1][0] * size, s, d)
        else:
            axes.append(axis)
    rows = [(source_offset, destination_offset)]
    while len(axes) > _AXES:
        size, s, d = axes.pop(0)
        rows = [(a + i * s, b + i * d) for a, b in rows for i in range(size)]
    axes = [(1, 0, 0)] * (_AXES - len(axes)) + axes
    sizes, ss, ds = (list(column) for column in zip(*axes, strict=True))
    return [[source, destination, a, b, *sizes, *ss, *ds] for a, b in rows]
