"""What moves the messages of a sync between the ranks of its plan.

Among ranks of one world, which train and hold an engine, all-to-all works everywhere. Pull, on one
machine, moves buckets through memory that every rank maps: a rank packs a slice once however many
ranks need it, and there is no receive buffer: each receiver copies from the senders' memory to the
engine's weights, in one launch per bucket.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hybridengine.run.failures import CollectiveGuard, DeviceProgress, Guard, one_line
from hybridengine.run.messages import all_gather_values, host_device, raise_on_all_ranks
from hybridengine.sync.shards import ShardSpec
from hybridengine.sync.tables import ALIGNMENT, Exchange
from hybridengine.sync.weight_target import ReshardError

Gather = Callable[[], torch.Tensor]
"""Returns a full parameter on a rank that trains; collective over these."""

Pack = Callable[[torch.Tensor], None]
"""Fills a send buffer, uint8."""

Sizes = Sequence[int]
"""Bytes to, or from, every rank of the plan."""


@dataclass
class Pending:
    """A message on its way.

    wait: returns what has arrived, uint8, in one or more buffers; nothing on a rank that sends.
      They are valid until two further messages have been posted, or until `release`.
    release: called when what has arrived is no longer needed.
    received, sent: bytes of it on an engine rank, known once it has arrived.
    """

    wait: Callable[[], list[torch.Tensor]]
    release: Callable[[], object] = lambda: None
    received: int = 0
    sent: int = 0


class Buffers:
    """Two buffers that serve all messages in turn, because allocating new memory is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._count = device, 0
        self.buffers: list[torch.Tensor] = []

    def next(self, size: int, largest: int) -> torch.Tensor:
        """Return a buffer, uint8 [size]; valid until two others have been requested.

        largest: the size of the largest buffer; 0: allocate a new one of the size needed.
        """
        i, self._count = self._count % 2, self._count + 1
        if len(self.buffers) <= i:
            self.buffers.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if not largest or self.buffers[i].numel() < size:
            self.buffers[i].untyped_storage().resize_(0)  # gloo's threads may keep references
            new = torch.empty(max(size, largest), dtype=torch.uint8, device=self._device)
            self.buffers[i] = new
        return self.buffers[i][:size]

    def end(self, keep: bool = False) -> None:
        """Free the buffers, or keep them: the next sync gets the same ones in the same order."""
        self._count = 0
        while self.buffers and not keep:
            self.buffers.pop().untyped_storage().resize_(0)


class Transport(ABC):
    """One rank's end of the connection between the ranks of a plan.

    Some ranks send, some receive, those that train and hold an engine do both. All of them post the
    same messages in the same order. Sizes are in bytes, of every rank of the plan.

    overlaps: whether a bucket may be posted before the one before it has been waited for.

    Attributes:
        guard: the guard of the collectives of this end.
        receivers: ranks of the plan that hold an engine only; those before them train.
        bytes_received, bytes_sent: since `begin`.
    """

    overlaps: ClassVar[bool] = True
    guard: Guard
    progress: DeviceProgress
    receivers: range = range(0)
    bytes_received = bytes_sent = 0

    @abstractmethod
    def post_bucket(self, where: str, exchange: Exchange, pack: Pack) -> Pending:
        """Start to move a bucket."""

    @abstractmethod
    def post(
        self, where: str, outgoing: torch.Tensor | None, sent: Sizes, received: Sizes
    ) -> Pending:
        """Start to move messages. outgoing: uint8, in the order of the receivers; None: none."""

    def move_full(self, name: str, spec: ShardSpec, gather: Gather) -> torch.Tensor | None:
        """Return a full parameter on ranks that hold an engine, None elsewhere."""
        return gather()

    def check(self, problem: Exception | None) -> None:
        """Raise on this rank, or where ranks agree on every step on all, if there is a problem."""
        if problem is not None:
            raise problem

    def end(self) -> None:  # noqa: B027, optional
        """All messages were moved: free the memory, and compare checksums where there are any."""


