"""Transports between trainers and engines that are in different worlds, over a `Link`.

For the plan each tensor-parallel rank of the engines is one rank that holds nothing, numbered after
the trainers, which need nothing. The link divides what is sent to it among the members that hold
it. Every message has a checksum of its sender, and all are compared at the end.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.kernels import bit_checksum
from hybridengine.remote.sync.link import GroupLink, Link, LinkError, Place
from hybridengine.remote.sync.memory_link import MemoryLink
from hybridengine.remote.sync.records import EngineInfo, SyncStore, Transfer
from hybridengine.run.failures import CollectiveGuard, DeviceProgress, Guard
from hybridengine.run.messages import all_gather_values
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import ShardSpec
from hybridengine.sync.tables import Exchange
from hybridengine.sync.transport import (
    Gather,
    Pack,
    Pending,
    Sizes,
    Transport,
)

_CHECKSUM_BYTES = 8


class TrainersEnd(Transport):
    """The sending end, on a trainer.

    guard: the guard of the trainers' own collectives.
    When a connection has failed, messages are no longer sent, so that the trainers stay together,
    and `failure` is set: the engines tell whether they have committed.
    """

    failure: LinkError | None = None
    _link: Link | None = None

    def __init__(self, guard: Guard, plan: ReshardPlan, device: torch.device, merges: bool) -> None:
        self.guard, self._device, self._merges = guard, device, merges
        self._rank, self._num_trainers = dist.get_rank(), dist.get_world_size()
        self.receivers = range(self._num_trainers, plan.world_size)

    @property
    def sizes(self) -> list[np.ndarray]:
        """Bytes from each trainer to each TP rank, int64 [trainers, tp_size], of each bucket."""
        return list(self._sizes.values())

    def plan_for(self, exchanges: Sequence[Exchange]) -> None:
        """Learn the sizes of the trainers' messages of these buckets. Collective over them."""
        own = np.array([e.bytes_sent[self._num_trainers :] for e in exchanges], np.int64)
        own = own.reshape(len(exchanges), -1)
        sizes = _of_all_trainers(own)  # [trainers, buckets, tp_size]
        self._sizes = {id(e): sizes[:, i] for i, e in enumerate(exchanges)}
        self._largest = 0 if self._merges else int(own.sum(1).max(initial=0))

    def begin(self, link: Link | None, progress: DeviceProgress, failure: LinkError | None) -> None:
        """Use `link` from now on, None if it could not be made because of `failure`."""
        self.bytes_received = self.bytes_sent = 0
        self._link, self.progress, self.failure = link, progress, failure
        self._checksums: list[list[torch.Tensor]] = []  # of each message, by tensor-parallel rank

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    @property
    def _is_out(self) -> bool:
        """Whether a connection has failed, and the trainers do not need this rank to go on."""
        return self._link is None or (self.failure is not None and not self._link.relays)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            yield
        except LinkError as error:
            self.failure = error

    def post_bucket(self, where: str, exchange: Exchange, pack: Pack) -> Pending:
        if self._is_out:
            return Pending(list)
        sizes = self._sizes[id(exchange)]
        with self._sending():
            with self.link.collective(f"sending {where}"):
                outgoing = self.link.buffer(int(sizes[self._rank].sum()), self._largest)
            pack(outgoing)
            return self.send_parts(where, outgoing, sizes)
        return Pending(list)

    def post(
        self, where: str, outgoing: torch.Tensor | None, sent: Sizes, received: Sizes
    ) -> Pending:
        own = np.array(sent[self._num_trainers :], np.int64)
        with self.guard.collective(f"exchanging the sizes of {where}"):
            sizes = _of_all_trainers(own)
        assert outgoing is not None
        return self.send_parts(where, outgoing, sizes)

    def send_parts(self, where: str, outgoing: torch.Tensor, sizes: np.ndarray) -> Pending:
        """Send a message. sizes: from each trainer to each TP rank, int64 [trainers, tp_size]."""
        if self._is_out:
            return Pending(list)
        with self._sending():
            if self.link.checks:
                parts = outgoing.split(sizes[self._rank].tolist())
                self._checksums.append([bit_checksum(part) for part in parts])
            with self.link.collective(f"sending {where}"):
                work = self.link.send(outgoing, sizes)
            self.bytes_sent += outgoing.nbytes
            return Pending(partial(self._wait, f"sending {where}", work))
        return Pending(list)

    def _wait(self, phase: str, work: dist.Work | None) -> list[torch.Tensor]:
        with self._sending():
            if work is not None:
                with self.link.collective(phase):
                    work.wait()
            self.progress.mark(phase)
        return []

    def move_full(self, name: str, spec: ShardSpec, gather: Gather) -> None:
        """Each trainer sends a part of the parameter to every tensor-parallel rank."""
        data = gather().contiguous().view(-1).view(torch.uint8)
        parts = _parts_of_full(spec, self._num_trainers)
        tp_size = len(self.receivers)
        own = data.split(parts)[self._rank].repeat(tp_size)
        sizes = np.repeat(np.array(parts)[:, None], tp_size, 1)
        self.send_parts(f"{name!r} in full", own, sizes).wait()

    def check(self, problem: Exception | None) -> None:
        """Do nothing: the engines tell what was wrong."""

    def end(self) -> None:
        """Send the checksums of all messages, to each tensor-parallel rank those of its own."""
        if not self.failure and self._checksums:
            sent = self.bytes_sent
            by_tp_rank = [torch.stack(column) for column in zip(*self._checksums, strict=True)]
            each = [[len(self._checksums) * _CHECKSUM_BYTES] * len(by_tp_rank)]
            outgoing = torch.cat(by_tp_rank).view(torch.uint8)
            sizes = np.array(each * self._num_trainers)
            self.send_parts("the checksums", outgoing, sizes).wait()
            self.bytes_sent = sent
        if not self.failure:  # else gloo's threads may still read
            with self._sending(), self.link.collective("waiting until everything was read"):
                self.link.end()


