"""The buckets as one rank executes them: tables of strided copies.

Table rows are computed once per source class. Every other source of the class reuses them with its
own tensor indices and offsets in the buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from hybridengine.kernels.block_quantize import QUANTIZED_DTYPE, BlockTable
from hybridengine.kernels.strided_copy import TABLE_COLUMNS, CopyTable
from hybridengine.run import load_plugin
from hybridengine.sync.blocks import Block, contiguous_strides
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import Box
from hybridengine.sync.source_class import Chunk, SliceCopy, SourceClass

_MAX_AXES = 4  # axes of one row of the strided_copy table
Shape = tuple[int, ...]
Weights = Mapping[str, torch.Tensor]
Read = Callable[["Exchange"], list[torch.Tensor]]
"""Returns the tensors that an exchange reads from."""

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

    def table(self, rows: np.ndarray, device: torch.device) -> Any:
        """Return the table that encodes as it copies."""
        return CopyTable(torch.from_numpy(rows), device)

    def measuring(self, rows: np.ndarray, device: torch.device) -> BlockTable | None:
        """Return the table that measures what `rows` encode; None where nothing is measured."""
        return None

    def prepare(
        self, transport: Any, weights: Weights, moving: Sequence[Exchange], read: Read | None
    ) -> None:
        """Find what to encode with, before these exchanges are packed. Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        read: None on a rank that only holds an engine.
        """

    def expected(
        self, values: torch.Tensor, receiver: int, destination: str, block: Block
    ) -> torch.Tensor:
        """Return `values` as the receiver's engine tensor must hold them, in plain PyTorch.

        block: the part of the engine tensor to which `values` are written.
        """
        return values


def encoding_of(plan: ReshardPlan, rank: int, device: torch.device) -> Plain:
    """Return how the values of a plan are encoded: a plugin's way where tensors are quantized."""
    if not any(layout.quantized for layout in plan.layouts):
        return Plain()
    encoding: Plain = load_plugin("encodings", "fp8", "rollout.quantization")(plan, rank, device)
    return encoding


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


ALIGNMENT = 16  # bytes, for vector accesses

T = TypeVar("T")


class Exchange(NamedTuple, Generic[T]):
    """The copies of one bucket on one rank, in tables of type T.

    pack: sources → send buffer, which is destination 0. `build` adds the rows of `local`, whose
      engine tensors follow: elements that are sent and kept are read once.
    local: sources → engine tensors, the elements that this rank keeps; empty in what `build` makes.
    unpack: receive buffers → engine tensors.
    sources: (parameter, box of it) that pack reads.
    destinations: engine tensors that pack and unpack write.
    send_counts, receive_counts: elements per rank.
    measured: the elements that pack reads, if they are quantized.
    """

    bucket: Bucket
    sources: list[tuple[str, Box]]
    destinations: list[str]
    pack: T
    local: np.ndarray
    unpack: T
    send_counts: list[int]
    receive_counts: list[int]
    measured: BlockTable | None = None

    @property
    def bytes_sent(self) -> list[int]:
        """Bytes to each rank."""
        return [count * self.bucket.engine_dtype.itemsize for count in self.send_counts]

    @property
    def bytes_received(self) -> list[int]:
        """Bytes from each rank."""
        return [count * self.bucket.engine_dtype.itemsize for count in self.receive_counts]


class ExchangeBuilder:
    """Builds the exchanges of one rank.

    strides: parameter → strides of this rank's shard, in elements; {} on a rank without shards.
    device: the device of the shards and of the engine.
    quantized: the encoding of quantized engine tensors.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        strides: Mapping[str, tuple[int, ...]],
        device: torch.device,
        quantized: Plain | None = None,
    ) -> None:
        self.plan, self.rank, self._strides, self.device = plan, rank, strides, device
        self._plain = Plain()
        self._quantized = quantized or self._plain
        self._known: dict[tuple, dict[str, SliceRows]] = {}

    def build(self, bucket: Bucket) -> Exchange[CopyTable]:
        """Return the exchange that moves all elements of a bucket."""
        rows: Exchange[Any] = self.rows(bucket)
        device, encoding = self.device, self._encoding(bucket)
        pack = np.concatenate([rows.pack, rows.local])
        pack[len(rows.pack) :, 1] += 1
        pack = pack[np.lexsort((pack[:, 2], pack[:, 0]))]  # equal reads are adjacent
        return rows._replace(
            pack=encoding.table(pack, device),
            local=rows.local[:0].copy(),
            unpack=self._plain.table(rows.unpack, device),
            measured=encoding.measuring(pack, device),
        )

    def _encoding(self, bucket: Bucket) -> Plain:
        return self._quantized if bucket.quantized else self._plain

    def rows(self, bucket: Bucket) -> Exchange[np.ndarray]:
        """Return the tables as arrays, int64 [R, 16].

        Those that an encoding other than `Plain` makes have more columns.
        """
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
                if way != "unpack":
                    self._encoding(bucket).number(table, rows, name)
                table[:, 0] = 0 if way == "unpack" else source_index[key]
                table[:, 1] = 0 if way == "pack" else to[table[:, 1]]
                parts[way].append(rows._replace(table=table))
        pack, local, unpack = (joined(parts[way]) for way in ("pack", "local", "unpack"))
        sent, received = (x.elements_by_rank(self.plan.world_size) for x in (pack, unpack))
        packed_at, arrives_at, is_first = self._place(bucket, pack, unpack)
        pack.table[:, 3] += packed_at[pack.slice_of]
        unpack.table[:, 0] = unpack.ranks[unpack.slice_of]
        unpack.table[:, 2] += arrives_at[unpack.slice_of]
        tables = pack.table[is_first[pack.slice_of]], local.table, unpack.table
        return Exchange(bucket, sources, list(destination_index), *tables, sent, received)

    def _place(
        self, bucket: Bucket, pack: SliceRows, unpack: SliceRows
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where each slice is packed, where each arrives, and which of them are packed.

        Pack writes one buffer, in the order of the receivers; unpack reads one of each sender. The
        slices are in the order of `ReshardPlan.departures` and `arrivals`.
        """
        sent = pack.elements_by_rank(self.plan.world_size)
        starts = np.cumsum([0, *sent[:-1]])[pack.ranks]
        everything = np.ones(len(pack.ranks), bool)
        return starts + offsets_by_rank(pack), offsets_by_rank(unpack), everything

    def _box_read(self, bucket: Bucket, name: str, chunk: Chunk) -> Box:
        """Return the box of this rank's full shard, or the part of it merged for the chunk."""
        source_class = self.plan.source_classes[name, bucket.engine_dtype]
        shard = int(source_class.senders.shard_of[self.rank])
        part = chunk.row_part if bucket.merged else (0, 1)
        return source_class.spec.box(None if shard < 0 else shard, *part)

    def _table_rows(self, bucket: Bucket, name: str, chunk: Chunk) -> dict[str, SliceRows]:
        """Return the rows of pack, local and unpack, the same for all sources of a class."""
        source_class = self.plan.source_classes[name, bucket.engine_dtype]
        box, strides = self._box_read(bucket, name, chunk), self._strides.get(name, ())
        origin = tuple(low for low, _ in box)
        if bucket.merged:
            strides = contiguous_strides(tuple(high - low for low, high in box))
        encoding = self._encoding(bucket)
        key = (source_class, chunk, strides, origin, *encoding.shapes(name))
        if key not in self._known:
            incoming = source_class.incoming(chunk, self.rank)
            outgoing = source_class.outgoing(chunk, self.rank)
            kept = [s for s in incoming if s.sender == self.rank]
            arriving = [s for s in incoming if s.sender != self.rank]
            self._known[key] = {
                "pack": encoding.rows(name, outgoing, "pack", strides, origin),
                "local": encoding.rows(name, kept, "local", strides, origin),
                "unpack": self._plain.rows(name, arriving, "unpack", strides, origin),
            }
        return self._known[key]


