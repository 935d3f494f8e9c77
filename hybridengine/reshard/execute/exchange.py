"""The buckets as one rank executes them: tables of strided copies, and an all-to-all of each.

The other transport, where ranks read each other's memory, is `pull`.

Table rows are computed once per source class. Every other source of the class reuses them with its
own tensor indices and offsets in the buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.kernels.block_quantize import BlockTable
from hybridengine.kernels.strided_copy import CopyTable
from hybridengine.reshard.execute.block_scales import (
    BLOCK_COLUMN,
    BlockScales,
    QuantizingTable,
    measuring,
)
from hybridengine.reshard.execute.context import RankContext
from hybridengine.reshard.execute.pipelining import run_pipelined
from hybridengine.reshard.execute.rows import (
    SliceRows,
    joined,
    offsets_by_rank,
    rows_of,
    slice_rows,
)
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.plan.source_class import Chunk, SliceCopy
from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.geometry import Block, contiguous_strides
from hybridengine.sharding.shards import Box, RowRange

_ALIGNMENT = 16  # bytes
_READING = ("pack", "local")  # the ways that read shards


@dataclass(frozen=True)
class Exchange:
    """The copies of one bucket on one rank.

    pack: sources → send buffer. local: sources → engine tensors. unpack: receive buffer → engine
    tensors. sources: (parameter, box of it) that pack and local read. destinations: engine tensors
    that local and unpack write. send_counts, receive_counts: elements per rank. measured: what
    pack and local read, if they quantize it.
    """

    bucket: Bucket
    sources: list[tuple[str, Box]]
    destinations: list[str]
    pack: CopyTable | QuantizingTable
    local: CopyTable | QuantizingTable
    unpack: CopyTable
    send_counts: list[int]
    receive_counts: list[int]
    measured: BlockTable | None = None

    def buffer_ranges(self, limit: int) -> tuple[int, int, int]:
        """Return the end of the send buffer, the start and the end of the receive buffer, in bytes.

        Both lie in one staging buffer. The receive buffer is aligned for vector accesses unless the
        staging buffer would become larger than `limit`.
        """
        size = self.bucket.engine_dtype.itemsize
        sent, received = sum(self.send_counts) * size, sum(self.receive_counts) * size
        start = -(-sent // _ALIGNMENT) * _ALIGNMENT
        if start + received > limit:
            start = sent
        return sent, start, start + received


class ExchangeRows(NamedTuple):
    """The tables of an `Exchange` as arrays, int64 [R, 16]; the rest as there.

    Those that quantize have one column more, `BLOCK_COLUMN`: the number of the block.
    """

    sources: list[tuple[str, Box]]
    destinations: list[str]
    pack: np.ndarray
    local: np.ndarray
    unpack: np.ndarray
    send_counts: list[int]
    receive_counts: list[int]


class ExchangeBuilder:
    """Builds the exchanges of one rank.

    strides: parameter → strides of this rank's shard, in elements. device: of shards and engine.
    scales: of quantized engine tensors.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.plan, self.rank, self._strides, self.device = plan, rank, strides, device
        self.scales = BlockScales(plan, device)
        self._known: dict[tuple, dict[str, SliceRows]] = {}

    def build(self, bucket: Bucket) -> Exchange:
        rows, device = self.rows(bucket), self.device
        made: dict = {"unpack": CopyTable(torch.from_numpy(rows.unpack), device)}
        if bucket.quantized:
            made |= {w: self.scales.quantizing(getattr(rows, w), device) for w in _READING}
            made["measured"] = measuring([rows.pack, rows.local], device)
        else:
            made |= {w: CopyTable(torch.from_numpy(getattr(rows, w)), device) for w in _READING}
        return Exchange(bucket, **rows._asdict() | made)

    def rows(self, bucket: Bucket) -> ExchangeRows:
        sources: list[tuple[str, Box]] = []
        source_index: dict[tuple, int] = {}  # chunks read one shard, but each its own merged rows
        destination_index: dict[str, int] = {}
        parts: dict[str, list[SliceRows]] = {"pack": [], "local": [], "unpack": []}
        for name, chunk in bucket.chunks:
            key = (name, chunk if bucket.merged else None)
            if key not in source_index:
                source_index[key] = len(sources)
                sources.append((name, self._box_read(bucket, name, chunk)))
            names = self.plan.destinations(name, bucket.engine_dtype, self.rank)
            indices = [destination_index.setdefault(n, len(destination_index)) for n in names]
            to = np.array(indices, np.int64)
            for way, rows in self._table_rows(bucket, name, chunk).items():
                table = rows.table.copy()
                if bucket.quantized and way in _READING:
                    layouts = np.array(self.plan.layout_of)[rows.ranks[rows.slice_of]]
                    table[:, BLOCK_COLUMN] += self.scales.first_blocks(name)[layouts, table[:, 1]]
                table[:, 0] = 0 if way == "unpack" else source_index[key]
                table[:, 1] = 0 if way == "pack" else to[table[:, 1]]
                parts[way].append(rows._replace(table=table))
        pack, local, unpack = (joined(parts[way]) for way in ("pack", "local", "unpack"))
        counts = [rows.elements_by_rank(self.plan.world_size) for rows in (pack, unpack)]
        packing, unpacking = self._place(bucket, pack, unpack)
        return ExchangeRows(
            sources, list(destination_index), packing, local.table, unpacking, *counts
        )

    def _place(
        self, bucket: Bucket, pack: SliceRows, unpack: SliceRows
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tables of pack and unpack, with each slice in its place in the buffers.

        The slices are in the order of `ReshardPlan.departures` and `arrivals`.
        """
        pack.table[:, 3] += offsets_by_rank(pack)[pack.slice_of]
        unpack.table[:, 2] += offsets_by_rank(unpack)[unpack.slice_of]
        return pack.table, unpack.table

    def _box_read(self, bucket: Bucket, name: str, chunk: Chunk) -> Box:
        """Return the box of this rank's full shard, or what of it is merged for the chunk."""
        source_class = self.plan.source_classes[name, bucket.engine_dtype]
        shard = int(source_class.senders.shard_of[self.rank])
        if shard < 0:
            return (RowRange(0, 0),) * len(source_class.spec.shape)
        return source_class.spec.box(shard, *(chunk.row_part if bucket.merged else ()))

    def _table_rows(self, bucket: Bucket, name: str, chunk: Chunk) -> dict[str, SliceRows]:
        """Return the rows of pack, local and unpack, the same for all sources of a class."""
        source_class = self.plan.source_classes[name, bucket.engine_dtype]
        box, strides = self._box_read(bucket, name, chunk), self._strides[name]
        origin = tuple(low for low, _ in box)
        if bucket.merged:
            strides = contiguous_strides(tuple(high - low for low, high in box))
        key: tuple = (source_class, chunk, strides, origin)
        if bucket.quantized:
            key += self.scales.shapes(name)
        if key not in self._known:
            incoming = source_class.incoming(chunk, self.rank)
            slices = {
                "pack": source_class.outgoing(chunk, self.rank),
                "local": [s for s in incoming if s.sender == self.rank],
                "unpack": [s for s in incoming if s.sender != self.rank],
            }
            self._known[key] = {
                way: self._quantized_rows(name, chosen, way, strides, origin)
                if bucket.quantized and way in _READING
                else rows_of(chosen, way, strides, origin)
                for way, chosen in slices.items()
            }
        return self._known[key]

    def _quantized_rows(
        self, name: str, slices: Sequence[SliceCopy], way: str, *read: tuple[int, ...]
    ) -> SliceRows:
        return slice_rows(*self.scales.table(name, slices, way, *read), slices, way)


class BucketPipeline(ABC):
    """Executes the exchanges of one rank.

    transport: its name. exchanges: one per bucket, built once.
    """

    transport: ClassVar[str]
    _builder_type: ClassVar[type[ExchangeBuilder]]

    def __init__(self, context: RankContext) -> None:
        self._plan, self._rank, self._trained, self._device, *_ = context
        self._guard, self._progress = context.guard, context.progress
        strides = {name: p.local_stride for name, p in self._trained.placements.items()}
        self._builder = self._builder_type(self._plan, self._rank, strides, self._device)
        self.exchanges = [self._builder.build(bucket) for bucket in self._plan.buckets]

    @property
    def scales(self) -> BlockScales:
        return self._builder.scales

    @abstractmethod
    def run(
        self, weights: Mapping[str, torch.Tensor], moves: Callable[[Bucket], bool]
    ) -> tuple[int, int]:
        """Move trained parameters into `weights`. Return (bytes received, bytes sent).

        weights: the engine's tensors. moves: which buckets.
        """

    def bytes_of(self, moves: Callable[[Bucket], bool]) -> tuple[int, int]:
        """Return the bytes that `run` would receive and send, without those of adapters."""
        moving = [e for e in self.exchanges if moves(e.bucket)]
        sizes = [e.bucket.engine_dtype.itemsize for e in moving]
        received, sent = (
            sum(size * sum(counts) for size, counts in zip(sizes, column, strict=True))
            for column in ([e.receive_counts for e in moving], [e.send_counts for e in moving])
        )
        return received, sent

    def update_scales(
        self, weights: Mapping[str, torch.Tensor], moves: Callable[[Bucket], bool]
    ) -> tuple[int, int]:
        """Compute the scales of quantized tensors before `run`; write those of the engine.

        The arguments are those of `run`; either all buckets that are quantized move, or none.
        Return (bytes received, bytes sent).
        """
        scales, exchanges = self.scales, self._exchanges(moves)
        moving = [e for _, e in exchanges if e.bucket.quantized]
        if not moving:
            return 0, 0
        self._guard.phase = "finding the scales of quantized weights"
        scales.begin()
        for exchange in moving:
            assert exchange.measured is not None
            sources = [self._source(name, box) for name, box in exchange.sources]
            scales.measure(exchange.measured, sources)
        with self._guard.collective("combining the scales of quantized weights"):
            scales.combine()
        self._bytes_received += scales.bytes_reduced
        self._bytes_sent += scales.bytes_reduced
        self._deliver_scales(weights)
        return self._bytes_received, self._bytes_sent

    def _deliver_scales(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.scales.write(self._rank, weights)

    def expected(
        self,
        adapters: Mapping[str, Adapter],
        name: str,
        slice_copy: SliceCopy,
        destination: str,
        block: Block,
    ) -> torch.Tensor:
        """Return what a block of a slice must be in the receiver's engine, in plain PyTorch.

        adapters: the full adapters of merged parameters.
        """
        spec, adapter = self._plan.sources[name], adapters.get(name)
        values = self._trained.slice(name, spec, slice_copy.shard, block, adapter)
        return self.scales.expected(values, slice_copy.receiver, destination, block)

    def _exchanges(self, moves: Callable[[Bucket], bool]) -> list[tuple[str, Exchange]]:
        """Return (name for error messages, exchange) of the buckets of a sync; reset the bytes."""
        self._bytes_received = self._bytes_sent = 0
        moving = [e for e in self.exchanges if moves(e.bucket)]
        return [(f"bucket {i} of {len(moving)}", e) for i, e in enumerate(moving, 1)]

    def _source(self, name: str, box: Box) -> torch.Tensor:
        """Return the tensor to pack from: this rank's shard, or a box of it, merged."""
        trained, spec = self._trained, self._plan.sources[name]
        if name not in trained.merged:
            return trained.shards[name]
        with self._guard.collective(f"gathering the adapter of {name!r}"):
            self._bytes_received += trained.bytes_gathered(name)
            return trained.merge(name, spec, self._rank, box)


class AllToAllPipeline(BucketPipeline):
    """pack → all-to-all → unpack.

    While bucket k travels, its local slices are copied, bucket k-1 is unpacked and bucket k+1
    packed.
    """

    transport = "all-to-all"
    _builder_type = ExchangeBuilder

    def run(
        self, weights: Mapping[str, torch.Tensor], moves: Callable[[Bucket], bool]
    ) -> tuple[int, int]:
        ends = (e.buffer_ranges(self._plan.staging_bytes)[2] for e in self.exchanges)
        self._max_buffer_bytes = max(ends, default=0)
        self._free_buffers: list[torch.Tensor] = []
        run_pipelined(
            self._transfer(exchange, where, weights) for where, exchange in self._exchanges(moves)
        )
        while self._free_buffers:  # gloo's threads may keep references: free the memory itself
            self._free_buffers.pop().untyped_storage().resize_(0)
        return self._bytes_received, self._bytes_sent

    def _transfer(
        self, exchange: Exchange, where: str, weights: Mapping[str, torch.Tensor]
    ) -> Iterator[None]:
        """Start the exchange of a bucket, yield, then wait for it and unpack.

        where: which bucket it is, for error messages.
        """
        self._guard.phase = f"packing {where}"
        sources = [self._source(name, box) for name, box in exchange.sources]
        buffer, outgoing, received = self._stage(exchange)
        exchange.pack.copy(sources, [outgoing])
        with self._guard.collective(f"exchanging {where}"):
            work = _all_to_all(received, outgoing, exchange)
        self._bytes_received += received.nbytes
        self._bytes_sent += outgoing.nbytes
        self._guard.phase = f"copying the local part of {where}"
        destinations = [weights[name] for name in exchange.destinations]
        exchange.local.copy(sources, destinations)
        del sources, outgoing
        yield
        with self._guard.collective(f"exchanging {where}"):
            work.wait()
        self._progress.mark(f"exchanging {where}")
        self._guard.phase = f"unpacking {where}"
        exchange.unpack.copy([received], destinations)
        if self._trained.merged:
            buffer.untyped_storage().resize_(0)
        else:
            self._free_buffers.append(buffer)

    def _stage(self, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a staging buffer and the parts of it to send from and to receive into.

        Two buffers serve all buckets, because allocating new memory is slow. With merged adapters
        each bucket gets a buffer of its own size: merged rows take the rest of its budget.
        """
        out_end, in_start, in_end = exchange.buffer_ranges(self._plan.staging_bytes)
        if self._free_buffers:
            buffer = self._free_buffers.pop()
        else:
            size = in_end if self._trained.merged else self._max_buffer_bytes
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dtype = exchange.bucket.engine_dtype
        return buffer, buffer[:out_end].view(dtype), buffer[in_start:in_end].view(dtype)


def _all_to_all(received: torch.Tensor, outgoing: torch.Tensor, exchange: Exchange) -> dist.Work:
    size = exchange.bucket.engine_dtype.itemsize
    return dist.all_to_all_single(
        received.view(torch.uint8),
        outgoing.view(torch.uint8),
        [n * size for n in exchange.receive_counts],
        [n * size for n in exchange.send_counts],
        async_op=True,
    )