def _of_all_trainers(own: np.ndarray) -> np.ndarray:
    """Return the numbers of every trainer, equally many; collective over them."""
    gathered = all_gather_values(torch.from_numpy(own), torch.Tensor)
    return torch.stack(gathered).numpy()


def _parts_of_full(spec: ShardSpec, num_trainers: int) -> list[int]:
    """Return how many bytes of a full parameter each trainer sends."""
    size = math.prod(spec.shape) * spec.dtype.itemsize
    return [size * (r + 1) // num_trainers - size * r // num_trainers for r in range(num_trainers)]


class EnginesEnd(Transport):
    """The receiving end, on an engine rank. The first `num_trainers` ranks of the plan send."""

    def __init__(self, plan: ReshardPlan, num_trainers: int) -> None:
        self._num_trainers, self._staging_bytes = num_trainers, plan.staging_bytes
        self.receivers = range(num_trainers, plan.world_size)

    def begin(self, link: Link, progress: DeviceProgress) -> None:
        self.bytes_received = self.bytes_sent = 0
        self.guard = self.link = link
        self.progress = progress
        self._checksums: list[torch.Tensor] = []  # of each message, by trainer
        self._messages: list[str] = []

    def post_bucket(self, where: str, exchange: Exchange, pack: Pack) -> Pending:
        return self.receive_parts(where, exchange.bytes_received, self._staging_bytes)

    def post(
        self, where: str, outgoing: torch.Tensor | None, sent: Sizes, received: Sizes
    ) -> Pending:
        return self.receive_parts(where, received)

    def receive_parts(self, where: str, sizes: Sequence[int], largest: int = 0) -> Pending:
        sent, phase = np.array(sizes[: self._num_trainers], np.int64), f"receiving {where}"
        with self.link.collective(phase):
            pending = self.link.receive(sent, largest)

        def wait() -> list[torch.Tensor]:
            """Return what each trainer has sent, uint8; remember the checksums."""
            with self.link.collective(phase):
                incoming = pending.wait()
            self.progress.mark(phase)
            self.bytes_received += pending.received
            self.bytes_sent += pending.sent
            self.remember(where, incoming)
            return incoming

        return Pending(wait, lambda: pending.release())

    def remember(self, where: str, parts: Sequence[torch.Tensor]) -> None:
        if self.link.checks:
            self._checksums.append(torch.stack([bit_checksum(part) for part in parts]))
            self._messages.append(where)

    def move_full(self, name: str, spec: ShardSpec, gather: Gather) -> torch.Tensor:
        parts = _parts_of_full(spec, self._num_trainers)
        full = torch.cat(self.receive_parts(f"{name!r} in full", parts).wait())
        return full.view(spec.dtype).view(spec.shape)

    def end(self) -> None:
        """Raise LinkError, and warn, if what has arrived differs from what the trainers sent."""
        self.link.end()
        if not self._checksums:
            return
        moved = self.bytes_received, self.bytes_sent
        actual = torch.stack(self._checksums, 1)  # [trainers, messages]
        messages, size = list(self._messages), actual[0].nbytes
        heard = self.receive_parts("the checksums", [size] * self._num_trainers).wait()
        self.bytes_received, self.bytes_sent = moved
        expected = torch.cat(heard).view(torch.int64).view_as(actual)
        self.progress.wait()
        if differ := (actual != expected).nonzero().tolist():
            trainer, message = differ[0]
            damage = f"{messages[message]} from trainer rank {trainer} arrived damaged"
            warnings.warn(
                f"{damage}: its checksum differs. The transfer is repeated.",
                RuntimeWarning,
                stacklevel=2,
            )
            raise LinkError(damage)


def open_link(
    store: SyncStore,
    transfer: Transfer,
    trainers: Sequence[str],
    infos: Mapping[int, EngineInfo],
    rank: int,
    device: torch.device,
    timeout_s: float,
    guard: CollectiveGuard,
    buckets: Iterable[np.ndarray] = (),
) -> Link:
    """Connect a rank to the others of a transfer.

    trainers: their processes, as `this_process`.
    infos: of the engines of the members, by number.
    rank: among the trainers, then the members.
    guard: of the trainers' collectives, or of the engine's.
    buckets: see `MemoryLink`.
    """
    members = transfer.members
    names = [f"trainer rank {r}" for r in range(len(trainers))]
    names += [f"rank {m.rank} of engine {m.engine}" for m in members]
    processes = [*trainers, *(infos[m.engine].processes[m.rank] for m in members)]
    peers = dict(zip(names, processes, strict=True))
    del peers[names[rank]]
    place, number = Place(rank, len(trainers), members, peers, device, timeout_s), transfer.groups
    link: Link
    if transfer.feeders is None:
        link = GroupLink(place, store, number)
    else:
        link = MemoryLink(place, store, number, transfer.feeders, guard, buckets)
    link.activity = guard.activity
    return link