def run_transfers(transfers: Iterable[Iterator[None]], overlapping: bool = True) -> None:
    """Run transfers, each of which yields once: when it has posted, before it waits.

    overlapping: each starts before the one before it is finished.
    """
    previous: Iterator[None] = iter(())
    for transfer in transfers:
        next(transfer)  # start it
        if not overlapping:
            next(transfer, None)
        next(previous, None)  # finish the one before
        previous = transfer
    next(previous, None)


@dataclass(frozen=True)
class SharedMemory:
    """Memory of all ranks, mapped as long as this object lives.

    buffers: the memory of each rank, uint8 [size].
    """

    buffers: list[torch.Tensor]
    _owner: object


class HostMemory:
    """Memory of the host; `address` is the path by which ranks of this machine open it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._descriptor = os.memfd_create("hybridengine")
        os.ftruncate(self._descriptor, size)
        self.address = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def map(self, addresses: Sequence[str]) -> list[torch.Tensor]:
        return [
            torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
            for path in addresses
        ]

    def close(self) -> None:
        """Forget the descriptor; what is mapped stays."""
        os.close(self._descriptor)


class _DeviceMemory:
    """Memory of a GPU; `address` is the index of this rank's GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not symm_mem.empty: tensors of its memory pool may start inside an allocation.
        self._tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self._size, self.address = size, device.index

    def map(self, addresses: Sequence[int]) -> list[torch.Tensor]:
        from torch.distributed._symmetric_memory import rendezvous

        group = dist.group.WORLD
        assert group is not None
        self._handle = rendezvous(self._tensor, group.group_name)
        ranks = range(len(addresses))
        return [self._handle.get_buffer(r, (self._size,), torch.uint8) for r in ranks]

    def close(self) -> None: ...


