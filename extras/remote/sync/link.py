"""Connections between trainer ranks and engine ranks, which have worlds of their own.

The process groups of `GroupLink` are made from the store alone and belong to no world: one of all
trainers and members, and for each tensor-parallel rank one of the members that hold the same
weights, its replicas. What R replicas need crosses from the trainers once: each receives 1/R of it,
and then the replicas gather it among themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.remote.sync.records import EngineInfo, Member, SyncStore
from hybridengine.run.activity import Activity, machine_of, process_state
from hybridengine.run.failures import CollectiveError, is_collective_error, one_line
from hybridengine.sync.tables import ALIGNMENT
from hybridengine.sync.transport import Buffers, Pending

_OF_A_SOCKET = ConnectionError, TimeoutError  # other OSErrors are of this process: no memory, say


class LinkError(CollectiveError):
    """A connection between trainers and engines failed; the transfer can be repeated."""


def divide(sent: np.ndarray, replicas: int) -> tuple[np.ndarray, int]:
    """Divide the concatenation of what N trainers send evenly among replicas.

    sent: bytes from each trainer, int64 [N]. Returns the bytes from each trainer to each replica,
    int64 [N, replicas], and those that a replica holds of the gathered buffer, of which the last
    may be padding.

    Examples:
        >>> divide(np.array([20, 28]), 2)
        (array([[20,  0],
               [12, 16]]), 32)
    """
    total = int(sent.sum())
    part = -(-total // (replicas * ALIGNMENT)) * ALIGNMENT
    stops = np.cumsum(sent)[:, None]
    low = np.arange(replicas) * part
    counts = np.minimum(stops, low + part) - np.maximum(stops - sent[:, None], low)
    return np.maximum(counts, 0), part


def feeders_of(
    trainers: Sequence[str], devices: Sequence[str], infos: Sequence[EngineInfo]
) -> dict[Member, list[int]] | None:
    """Return which trainers write what each member reads; None where one has none on its device.

    trainers: processes, as `this_process`.
    devices: the devices of the trainers, as `device_id` names them.
    """
    places = [(machine_of(p), d) for p, d in zip(trainers, devices, strict=True)]
    on_one_machine = len(set(places)) == 1 and set(devices) == {"cpu"}
    count: dict[tuple[str, str], int] = {}
    feeders: dict[Member, list[int]] = {}
    for info in infos:
        for member, process, device in zip(
            info.members(), info.processes, info.devices, strict=True
        ):
            place = machine_of(process), device
            here = [rank for rank, other in enumerate(places) if other == place]
            if not here:
                return None
            count[place] = count.get(place, -1) + 1
            feeders[member] = here if on_one_machine else [here[count[place] % len(here)]]
    return feeders


class Place(NamedTuple):
    """Where a rank is in a link.

    rank: among the trainers, then the members.
    members: sorted.
    peers: name → process of every other rank, as `this_process`.
    device: the device that holds the weights.
    """

    rank: int
    num_trainers: int
    members: Sequence[Member]
    peers: Mapping[str, str]
    device: torch.device
    timeout_s: float


class Link(ABC):
    """The connections of one set of members, as one rank uses them.

    checks: whether messages have checksums.
    is_kept: for the next sync.
    relays: whether a trainer takes part in messages although its own connections have failed.

    Attributes:
        replicas: tensor-parallel rank → ranks of its members.
        phase: what this rank is doing, for messages.
        failure: the error of a connection that a trainer could not make.
        activity: the record of what this process is doing, once the link is made.
    """

    checks = is_kept = True
    relays = False
    failure: LinkError | None = None
    activity: Activity | None = None

    def __init__(self, place: Place) -> None:
        self.rank, self.num_trainers, members, self._peers, self.device, self.timeout_s = place
        self.members, self.phase = list(members), "connecting"
        self.replicas: dict[int, list[int]] = {}
        for i, member in enumerate(self.members, self.num_trainers):
            self.replicas.setdefault(member.tp_rank, []).append(i)

    @contextmanager
    def collective(self, phase: str, timeout_s: float | None = None) -> Iterator[None]:
        """Raise LinkError if what runs inside fails because of another rank.

        An error of this rank's own is raised as it is.
        """
        self.phase = phase
        activity = self.activity
        try:
            with (
                activity.in_collective(phase, "transfer", self._peers)
                if activity
                else nullcontext()
            ):
                yield
        except (RuntimeError, OSError) as error:
            of_a_peer = isinstance(error, _OF_A_SOCKET) or is_collective_error(error)
            if isinstance(error, CollectiveError) or not of_a_peer:
                raise
            cause = self.lost_rank() or "a connection failed"
            raise LinkError(f"while {phase}: {cause} ({one_line(error)})") from error

    def lost_rank(self) -> str | None:
        """Return which other rank's process, on this machine, has ended or is stopped."""
        for name, process in self._peers.items():
            if (state := process_state(process)) in ("ended", "stopped"):
                return f"{name} has ended" if state == "ended" else f"{name} is stopped (SIGSTOP)"
        return None

    # On a trainer

    def buffer(self, size: int, largest: int) -> torch.Tensor:
        """Return memory for the next message, uint8 [size]; valid until two others were requested.

        largest: the size of the largest bucket; 0: each message gets a buffer of its own size.
        """
        return self.buffers.next(size, largest)

    @abstractmethod
    def send(self, outgoing: torch.Tensor, sizes: np.ndarray) -> dist.Work | None:
        """Start to send a message, in the order of the tensor-parallel ranks.

        sizes: bytes from each trainer to each of these, int64 [trainers, tp_size].
        """

    # On a member

    @abstractmethod
    def receive(self, sizes: np.ndarray, largest: int) -> Pending:
        """Start to receive a message; return what waits for the part of each trainer.

        sizes: the bytes from each trainer.
        largest: as of `buffer` for a bucket, whose memory is used again; 0 for others.
        """

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.device)

    def end(self) -> None:
        """All messages of a transfer have arrived: free the memory."""
        self.buffers.end()

    @abstractmethod
    def close(self) -> None:
        """End the connections, so that no other rank waits for this one."""


