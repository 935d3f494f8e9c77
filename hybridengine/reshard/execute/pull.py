"""The pull transport: every rank packs into memory that the others read into their engines.

A rank packs a slice once however many ranks need it, and there is no receive buffer: each receiver
copies from the senders' memory to the engine's weights, in one launch per bucket. Needs memory that
every rank maps (`shared_memory`), so one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.kernels.block_quantize import QUANTIZED_DTYPE
from hybridengine.reshard.execute.context import RankContext
from hybridengine.reshard.execute.exchange import AllToAllPipeline, BucketPipeline, ExchangeBuilder
from hybridengine.reshard.execute.rows import SliceRows
from hybridengine.reshard.execute.shared_memory import SharedMemory, share_memory
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.plan.source_class import Chunk, SourceClass
from hybridengine.runtime.all_ranks import all_gather_values
from hybridengine.runtime.failures import machine_id

_ALIGNMENT = 16  # bytes; of every slice, for vector accesses


class SendBuffer(NamedTuple):
    """Where one rank packs the S slices that it sends in a bucket, in the order of `departures`.

    Slices with the same elements of a parameter, for several receivers, share their place.
    """

    receivers: np.ndarray  # int64 [S]
    offsets: np.ndarray  # int64 [S], in elements
    is_first: np.ndarray  # bool [S]: of the slices that share a place, packed
    size: int  # elements


class SendBuffers:
    """The send buffers of all ranks; every rank computes the same from the plan."""

    def __init__(self, plan: ReshardPlan) -> None:
        self._plan = plan
        self._known: dict[tuple, SendBuffer] = {}  # of the chunks of one source

    def of(self, bucket: Bucket, sender: int) -> SendBuffer:
        end, parts = 0, []
        for name, pairs in itertools.groupby(bucket.chunks, key=lambda pair: pair[0]):
            source_class = self._plan.source_classes[name, bucket.engine_dtype]
            chunks = tuple(chunk for _, chunk in pairs)
            key = (source_class, chunks, sender, bucket.engine_dtype)
            if key not in self._known:
                self._known[key] = _place(*key)
            part = self._known[key]
            parts.append(part._replace(offsets=part.offsets + end))
            end += part.size
        receivers, offsets, is_first = (np.concatenate([p[i] for p in parts]) for i in range(3))
        return SendBuffer(receivers, offsets, is_first, end)


def _place(
    source_class: SourceClass, chunks: Sequence[Chunk], sender: int, dtype: torch.dtype
) -> SendBuffer:
    """Return the send buffer with the chunks of one source alone."""
    step = max(1, _ALIGNMENT // dtype.itemsize)
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

    buffer_bytes: of the largest send buffer of any rank, in the buckets built so far.
    """

    buffer_bytes = 0

    @cached_property
    def _send_buffers(self) -> SendBuffers:
        return SendBuffers(self.plan)

    def _place(
        self, bucket: Bucket, pack: SliceRows, unpack: SliceRows
    ) -> tuple[np.ndarray, np.ndarray]:
        buffers = [self._send_buffers.of(bucket, r) for r in range(self.plan.world_size)]
        largest = max(buffer.size for buffer in buffers) * bucket.engine_dtype.itemsize
        self.buffer_bytes = max(self.buffer_bytes, largest)
        own = buffers[self.rank]
        pack.table[:, 3] += own.offsets[pack.slice_of]
        offsets = np.zeros_like(unpack.numel)
        for sender, buffer in enumerate(buffers):
            offsets[unpack.ranks == sender] = buffer.offsets[buffer.receivers == self.rank]
        unpack.table[:, 0] = unpack.ranks[unpack.slice_of]
        unpack.table[:, 2] += offsets[unpack.slice_of]
        return pack.table[own.is_first[pack.slice_of]], unpack.table


class PullPipeline(BucketPipeline):
    """pack → all ranks have packed → unpack from their buffers.

    memory: of `memory_bytes`. Its two halves serve the buckets in turn: a rank packs bucket k+2
    into the half of bucket k after all ranks have packed k+1, which each did after unpacking k.
    """

    transport = "pull"
    _builder_type = PullBuilder
    _builder: PullBuilder
    memory: SharedMemory

    @property
    def memory_bytes(self) -> int:
        """How much memory of every rank it needs."""
        return 2 * max(_ALIGNMENT, self._builder.buffer_bytes)

    def run(
        self, weights: Mapping[str, torch.Tensor], moves: Callable[[Bucket], bool]
    ) -> tuple[int, int]:
        halves = list(zip(*(buffer.chunk(2) for buffer in self.memory.buffers), strict=True))
        packed = torch.zeros(1, dtype=torch.int32, device=self._device)
        for i, (where, exchange) in enumerate(self._exchanges(moves)):
            self._guard.phase = f"packing {where}"
            dtype = exchange.bucket.engine_dtype
            buffers = [buffer.view(dtype) for buffer in halves[i % 2]]
            sources = [self._source(name, box) for name, box in exchange.sources]
            exchange.pack.copy(sources, [buffers[self._rank]])
            with self._guard.collective(f"exchanging {where}"):
                work = dist.all_reduce(packed, async_op=True)
            self._guard.phase = f"copying the local part of {where}"
            destinations = [weights[name] for name in exchange.destinations]
            exchange.local.copy(sources, destinations)
            del sources
            with self._guard.collective(f"exchanging {where}"):
                work.wait()
            self._progress.mark(f"exchanging {where}")
            self._guard.phase = f"unpacking {where}"
            exchange.unpack.copy(buffers, destinations)
            self._bytes_received += sum(exchange.receive_counts) * dtype.itemsize
            self._bytes_sent += sum(exchange.send_counts) * dtype.itemsize
        return self._bytes_received, self._bytes_sent


def make_pipeline(context: RankContext) -> BucketPipeline:
    """Return a pull if the ranks can map each other's memory, else an all-to-all. Collective."""
    plan = context.plan
    machines = all_gather_values(machine_id(), str)
    if len(set(machines)) == 1 and any(plan.bytes_sent):
        pipeline = PullPipeline(context)
        if memory := share_memory(pipeline.memory_bytes, context.device):
            pipeline.memory = memory
            return pipeline
    return AllToAllPipeline(context)
