"""The interface of what moves the messages of a sync between the ranks of its plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from hybridengine.run.device import DeviceProgress, Guard
from hybridengine.sync.move.tables import Exchange
from hybridengine.sync.shards import ShardSpec

_ALIGNMENT = 8  # bytes of a message: the next one is aligned for its values and its checksum


class Header(NamedTuple):
    """What a receiver knows before the message arrives; all zero but the versions for no changes.

    base, new: see `Versions`.
    gap_width: bytes of a field of the gaps.
    gap_bytes: the bytes of all gaps.
    checksum: the checksum of the message.
    """

    base: int
    new: int
    num_changes: int
    gap_width: int
    gap_bytes: int
    checksum: int

    @property
    def num_bytes(self) -> int:
        """The size of the message."""
        size = 2 * self.num_changes + self.gap_bytes
        return -(-size // _ALIGNMENT) * _ALIGNMENT


HEADER_BYTES = 8 * len(Header._fields)


Pack = Callable[[torch.Tensor], None]
"""Fills a buffer of the engine's dtype with what this rank sends of a bucket."""

Gather = Callable[[], torch.Tensor]
"""Returns a full parameter on a rank that trains; collective over these."""

Sizes = Sequence[int]
"""Bytes to, or from, every rank of the plan."""


@dataclass
class Pending:
    """A message on its way.

    wait: returns what has arrived, uint8, in one or more buffers; nothing on a rank that sends.
      They are valid until two further messages have been posted, or until `release`.
    release: called when what has arrived is no longer needed.
    headers: the headers that arrived before the message.
    received, sent: bytes of it on an engine rank, known once it has arrived.
    """

    wait: Callable[[], list[torch.Tensor]]
    release: Callable[[], object] = lambda: None
    headers: Sequence[Header] = ()
    received: int = 0
    sent: int = 0


class Buffers:
    """Two buffers that serve all messages in turn, because allocating new memory is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._count = device, 0
        self._buffers: list[torch.Tensor] = []

    def next(self, size: int, largest: int) -> torch.Tensor:
        """Return a buffer, uint8 [size]; valid until two others have been requested.

        largest: the size of the largest buffer; 0: allocate a new one of the size needed.
        """
        i, self._count = self._count % 2, self._count + 1
        if len(self._buffers) <= i:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if not largest or self._buffers[i].numel() < size:
            self._buffers[i].untyped_storage().resize_(0)  # gloo's threads may keep references
            new = torch.empty(max(size, largest), dtype=torch.uint8, device=self._device)
            self._buffers[i] = new
        return self._buffers[i][:size]

    def end(self, keep: bool = False) -> None:
        """Free the buffers, or keep them: the next sync gets the same ones in the same order."""
        self._count = 0
        while self._buffers and not keep:
            self._buffers.pop().untyped_storage().resize_(0)


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

    @abstractmethod
    def post_delta(
        self, where: str, headers: Sequence[Header], outgoing: torch.Tensor | None
    ) -> Pending:
        """Start to move messages whose sizes only their senders know. headers: one per receiver."""

    @abstractmethod
    def move_full(self, name: str, spec: ShardSpec, gather: Gather) -> torch.Tensor | None:
        """Return a full parameter on ranks that hold an engine, None elsewhere."""

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
