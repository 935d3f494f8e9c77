"""The buckets between trainers and engines: pack and send; receive, gather among replicas, unpack.

For the plan each tensor-parallel rank of the engines is one rank that holds nothing, numbered after
the trainers, which need nothing. While bucket k travels, bucket k+1 is packed and bucket k-1 is
gathered and unpacked; two buffers are in use on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.kernels import bit_checksum
from hybridengine.reshard.disaggregated.link import ALIGNMENT, Link, LinkError, divide
from hybridengine.reshard.execute.exchange import BucketPipeline, Exchange, ExchangeBuilder
from hybridengine.reshard.execute.pipelining import run_pipelined
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.runtime.device import DeviceProgress
from hybridengine.sharding.shards import ShardSpec

_SCALES = "the scales of quantized weights"


class SendPipeline(BucketPipeline):
    """Packs the buckets of a trainer rank and sends them; the arguments are those of its base.

    Set `counts` once: elements that each trainer sends to each tensor-parallel rank in each bucket,
    int64 [trainers, buckets, tp_size].

    When a connection has failed, `run` and `send_full` still take part in the collectives among the
    trainers, so that these stay together, and `failure` is set.
    """

    transport = "link"
    _builder_type = ExchangeBuilder
    counts: np.ndarray
    failure: LinkError | None

    def begin(self, link: Link | None, progress: DeviceProgress, failure: LinkError | None) -> None:
        """Use `link` from now on, None if it could not be made because of `failure`."""
        self._link, self._progress, self.failure = link, progress, failure
        self._checksums: list[list[torch.Tensor]] = []  # of each message, by tensor-parallel rank

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    def sent_elements(self, num_trainers: int) -> np.ndarray:
        """Return this rank's row of `counts`."""
        counts = [e.send_counts[num_trainers:] for e in self.exchanges]
        return np.array(counts, np.int64).reshape(len(counts), -1)

    def run(
        self, weights: Mapping[str, torch.Tensor], moves: Callable[[Bucket], bool]
    ) -> tuple[int, int]:
        """Send trained parameters; `weights` is empty, as trainers have no engine."""
        travelling: list[tuple[str, dist.Work]] = []
        sizes = [sum(e.send_counts) * e.bucket.engine_dtype.itemsize for e in self.exchanges]
        buffers = _Buffers(0 if self._trained.merged else max(sizes, default=0), self._device)
        number = {id(e): i for i, e in enumerate(self.exchanges)}
        for where, exchange in self._exchanges(moves):
            if self.failure and not exchange.bucket.merged:
                continue
            self._guard.phase = f"packing {where}"
            sources = [self._source(name, rows) for name, rows in exchange.sources]
            if self.failure:
                continue
            try:
                if len(travelling) == 2:
                    self.finish(*travelling.pop(0))
                i, dtype = number[id(exchange)], exchange.bucket.engine_dtype
                outgoing = buffers.next(sizes[i]).view(dtype)
                exchange.pack.copy(sources, [outgoing])
                work = self._send(f"sending {where}", outgoing, self.counts[:, i] * dtype.itemsize)
                travelling.append((f"sending {where}", work))
            except LinkError as error:
                self.failure = error
        try:
            while travelling and not self.failure:
                self.finish(*travelling.pop(0))
        except LinkError as error:
            self.failure = error
        if not self.failure:  # else gloo's threads may still read them
            buffers.free()
        return self._bytes_received, self._bytes_sent

    def finish(self, phase: str, work: dist.Work) -> None:
        """Wait until `work` has been done, or is enqueued."""
        with self.link.collective(phase):
            work.wait()
        self._progress.mark(phase)

    def _send(self, phase: str, outgoing: torch.Tensor, sent: np.ndarray) -> dist.Work:
        """Start to send a message, in the order of the tensor-parallel ranks.

        sent: bytes from each trainer to each of these, int64 [trainers, tp_size].
        """
        parts = outgoing.view(torch.uint8).split(sent[self._rank].tolist())
        self._checksums.append([bit_checksum(part) for part in parts])
        counts: list[int] = []
        for column, members in zip(sent.T, self.link.members_by_tp_rank, strict=True):
            counts += divide(column, len(members)).counts[self._rank].tolist()
        self._bytes_sent += outgoing.nbytes
        with self.link.collective(phase):
            return self.link.send(outgoing, counts)

    def _deliver_scales(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Send the scales of each tensor-parallel rank, an equal part from every trainer."""
        if self.failure:
            return
        num_trainers, phase = self.link.num_trainers, f"sending {_SCALES}"
        parts = [
            self.scales.of_rank(num_trainers + tp_rank).tensor_split(num_trainers)
            for tp_rank in sorted(self.link.replicas)
        ]
        sent = np.array([[part.nbytes for part in column] for column in parts]).T
        try:
            outgoing = torch.cat([column[self._rank] for column in parts])
            self.finish(phase, self._send(phase, outgoing, sent))
        except LinkError as error:
            self.failure = error

    def send_full(self, name: str, full: torch.Tensor) -> int:
        """Send a full parameter, of which each member gets a part. Return the bytes sent."""
        if self.failure:
            return 0
        data = full.contiguous().view(-1).view(torch.uint8)
        parts = data.split(part_of_full(data.numel(), len(self.link.members)))
        own = [
            p if owner_of_part(i, self.link) == self._rank else p[:0] for i, p in enumerate(parts)
        ]
        counts = [p.numel() for p in own] + [0] * (len(self.link.members) - len(own))
        phase = f"sending {name!r} in full"
        try:
            with self.link.collective(phase):
                work = self.link.send(torch.cat(own), counts)
            self.finish(phase, work)
            self._checksums.append([bit_checksum(data)] * len(self.link.replicas))
        except LinkError as error:
            self.failure = error
        return sum(counts)

    def send_checksums(self) -> None:
        """Send the checksums of all that was sent, to every member those of what it needs."""
        if self.failure or not self._checksums:
            return
        by_tp_rank = [torch.stack(column) for column in zip(*self._checksums, strict=True)]
        members = sorted(self.link.replicas.items())
        outgoing = [by_tp_rank[tp_rank] for tp_rank, ranks in members for _ in ranks]
        try:
            with self.link.collective("sending checksums"):
                self.link.send(torch.cat(outgoing), [o.nbytes for o in outgoing]).wait()
            self._progress.mark("sending checksums")
        except LinkError as error:
            self.failure = error


class Arrival:
    """What the trainers send to a tensor-parallel rank, as one of its members receives it.

    Receives this member's part at once; `finish` gathers those of the other replicas. sent: bytes
    from each trainer, int64 [N]. new_buffer: returns a buffer of so many bytes, uint8.

    Attributes:
        received: bytes from trainers and replicas. sent: bytes to replicas.
    """

    def __init__(
        self, link: Link, sent: np.ndarray, new_buffer: Callable[[int], torch.Tensor], where: str
    ) -> None:
        self._link, self._where, self._size = link, where, int(sent.sum())
        replicas = link.own_replicas
        division = divide(sent, len(replicas))
        index = replicas.index(link.rank)
        counts = division.counts[:, index]
        self._buffer = new_buffer(division.part * len(replicas))
        own = self._buffer[index * division.part :][: counts.sum()]
        with link.collective(f"receiving {where}"):
            self._work = link.receive(own, counts.tolist())
        self.sent = (len(replicas) - 1) * division.part
        self.received = own.nbytes + self.sent

    def finish(self, progress: DeviceProgress) -> torch.Tensor:
        """Return all that was sent, uint8."""
        link, where = self._link, self._where
        with link.collective(f"receiving {where}"):
            self._work.wait()
        progress.mark(f"receiving {where}")
        with link.collective(f"exchanging {where} with the other replicas"):
            link.gather(self._buffer)
        progress.mark(f"exchanging {where} with the other replicas")
        return self._buffer[: self._size]


class ReceivePipeline:
    """Receives the buckets of one tensor-parallel rank into an engine's tensors.

    builder: of a plan of the trainers, then the tensor-parallel ranks. exchanges: one per bucket.
    """

    def __init__(self, builder: ExchangeBuilder, num_trainers: int) -> None:
        self._plan, self._num_trainers, self._device = builder.plan, num_trainers, builder.device
        self._rank, self._scales = builder.rank, builder.scales
        self.exchanges = [builder.build(bucket) for bucket in builder.plan.buckets]

    def run(
        self,
        link: Link,
        progress: DeviceProgress,
        weights: Mapping[str, torch.Tensor],
        moves: Callable[[Bucket], bool],
    ) -> tuple[int, int]:
        """Write buckets into `weights`. Return (bytes received, bytes sent to replicas).

        moves: which buckets.
        """
        self._received = self._sent = 0
        self._checksums: list[torch.Tensor] = []  # of each message, by trainer
        self._messages: list[str] = []
        moving = [e for e in self.exchanges if moves(e.bucket)]
        if any(e.bucket.quantized for e in moving):
            self._receive_scales(link, progress, weights)
        buffers = _Buffers(self._plan.staging_bytes + ALIGNMENT * len(link.members), self._device)
        run_pipelined(
            self._transfer(e, f"bucket {i} of {len(moving)}", link, progress, weights, buffers)
            for i, e in enumerate(moving, 1)
        )
        buffers.free()
        return self._received, self._sent

    def _transfer(
        self,
        exchange: Exchange,
        where: str,
        link: Link,
        progress: DeviceProgress,
        weights: Mapping[str, torch.Tensor],
        buffers: _Buffers,
    ) -> Iterator[None]:
        """Start to receive a bucket, yield, then wait for it, gather and unpack."""
        dtype = exchange.bucket.engine_dtype
        sent = np.array(exchange.receive_counts[: self._num_trainers]) * dtype.itemsize
        arrival = Arrival(link, sent, buffers.next, where)
        yield
        arrived = self._finish(arrival, sent, progress, where)
        link.phase = f"unpacking {where}"
        destinations = [weights[name] for name in exchange.destinations]
        exchange.unpack.copy([arrived.view(dtype)], destinations)

    def _receive_scales(
        self, link: Link, progress: DeviceProgress, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Receive and write the scales of this engine rank's quantized tensors."""
        scales = self._scales.of_rank(self._rank)
        sent = np.array([part.nbytes for part in scales.tensor_split(self._num_trainers)])
        arrival = Arrival(link, sent, self._new_buffer, _SCALES)
        arrived = self._finish(arrival, sent, progress, _SCALES)
        scales.copy_(arrived.view(scales.dtype))
        self._scales.write(self._rank, weights)

    def _new_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _finish(
        self, arrival: Arrival, sent: np.ndarray, progress: DeviceProgress, where: str
    ) -> torch.Tensor:
        """Return what has arrived, uint8. sent: bytes from each trainer, int64 [N]."""
        arrived = arrival.finish(progress)
        self._received += arrival.received
        self._sent += arrival.sent
        self._checksums.append(torch.stack([bit_checksum(s) for s in arrived.split(sent.tolist())]))
        self._messages.append(where)
        return arrived

    def receive_full(
        self, name: str, spec: ShardSpec, link: Link, progress: DeviceProgress
    ) -> torch.Tensor:
        """Return a full parameter, of which each member receives a part and gathers the others."""
        size = math.prod(spec.shape) * spec.dtype.itemsize
        part, index = part_of_full(size, len(link.members)), link.rank - link.num_trainers
        buffer = torch.empty(part * len(link.members), dtype=torch.uint8, device=link.device)
        own = buffer[:size][index * part :][:part]
        counts = [0] * link.num_trainers
        counts[owner_of_part(index, link)] = own.numel()
        with link.collective(f"receiving {name!r} in full"):
            link.receive(own, counts).wait()
            link.gather(buffer, "members")
        progress.mark(f"receiving {name!r} in full")
        self._checksums.append(bit_checksum(buffer[:size]).repeat(link.num_trainers))
        self._messages.append(f"{name!r} in full")
        return buffer[:size].view(spec.dtype).view(spec.shape)

    def compare_checksums(self, link: Link, progress: DeviceProgress) -> None:
        """Raise LinkError, and warn, if what has arrived differs from what the trainers sent."""
        if not self._checksums:
            return
        actual = torch.stack(self._checksums, 1)  # [trainers, messages]
        expected = torch.empty_like(actual)
        with link.collective("receiving checksums"):
            link.receive(expected.view(-1), [actual[0].nbytes] * len(actual)).wait()
        progress.mark("receiving checksums")
        progress.wait()
        if differ := (actual != expected).nonzero().tolist():
            trainer, message = differ[0]
            damage = f"{self._messages[message]} from trainer rank {trainer} arrived damaged"
            warnings.warn(
                f"{damage}: its checksum differs. The transfer is repeated.",
                RuntimeWarning,
                stacklevel=2,
            )
            raise LinkError(damage)


def part_of_full(size: int, num_members: int) -> int:
    """Return how many of `size` bytes one member receives from the trainers."""
    return max(1, divide(np.array([size]), num_members).part)


def owner_of_part(index: int, link: Link) -> int:
    """Return the trainer that sends the part of one member."""
    return index % link.num_trainers


class _Buffers:
    """Two buffers that serve all buckets in turn, because allocating new memory is slow.

    size: of the largest bucket, in bytes; 0: each bucket gets a buffer of its own size.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device, self._count = size, device, 0
        self._buffers: list[torch.Tensor] = []

    def next(self, size: int) -> torch.Tensor:
        """Return a buffer, uint8 [size]; valid until two others have been requested."""
        if len(self._buffers) < 2:
            whole = torch.empty(max(size, self._size), dtype=torch.uint8, device=self._device)
            self._buffers.append(whole)
        elif not self._size:
            self._release(self._count % 2)
            self._buffers[self._count % 2] = torch.empty(
                size, dtype=torch.uint8, device=self._device
            )
        buffer = self._buffers[self._count % 2][:size]
        self._count += 1
        return buffer

    def free(self) -> None:
        """Free the memory itself: gloo's threads may keep references."""
        for i in range(len(self._buffers)):
            self._release(i)

    def _release(self, i: int) -> None:
        self._buffers[i].untyped_storage().resize_(0)