class SendBuffer(NamedTuple):
    """Where one rank packs the S slices that it sends in a bucket, in the order of `departures`.

    Slices with the same elements of a parameter, for several receivers, share their place.
    """

    receivers: np.ndarray  # int64 [S]
    offsets: np.ndarray  # int64 [S], in elements
    is_first: np.ndarray  # bool [S]: of the slices that share a place, packed
    size: int  # elements


def _place(
    source_class: SourceClass, chunks: Sequence[Chunk], sender: int, dtype: torch.dtype
) -> SendBuffer:
    """Return the send buffer with the chunks of one source alone."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    layout_of = source_class.senders.topology.layout_of
    known: dict[tuple, int] = {}
    end = 0
    slices = [s for chunk in chunks for s in source_class.outgoing(chunk, sender)]
    offsets, is_first = np.zeros(len(slices), np.int64), np.zeros(len(slices), bool)
    for i, slice_copy in enumerate(slices):
        read = slice_copy.read
        # elements and order, no destination
        key: tuple = (read.start, *(axis[:3] for axis in read.axes))
        if dtype == QUANTIZED_DTYPE:  # each layout has its own scales
            key += (int(layout_of[slice_copy.receiver]),)
        if key not in known:
            known[key], is_first[i] = end, True
            end += -(-read.numel // step) * step
        offsets[i] = known[key]
    return SendBuffer(np.array([s.receiver for s in slices], np.int64), offsets, is_first, end)


class PullBuilder(ExchangeBuilder):
    """Builds exchanges whose unpack reads the send buffers of all ranks, in rank order.

    buffer_bytes: the size of the largest send buffer of any rank in the buckets built so far.
    """

    buffer_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """How much memory of every rank a pull needs for the buckets that were built."""
        return 2 * max(ALIGNMENT, self.buffer_bytes)

    @cached_property
    def _known_buffers(self) -> dict[tuple, SendBuffer]:
        """Send buffers by the chunks of one source."""
        return {}

    def _send_buffer(self, bucket: Bucket, sender: int) -> SendBuffer:
        """Return the send buffer of any rank; every rank computes the same from the plan."""
        end, parts = 0, []
        for name, pairs in itertools.groupby(bucket.chunks, key=lambda pair: pair[0]):
            source_class = self.plan.source_classes[name, bucket.engine_dtype]
            chunks = tuple(chunk for _, chunk in pairs)
            key = (source_class, chunks, sender, bucket.engine_dtype)
            if key not in self._known_buffers:
                self._known_buffers[key] = _place(*key)
            part = self._known_buffers[key]
            parts.append(part._replace(offsets=part.offsets + end))
            end += part.size
        receivers, offsets, is_first = (np.concatenate([p[i] for p in parts]) for i in range(3))
        return SendBuffer(receivers, offsets, is_first, end)

    def _place(
        self, bucket: Bucket, pack: SliceRows, unpack: SliceRows
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        buffers = [self._send_buffer(bucket, r) for r in range(self.plan.world_size)]
        largest = max(buffer.size for buffer in buffers) * bucket.engine_dtype.itemsize
        self.buffer_bytes = max(self.buffer_bytes, largest)
        own = buffers[self.rank]
        offsets = np.zeros_like(unpack.numel)
        for sender, buffer in enumerate(buffers):
            offsets[unpack.ranks == sender] = buffer.offsets[buffer.receivers == self.rank]
        return own.offsets, offsets, own.is_first