class GroupLink(Link):
    """Process groups: gloo, or NCCL.

    Raises LinkError if a rank does not come within `timeout_s`.
    """

    def __init__(self, place: Place, store: SyncStore, number: int) -> None:
        super().__init__(place)
        self._groups: dict[str, Any] = {}  # torch's stubs know little of a backend
        rank, num_trainers = self.rank, self.num_trainers
        ranks_of = {"link": list(range(num_trainers + len(self.members)))}
        if rank >= num_trainers:
            tp_rank = self.members[rank - num_trainers].tp_rank
            ranks_of[f"replicas/{tp_rank}"] = self._own_replicas
        timeout = timedelta(seconds=self.timeout_s)
        make: Any = dist.ProcessGroupGloo
        if self.device.type == "cuda":
            make = dist.ProcessGroupNCCL
        for name, ranks in ranks_of.items():
            with self.collective(f"connecting ({name})"):
                if len(ranks) > 1:
                    where = store.substore(f"group/{number}/{name}")
                    group = make(where, ranks.index(rank), len(ranks), timeout)
                    self._groups[name.partition("/")[0]] = group

    @property
    def _own_replicas(self) -> list[int]:
        """Ranks of the members that hold the same weights as this one."""
        return self.replicas[self.members[self.rank - self.num_trainers].tp_rank]

    def send(self, outgoing: torch.Tensor, sizes: np.ndarray) -> dist.Work:
        counts: list[int] = []
        for column, (_, members) in zip(sizes.T, sorted(self.replicas.items()), strict=True):
            counts += divide(column, len(members))[0][self.rank].tolist()
        sent = [*[0] * self.num_trainers, *counts]
        return self._groups["link"].alltoall_base(self._bytes(0), outgoing, [0] * len(sent), sent)

    def receive(self, sizes: np.ndarray, largest: int) -> Pending:
        """Receive this member's part at once; the message waits for those of other replicas."""
        replicas = self._own_replicas
        counts, part = divide(sizes, len(replicas))
        index, size = replicas.index(self.rank), part * len(replicas)
        most = largest and largest + ALIGNMENT * len(replicas)
        buffer = self.buffers.next(size, most) if most else self._bytes(size)
        own = buffer[index * part :][: counts[:, index].sum()]
        group, among = self._groups["link"], self._groups.get("replicas")
        arriving = [*counts[:, index].tolist(), *[0] * len(self.members)]
        work = group.alltoall_base(own, self._bytes(0), arriving, [0] * len(arriving))

        def wait() -> list[torch.Tensor]:
            work.wait()
            if among is not None and size:
                among._allgather_base(buffer, buffer.chunk(len(replicas))[index]).wait()
            return list(buffer[: sizes.sum()].split(sizes.tolist()))

        sent = (len(replicas) - 1) * part
        return Pending(wait, received=own.nbytes + sent, sent=sent)

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
