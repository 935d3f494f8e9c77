"""Connections to engines in other processes of the same devices: memory that their ranks map.

A trainer writes a message into one of two slots of memory that the members it feeds have mapped:
on a CPU shared memory, on a GPU an IPC handle. Over a Unix socket it tells each member where its
part is; the member copies it into its live weights and answers, and the slot is free again. Nobody
polls, and a process that ends closes its sockets.

On one machine without GPUs every trainer feeds every member. On GPUs a process sees its own device
alone, and engines may be on several machines: there the trainers first exchange their messages in
their own group, into the slot of the trainer on the member's device.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.remote.sync.link import Link, LinkError, Place
from hybridengine.remote.sync.offered_memory import MemoryOffer, map_memory, offered_memory
from hybridengine.remote.sync.records import SyncStore
from hybridengine.run.failures import CollectiveGuard, one_line
from hybridengine.run.messages import wait_for
from hybridengine.sync.tables import ALIGNMENT
from hybridengine.sync.transport import Pending
from hybridengine.sync.weight_target import ReshardError

_SLOTS = 2
_MIN_SLOT_BYTES = 1 << 20
_TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")  # the listener's token, rank of the member
_POST = struct.Struct("<BB")  # slot, whether another piece of the message follows
_PART = struct.Struct("<qq")  # offset in the slot, bytes
_READ = b"r"  # the answer of a member

_Message = TypeVar("_Message", torch.Tensor, range)  # its bytes, or their numbers


class Listener(NamedTuple):
    """What a trainer tells the members that it feeds."""

    address: str
    token: bytes
    memory: MemoryOffer
    slot_bytes: int


class MemoryLink(Link):
    """The link that the module describes.

    feeders: the trainers that feed each member.
    guard: on a trainer, the guard of the trainers' collectives.
    buckets: on a trainer, the bytes from each trainer to each tensor-parallel rank, by bucket.
    relays: whether the trainers exchange messages first. A trainer whose connections have failed
      (`failure`) then still takes part in the exchange.
    """

    checks = False  # memory does not damage messages

    def __init__(
        self,
        place: Place,
        store: SyncStore,
        number: int,
        feeders: Sequence[Sequence[int]],
        guard: CollectiveGuard | None = None,
        buckets: Iterable[np.ndarray] = (),
    ) -> None:
        super().__init__(place)
        self._feeders, self._guard = [list(ranks) for ranks in feeders], guard
        self.relays = any(len(ranks) != self.num_trainers for ranks in feeders)
        self.is_kept = self.device.type == "cpu"
        self._store, self._key = store, f"memory/{number}"
        self._sockets: list[socket.socket] = []  # of fed members, or of feeders
        self._posted = 0
        if self.rank < self.num_trainers:
            largest = [max(self._written(sizes)) for sizes in buckets]
            self._slot_bytes = max(max(largest, default=0) + ALIGNMENT, _MIN_SLOT_BYTES)
            try:
                with self.collective("connecting"):
                    self._listen()
            except LinkError as error:
                self.failure = error
        else:
            with self.collective("connecting"):
                self._connect()

    # On a trainer

    def _written(self, sizes: np.ndarray) -> list[int]:
        """Return how many bytes each trainer writes of a message of these sizes."""
        if not self.relays:
            return [int(n) for n in sizes.sum(1)]
        return [int(sizes[:, tps].sum()) for tps in self._tp_ranks_fed]

    @cached_property
    def _tp_ranks_fed(self) -> list[list[int]]:
        """The tensor-parallel ranks of the members that each trainer feeds."""
        fed: list[list[int]] = [[] for _ in range(self.num_trainers)]
        for member, ranks in zip(self.members, self._feeders, strict=True):
            for rank in ranks:
                if member.tp_rank not in fed[rank]:
                    fed[rank].append(member.tp_rank)
        return fed

    @property
    def _fed(self) -> list[int]:
        """Indices of the members that this trainer feeds."""
        return [i for i, ranks in enumerate(self._feeders) if self.rank in ranks]

    def _listen(self) -> None:
        fed = self._fed
        if not fed:
            return
        token = secrets.token_bytes(_TOKEN_BYTES)
        name = f"hybridengine-{os.getpid()}-{secrets.token_hex(8)}"
        with (
            offered_memory(_SLOTS * self._slot_bytes, self.device) as (self._memory, offer),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            listener.bind(f"\0{name}")
            listener.listen()  # more than come: a connection is refused where the queue is full
            told = Listener(name, token, offer, self._slot_bytes)
            self._store.set(f"{self._key}/{self.rank}", told)
            deadline, by_member = time.monotonic() + self.timeout_s, dict[int, socket.socket]()
            while len(by_member) < len(fed):
                listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                connection, _ = listener.accept()
                index = self._greet(connection, token) - self.num_trainers
                if index in fed and index not in by_member:
                    by_member[index] = connection
                else:
                    connection.close()
        self._sockets = [by_member[i] for i in fed]
        self._read_by = [0] * len(fed)

    def _greet(self, connection: socket.socket, token: bytes) -> int:
        """Return the rank of the member that has connected, -1 if it is somebody else."""
        connection.settimeout(self.timeout_s)
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.geteuid():
            return -1
        try:
            given, rank = HELLO.unpack(_receive(connection, HELLO.size))
        except OSError:
            return -1
        return rank if secrets.compare_digest(given, token) else -1

    def buffer(self, size: int, largest: int) -> torch.Tensor:
        if self.relays or self.failure or size > self._slot_bytes:
            return super().buffer(size, largest)
        return self._free_slot()[:size]

    def _free_slot(self) -> torch.Tensor:
        """Return the memory of the next slot, once all fed members have read what was there."""
        self._wait_until_read(self._posted - _SLOTS + 1)
        slot = self._posted % _SLOTS
        return self._memory[slot * self._slot_bytes :][: self._slot_bytes]

    def _wait_until_read(self, count: int) -> None:
        """Return when all fed members have read so many messages."""
        for i, connection in enumerate(self._sockets):
            while self._read_by[i] < count:
                _receive(connection, len(_READ))
                self._read_by[i] += 1

    def send(self, outgoing: torch.Tensor, sizes: np.ndarray) -> None:
        if self.relays:
            self._relay(outgoing, sizes)
        else:
            self._write(outgoing, sizes[self.rank].tolist())

    def _write(self, outgoing: torch.Tensor, sizes: list[int]) -> None:
        slot = self._free_slot()
        in_place = bool(outgoing.numel()) and outgoing.data_ptr() == slot.data_ptr()
        pieces = 1 if in_place else _pieces(len(outgoing), self._slot_bytes)
        messages = outgoing.split(sizes)
        for piece in range(pieces):
            parts = [_cut(message, piece, pieces) for message in messages]
            sizes = [len(part) for part in parts]
            if not in_place:
                torch.cat(parts, out=self._free_slot()[: sum(sizes)])
            self._post([[place] for place in _places(sizes)], more=piece + 1 < pieces)

    def _relay(self, outgoing: torch.Tensor, sizes: np.ndarray) -> None:
        """Exchange messages with the trainers that feed; each then tells its members."""
        assert self._guard is not None
        pieces = _pieces(max(self._written(sizes)), self._slot_bytes)
        messages, fed = outgoing.split(sizes[self.rank].tolist()), self._tp_ranks_fed
        own = fed[self.rank]
        for piece in range(pieces):
            leaving = [[_cut(messages[tp], piece, pieces) for tp in tps] for tps in fed]
            lengths = [[len(_cut(range(n), piece, pieces)) for n in row[own]] for row in sizes]
            sent = [sum(map(len, parts)) for parts in leaving]
            received = [sum(row) for row in lengths]
            slot = self._slot_to_fill(sum(received))
            flat = torch.cat([part for parts in leaving for part in parts] or [outgoing[:0]])
            # Another trainer may wait for a member until its timeout.
            with self._guard.collective("exchanging messages for engines", 2 * self.timeout_s):
                arriving = slot[: sum(received)]
                work = dist.all_to_all_single(arriving, flat, received, sent, async_op=True)
                self._guard.wait(work, self.device, self.timeout_s)
            places = _places([n for row in lengths for n in row])
            by_tp_rank: list[list[tuple[int, int]]] = [[] for _ in messages]
            for i, tp in enumerate(own):
                by_tp_rank[tp] = places[i :: len(own)]
            if not self.failure:
                try:
                    self._post(by_tp_rank, more=piece + 1 < pieces)
                except OSError as error:
                    self._fail(error)
        if self.failure:
            raise self.failure

    def _slot_to_fill(self, size: int) -> torch.Tensor:
        """Return the next slot, or other memory where nobody will read it."""
        if self._sockets and not self.failure:
            try:
                return self._free_slot()
            except OSError as error:
                self._fail(error)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _fail(self, error: OSError) -> None:
        self.failure = LinkError(f"{self.lost_rank() or 'a member has ended'} ({one_line(error)})")

    def _post(self, parts: Sequence[Sequence[tuple[int, int]]], more: bool) -> None:
        """Tell each fed member where what it needs is. parts: by tensor-parallel rank."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        head = _POST.pack(self._posted % _SLOTS, more)
        self._posted += 1
        for index, connection in zip(self._fed, self._sockets, strict=True):
            own = parts[self.members[index].tp_rank]
            connection.sendall(head + b"".join(_PART.pack(*part) for part in own))

    # On a member

    def _connect(self) -> None:
        index = self.rank - self.num_trainers
        deadline = time.monotonic() + self.timeout_s
        self._slots: list[list[torch.Tensor]] = []
        for trainer in self._feeders[index]:
            told = self._find_listener(trainer, deadline)
            try:
                memory = map_memory(told.memory, self.device)
            except Exception as error:
                raise ReshardError(
                    f"the memory of trainer rank {trainer} cannot be mapped ({one_line(error)}): "
                    "the engine must run on its machine, as its user"
                ) from error
            self._slots.append(list(memory.split(told.slot_bytes)))
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self.timeout_s)
            connection.connect(f"\0{told.address}")
            connection.sendall(HELLO.pack(told.token, self.rank))
            self._sockets.append(connection)
        self._unread: deque[Callable[[], None]] = deque()

    def _find_listener(self, trainer: int, deadline: float) -> Listener:
        """Return what a trainer has told, once it has."""

        def check() -> None:
            if (lost := self.lost_rank()) or time.monotonic() > deadline:
                raise ConnectionError(lost or f"trainer rank {trainer} offers no memory")

        def read() -> Listener | None:
            told: Listener | None = self._store.get(f"{self._key}/{trainer}", Listener)
            return told

        return wait_for(read, check)

    def receive(self, sizes: np.ndarray, largest: int) -> Pending:
        """A bucket that came in one piece is read in the trainers' memory, all else is copied."""
        parts: list[torch.Tensor] = []  # by trainer

        def wait() -> list[torch.Tensor]:
            while not parts:  # messages come in the order in which they were awaited
                self._unread.popleft()()
            return parts

        def read() -> None:
            own, more = self._read_piece(sizes)
            if largest and not more:
                pending.release = self._tell_read
            else:
                pieces = [[part.clone() for part in own]]
                self._tell_read()
                while more:
                    following, more = self._read_piece(sizes)
                    pieces.append([part.clone() for part in following])
                    self._tell_read()
                own = [torch.cat(part) for part in zip(*pieces, strict=True)]
            parts.extend(own)
            pending.received = sum(part.numel() for part in parts)

        pending = Pending(wait)
        self._unread.append(read)
        return pending

    def _read_piece(self, sizes: np.ndarray) -> tuple[list[torch.Tensor], bool]:
        """Return the next piece of a message, by trainer, and whether another one follows."""
        parts: list[torch.Tensor] = []
        more = False
        senders = len(sizes) // len(self._sockets)
        for slots, connection in zip(self._slots, self._sockets, strict=True):
            record = _receive(connection, _POST.size + senders * _PART.size)
            slot, following = _POST.unpack_from(record)
            more |= bool(following)
            for offset, size in _PART.iter_unpack(record[_POST.size :]):
                parts.append(slots[slot][offset : offset + size])
        return parts, more

    def _tell_read(self) -> None:
        """Let the trainers use the slot again."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for connection in self._sockets:
            connection.sendall(_READ)

    # Both

    def end(self) -> None:
        super().end()
        if self.rank < self.num_trainers and not self.failure:
            self._wait_until_read(self._posted)

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._sockets.clear()
        self._slots, self._memory = [], torch.empty(0)
        if self.rank < self.num_trainers:
            self._store.delete(f"{self._key}/{self.rank}")


def _pieces(size: int, room: int) -> int:
    """Return in how many pieces a message travels: one, or pieces of less than `room`."""
    return 1 if size <= room else -(-size // (room // 2))


def _cut(data: _Message, piece: int, pieces: int) -> _Message:
    """Return one of several pieces of a message, about equally long."""
    size = len(data)
    step = size if pieces == 1 else -(-size // (pieces * ALIGNMENT)) * ALIGNMENT
    return data[piece * step : (piece + 1) * step]


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (offset, size) of messages in a row."""
    return [
        (end - size, size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)
    ]


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes. Raises OSError if they do not come."""
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the process at the other end has ended")
    return data
