"""Process groups between trainer ranks and engine ranks, and how bytes are divided among replicas.

Trainers and engines have worlds of their own. These groups are made from the store alone and belong
to no world: one of all trainers and members, and for each tensor-parallel rank one of the members
that hold the same weights, its replicas. What R replicas need crosses from the trainers once: each
receives 1/R of it, and then the replicas gather it among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.reshard.disaggregated.records import Member, SyncStore
from hybridengine.runtime.failures import (
    CollectiveError,
    is_collective_error,
    one_line,
    process_state,
)

ALIGNMENT = 16  # bytes, of the parts of the replicas


class LinkError(CollectiveError):
    """A connection between trainers and engines failed; the transfer can be repeated."""


class Division(NamedTuple):
    """How the bytes that the trainers send to each tensor-parallel rank are divided.

    counts: from each trainer to each replica, int64 [trainers, R]. part: bytes that a replica holds
    of the gathered buffer, of which the last may be padding.
    """

    counts: np.ndarray
    part: int


def divide(sent: np.ndarray, replicas: int) -> Division:
    """Divide the concatenation of what N trainers send evenly among replicas.

    sent: bytes from each trainer, int64 [N].

    Example:
        >>> divide(np.array([20, 28]), 2)
        Division(counts=array([[20,  0],
               [12, 16]]), part=32)
    """
    total = int(sent.sum())
    part = -(-total // (replicas * ALIGNMENT)) * ALIGNMENT
    stops = np.cumsum(sent)[:, None]
    low = np.arange(replicas) * part
    counts = np.minimum(stops, low + part) - np.maximum(stops - sent[:, None], low)
    return Division(np.maximum(counts, 0), part)


class Link:
    """The process groups of one set of members, as one rank uses them.

    rank: among the trainers, then the members. name: of this rank, for messages. members: sorted.
    peers: name → process of every other rank, as `this_process`. device: of the weights.
    everybody: also make a group of all members, for weights that all of them need in full.

    Raises LinkError if a rank does not come within `timeout_s`.
    """

    def __init__(
        self,
        store: SyncStore,
        number: int,
        rank: int,
        num_trainers: int,
        members: Sequence[Member],
        peers: Mapping[str, str],
        device: torch.device,
        timeout_s: float,
        everybody: bool,
    ) -> None:
        self.rank, self.num_trainers, self.members = rank, num_trainers, list(members)
        self.device, self.timeout_s = device, timeout_s
        self.phase = "connecting"
        self._peers = peers
        self.replicas: dict[int, list[int]] = {}  # TP rank → ranks of the members
        for i, member in enumerate(self.members, num_trainers):
            self.replicas.setdefault(member.tp_rank, []).append(i)
        self._groups: dict[str, Any] = {}  # torch's stubs know little of a backend
        ranks_of = {"link": list(range(num_trainers + len(self.members)))}
        if rank >= num_trainers:
            tp_rank = self.members[rank - num_trainers].tp_rank
            ranks_of[f"replicas/{tp_rank}"] = self.own_replicas
            if everybody:
                ranks_of["members"] = ranks_of["link"][num_trainers:]
        timeout = timedelta(seconds=timeout_s)
        for name, ranks in ranks_of.items():
            with self.collective(f"connecting ({name})"):
                make, place = _backend(device), (ranks.index(rank), len(ranks))
                if len(ranks) > 1:
                    group = make(store.for_group(number, name), *place, timeout)
                    self._groups[name.partition("/")[0]] = group

    @property
    def members_by_tp_rank(self) -> list[list[int]]:
        """Ranks of the members of each tensor-parallel rank; in this order they are sent to."""
        return [ranks for _, ranks in sorted(self.replicas.items())]

    @property
    def own_replicas(self) -> list[int]:
        """Ranks of the members that hold the same weights as this one."""
        return self.replicas[self.members[self.rank - self.num_trainers].tp_rank]

    @contextmanager
    def collective(self, phase: str) -> Iterator[None]:
        """Raise LinkError if what runs inside fails because of another rank."""
        self.phase = phase
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LinkError) or not is_collective_error(error):
                raise
            cause = self.lost_rank() or "a connection failed"
            raise LinkError(f"while {phase}: {cause} ({one_line(error)})") from error

    def lost_rank(self) -> str | None:
        """Return which other rank's process, on this machine, has ended or is stopped."""
        for name, process in self._peers.items():
            if (state := process_state(process)) in ("ended", "stopped"):
                return f"{name} has ended" if state == "ended" else f"{name} is stopped (SIGSTOP)"
        return None

    def send(self, outgoing: torch.Tensor, counts: Sequence[int]) -> dist.Work:
        """Start to send bytes, `counts` to each member in order. On a trainer."""
        sent = [*[0] * self.num_trainers, *counts]
        return self._exchange(self._nothing(), outgoing, [0] * len(sent), sent)

    def receive(self, received: torch.Tensor, counts: Sequence[int]) -> dist.Work:
        """Start to receive bytes, `counts` from each trainer in order. On a member."""
        arriving = [*counts, *[0] * len(self.members)]
        return self._exchange(received, self._nothing(), arriving, [0] * len(arriving))

    def _nothing(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    def _exchange(
        self, received: torch.Tensor, outgoing: torch.Tensor, arriving: list[int], sent: list[int]
    ) -> dist.Work:
        group = self._groups["link"]
        return group.alltoall_base(
            received.view(torch.uint8), outgoing.view(torch.uint8), arriving, sent
        )

    def gather(self, buffer: torch.Tensor, among: str = "replicas") -> None:
        """Fill a buffer of equal parts from the members that hold one each; in place.

        among: "replicas", or "members" for all.
        """
        group = self._groups.get(among)
        if group is not None and buffer.numel():
            own = buffer.chunk(group.size())[group.rank()]
            group._allgather_base(buffer, own).wait()

    def close(self) -> None:
        """End the connections, so that no other rank waits for this one."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()


def _backend(device: torch.device) -> Callable[..., Any]:
    return dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