def _attempt(fn: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of `fn`, or why it failed."""
    try:
        return fn(), None
    except Exception as error:
        return None, one_line(error)


def share_memory(size: int, device: torch.device) -> SharedMemory | None:
    """Return `size` bytes of every rank, or None if not every rank can map all. Collective.

    size, device.type: the same on every rank. All ranks are on one machine. Warns where sharing
    failed, but not of GPUs that cannot access each other.
    """
    kind: Any = HostMemory if device.type == "cpu" else _DeviceMemory
    own, problem = _attempt(lambda: kind(size, device))
    offers = all_gather_values((own and own.address, problem), tuple[str | int | None, str | None])
    addresses: Any
    addresses, problems = map(list, zip(*offers, strict=True))
    buffers: Any = []
    if device.type == "cuda" and not _access_each_other(addresses):
        return None
    if own is not None:
        if not any(problems):
            buffers, problem = _attempt(lambda: own.map(addresses))
            problems = all_gather_values(problem, str | None)  # from here on every rank has mapped
        own.close()
    if failed := [rank for rank, text in enumerate(problems) if text]:
        if dist.get_rank() == 0:
            warnings.warn(
                f"rank {failed[0]} cannot share memory with the other ranks of this machine "
                f"({problems[failed[0]]}): weight syncs use the slower all-to-all",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    return SharedMemory(buffers, own)


def _access_each_other(gpus: Sequence[int | None]) -> bool:
    """Return whether each of the GPUs can read the memory of all others."""
    found = {gpu for gpu in gpus if gpu is not None}
    return all(torch.cuda.can_device_access_peer(a, b) for a in found for b in found - {a})


class Collectives(Transport):
    """Moves messages by collectives of the ranks that train."""

    guard: CollectiveGuard

    def __init__(
        self, guard: CollectiveGuard, progress: DeviceProgress, device: torch.device
    ) -> None:
        self.guard, self.progress, self._device = guard, progress, device

    def begin(self) -> None:
        self.bytes_received = self.bytes_sent = 0

    def post(
        self, where: str, outgoing: torch.Tensor | None, sent: Sizes, received: Sizes
    ) -> Pending:
        assert outgoing is not None
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=self._device)
        return self._exchange(where, incoming, outgoing, received, sent)

    def _exchange(
        self,
        where: str,
        incoming: torch.Tensor,
        outgoing: torch.Tensor,
        received: Sizes,
        sent: Sizes,
    ) -> Pending:
        with self.guard.collective(f"exchanging {where}"):
            work = dist.all_to_all_single(
                incoming, outgoing, list(received), list(sent), async_op=True
            )
        self.bytes_received += incoming.nbytes
        self.bytes_sent += outgoing.nbytes
        return Pending(partial(self._wait, where, work, list(incoming.split(list(received)))))

    def _wait(
        self, where: str, work: dist.Work, arriving: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        with self.guard.collective(f"exchanging {where}"):
            self.guard.wait(work, self._device)
        self.progress.mark(f"exchanging {where}")
        return arriving

    def check(self, problem: Exception | None) -> None:
        raise_if_any(problem, self.guard, "checking what has arrived")


class AllToAll(Collectives):
    """Two staging buffers serve all buckets, because allocating new memory is slow.

    staging_bytes: the staging memory of the plan.
    merges: each bucket gets a buffer of its own size, because merged rows take the rest of its
      budget.
    keeps_staging: the buffers serve all syncs, so that the addresses in the tables of copies stay
      valid.
    """

    def __init__(
        self,
        guard: CollectiveGuard,
        progress: DeviceProgress,
        device: torch.device,
        staging_bytes: int,
        merges: bool,
        keeps_staging: bool = False,
    ) -> None:
        super().__init__(guard, progress, device)
        self._staging_bytes, self._merges = staging_bytes, merges
        self._keeps_staging = keeps_staging
        self._kept: Buffers | None = None  # of the last sync, unless it failed

    def begin(self) -> None:
        super().begin()
        # A sync that failed may still write to its own.
        self.buffers, self._kept = self._kept or Buffers(self._device), None

    def post_bucket(self, where: str, exchange: Exchange, pack: Pack) -> Pending:
        sent, received = exchange.bytes_sent, exchange.bytes_received
        start = -(-sum(sent) // ALIGNMENT) * ALIGNMENT
        if start + sum(received) > self._staging_bytes:
            start = sum(sent)
        size = start + sum(received)
        buffer = self.buffers.next(size, 0 if self._merges else self._staging_bytes)
        outgoing, incoming = buffer[: sum(sent)], buffer[start:]
        pack(outgoing)
        pending = self._exchange(where, incoming, outgoing, received, sent)
        if self._merges:
            pending.release = partial(buffer.untyped_storage().resize_, 0)
        return pending

    def end(self) -> None:
        self.buffers.end(keep=self._keeps_staging)
        self._kept = self.buffers if self._keeps_staging else None


class Pull(Collectives):
    """pack → all ranks have packed → unpack from their buffers.

    The two halves of `memory` serve the buckets in turn: a rank packs bucket k+2 into the half of
    bucket k after all ranks have packed k+1, which each did after unpacking k.
    """

    overlaps = False

    def __init__(
        self,
        guard: CollectiveGuard,
        progress: DeviceProgress,
        device: torch.device,
        memory: SharedMemory,
    ) -> None:
        super().__init__(guard, progress, device)
        self.memory = memory

    def begin(self) -> None:
        super().begin()
        self._count = 0
        self._packed = torch.zeros(1, dtype=torch.int32, device=self._device)

    def post_bucket(self, where: str, exchange: Exchange, pack: Pack) -> Pending:
        buffers = [buffer.chunk(2)[self._count % 2] for buffer in self.memory.buffers]
        self._count += 1
        pack(buffers[dist.get_rank()])
        with self.guard.collective(f"exchanging {where}"):
            work = dist.all_reduce(self._packed, async_op=True)
        self.bytes_received += sum(exchange.bytes_received)
        self.bytes_sent += sum(exchange.bytes_sent)
        return Pending(partial(self._wait, where, work, buffers))


def raise_if_any(problem: Exception | None, guard: CollectiveGuard, phase: str) -> None:
    """Raise ReshardError on every rank if any rank has a problem; one number where none has."""
    failed = torch.tensor(int(problem is not None), device=host_device())
    with guard.collective(phase):
        work = dist.all_reduce(failed, dist.ReduceOp.MAX, async_op=True)
        guard.wait(work, failed.device)
        if failed.item():
            raise_on_all_ranks(problem, ReshardError)
