"""Transports among ranks of one world, which train and hold an engine.

All-to-all works everywhere. Pull, on one machine, moves buckets through memory that every rank
maps: a rank packs a slice once however many ranks need it, and there is no receive buffer: each
receiver copies from the senders' memory to the engine's weights, in one launch per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybridengine.reshard.errors import ReshardError
from hybridengine.reshard.payload.message import HEADER_BYTES, Header
from hybridengine.reshard.payload.tables import ALIGNMENT, Exchange, PullBuilder
from hybridengine.reshard.payload.transport import Pending, PhaseGuard, Transport
from hybridengine.reshard.transport.shared_memory import SharedMemory
from hybridengine.runtime.all_ranks import host_device, raise_on_all_ranks
from hybridengine.runtime.device import DeviceProgress
from hybridengine.sharding.shards import ShardSpec


class _Arriving(Pending):
    def __init__(
        self,
        transport: AllToAll,
        where: str,
        work: dist.Work,
        arriving: list[torch.Tensor],
        buffer: torch.Tensor | None = None,
        headers: Sequence[Header] = (),
    ) -> None:
        self._transport, self._where, self._work = transport, where, work
        self._arriving, self._buffer, self.headers = arriving, buffer, headers

    def wait(self) -> list[torch.Tensor]:
        with self._transport.guard.collective(f"exchanging {self._where}"):
            self._work.wait()
        self._transport.progress.mark(f"exchanging {self._where}")
        return self._arriving

    def release(self) -> None:
        if self._buffer is not None:
            self._transport.take_back(self._buffer)


class AllToAll(Transport):
    """Two staging buffers serve all buckets, because allocating new memory is slow.

    staging_bytes: of the plan. merges: each bucket gets a buffer of its own size, because merged
    rows take the rest of its budget. keeps_staging: the buffers serve all syncs, so that the
    addresses in the tables of copies stay valid.
    """

    name = "all-to-all"

    def __init__(
        self,
        guard: PhaseGuard,
        progress: DeviceProgress,
        device: torch.device,
        staging_bytes: int,
        merges: bool,
        keeps_staging: bool = False,
    ) -> None:
        self.guard, self.progress, self._device = guard, progress, device
        self._staging_bytes, self._merges = staging_bytes, merges
        self._keeps_staging = keeps_staging
        self._free: list[torch.Tensor] = []

    def begin(self) -> None:
        self.bytes_received = self.bytes_sent = 0

    def post_bucket(
        self, where: str, exchange: Exchange, pack: Callable[[torch.Tensor], None]
    ) -> Pending:
        sent, received = exchange.bytes_sent, exchange.bytes_received
        start = -(-sum(sent) // ALIGNMENT) * ALIGNMENT
        if start + sum(received) > self._staging_bytes:
            start = sum(sent)
        size = start + sum(received) if self._merges else self._staging_bytes
        buffer = self._free.pop() if self._free else self._new_buffer(size)
        outgoing, incoming = buffer[: sum(sent)], buffer[start:][: sum(received)]
        pack(outgoing.view(exchange.bucket.engine_dtype))
        return self._exchange(where, incoming, outgoing, received, sent, buffer)

    def _new_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def take_back(self, buffer: torch.Tensor) -> None:
        """Use a buffer for a later bucket, or free it."""
        if self._merges:
            buffer.untyped_storage().resize_(0)
        else:
            self._free.append(buffer)

    def post(
        self, where: str, outgoing: torch.Tensor | None, sent: Sequence[int],
        received: Sequence[int],
    ) -> Pending:  # fmt: skip
        assert outgoing is not None
        incoming = self._new_buffer(sum(received))
        return self._exchange(where, incoming, outgoing, received, sent)

    def post_delta(
        self, where: str, headers: Sequence[Header], outgoing: torch.Tensor | None
    ) -> Pending:
        assert outgoing is not None
        told = torch.tensor(headers, dtype=torch.int64, device=host_device())
        heard = torch.empty_like(told)
        with self.guard.collective(f"exchanging the sizes of {where}"):
            dist.all_to_all_single(heard, told)
            arriving = [Header(*row) for row in heard.tolist()]
        received, sent = ([h.num_bytes for h in row] for row in (arriving, headers))
        self.bytes_received += HEADER_BYTES * (len(headers) - 1)
        self.bytes_sent += HEADER_BYTES * (len(headers) - 1)
        incoming = self._new_buffer(sum(received))
        return self._exchange(where, incoming, outgoing, received, sent, headers=arriving)

    def _exchange(
        self, where: str, incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int],
        sent: Sequence[int], buffer: torch.Tensor | None = None, headers: Sequence[Header] = (),
    ) -> Pending:  # fmt: skip
        with self.guard.collective(f"exchanging {where}"):
            work = dist.all_to_all_single(
                incoming, outgoing, list(received), list(sent), async_op=True
            )
        self.bytes_received += incoming.nbytes
        self.bytes_sent += outgoing.nbytes
        arriving = list(incoming.split(list(received)))
        return _Arriving(self, where, work, arriving, buffer, headers)

    def move_full(
        self, name: str, spec: ShardSpec, gather: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        return gather()

    def check(self, problem: Exception | None) -> None:
        failed = torch.tensor(int(problem is not None), device=host_device())
        with self.guard.collective("checking what has arrived"):
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if failed.item():
                raise_on_all_ranks(problem, ReshardError)

    def end(self) -> None:
        while self._free and not self._keeps_staging:
            # gloo's threads may keep references: free the memory itself
            self._free.pop().untyped_storage().resize_(0)


class Pull(AllToAll):
    """pack → all ranks have packed → unpack from their buffers.

    The two halves of the memory serve the buckets in turn: a rank packs bucket k+2 into the half of
    bucket k after all ranks have packed k+1, which each did after unpacking k.
    """

    name, overlaps, builder = "pull", False, PullBuilder

    def __init__(
        self,
        guard: PhaseGuard,
        progress: DeviceProgress,
        device: torch.device,
        staging_bytes: int,
        merges: bool,
        memory: SharedMemory,
    ) -> None:
        super().__init__(guard, progress, device, staging_bytes, merges)
        self.memory = memory

    def begin(self) -> None:
        super().begin()
        self._count = 0
        self._packed = torch.zeros(1, dtype=torch.int32, device=self._device)

    def post_bucket(
        self, where: str, exchange: Exchange, pack: Callable[[torch.Tensor], None]
    ) -> Pending:
        buffers = [buffer.chunk(2)[self._count % 2] for buffer in self.memory.buffers]
        self._count += 1
        pack(buffers[dist.get_rank()].view(exchange.bucket.engine_dtype))
        with self.guard.collective(f"exchanging {where}"):
            work = dist.all_reduce(self._packed, async_op=True)
        self.bytes_received += sum(exchange.bytes_received)
        self.bytes_sent += sum(exchange.bytes_sent)
        return _Arriving(self, where, work, buffers)


def pull_bytes(builder: PullBuilder) -> int:
    """Return how much memory of every rank a pull needs for the buckets that were built."""
    return 2 * max(ALIGNMENT, builder.buffer_bytes)
