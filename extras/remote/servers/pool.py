"""The servers of a run: which have the newest weights, which are lost, and which is free."""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from hybridengine.engine.interface import InFlightUpdate
from hybridengine.remote.servers.client import ServerLostError, ServerWeights, VllmServer
from hybridengine.remote.sync.records import EngineInfo, SyncState, SyncStore
from hybridengine.run.errors import RolloutError, UserError, print_note
from hybridengine.sync.weight_target import EngineState

CHECK_S = 2.0  # between two health checks of a server
REPORT_S = 15.0  # between two notes about servers that have not come yet
_MAX_MISSES = 3  # failed health checks in a row, until a server is lost

T = TypeVar("T")


class NoServerError(RuntimeError):
    """No server has the newest weights: all are lost, or are back without weights."""


@dataclass
class _Member:
    """A server and its state.

    joined: it takes part in syncs.
    version: of its weights, None if unknown.
    running: sequences.
    reason: why it is lost.
    """

    server: VllmServer
    joined: bool = False
    version: int | None = None
    running: int = 0
    reason: str = "it has not answered yet"


class ServerPool:
    """Servers that generate with the same weights.

    join: makes a server that runs take part in weight syncs; called again for one that is back.
    max_sequences: that one server gets at a time.
    timeout_s: how long the servers may take to start.

    A thread for each server checks its health. A lost one is reported by a warning, gets no
    requests, and joins again when it answers. Raises RolloutError where a server cannot be used or
    does not come in time.

    Attributes:
        in_flight: how servers take weights while requests run; None: when they are finished.
    """

    in_flight: InFlightUpdate | None = None

    def __init__(
        self,
        servers: Sequence[VllmServer],
        join: Callable[[VllmServer], None],
        *,
        max_sequences: int,
        timeout_s: float,
    ) -> None:
        self._members = [_Member(server) for server in servers]
        self._join, self.max_sequences = join, max_sequences
        self._run = uuid.uuid4().hex  # no other run labels weights like this one
        self._newest: int | None = None
        self._versions = dict[str, int]()  # by label, of all updates
        self._updating = False
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._failure: UserError | None = None
        self._started = False
        for member in self._members:
            threading.Thread(target=self._supervise, args=(member,), daemon=True).start()
        self._wait_for_all(timeout_s)
        self._started = True

    def _wait_for_all(self, timeout_s: float) -> None:
        """Wait until all servers have joined; a note tells from time to time which have not."""
        started = reported = time.monotonic()
        with self._changed:
            while missing := [m for m in self._members if not m.joined]:
                now = time.monotonic()
                reasons = "; ".join(f"{m.server}: {m.reason}" for m in missing)
                if self._failure is not None or now - started > timeout_s:
                    self._closed.set()
                    raise self._failure or RolloutError(
                        f"not all servers have come within {timeout_s:g} s ({reasons}); start them "
                        "before the run, raise trainer.timeout_s, and on a CPU use --enforce-eager"
                    )
                if now - reported > REPORT_S:
                    reported = now
                    print_note(
                        f"waiting for {len(missing)} of {len(self._members)} servers since "
                        f"{now - started:.0f} s, at most {timeout_s:g} s ({reasons})"
                    )
                self._changed.wait(0.1)

    # State

    @property
    def version(self) -> int | None:
        """The newest version, None where no server has it."""
        with self._changed:
            return self._newest if self._has_newest() else None

    @property
    def wants_weights(self) -> bool:
        """Whether all servers have lost their weights, and one is back to take new ones."""
        with self._changed:
            had = self._newest is not None
            return had and not self._has_newest() and any(m.joined for m in self._members)

    def joined(self) -> dict[int, str]:
        """Return, by number of each server, "" if it takes part in syncs, else why it does not."""
        with self._changed:
            return {m.server.index: "" if m.joined else m.reason for m in self._members}

    def _has_newest(self) -> bool:
        return any(m.version is not None and m.version == self._newest for m in self._members)

    # Weights

    def update(
        self, version: int, indices: Collection[int], on_lost: Callable[[int, str], None]
    ) -> None:
        """Let the servers with these numbers take part in a sync, all at once.

        on_lost: called with the number of a server that is lost meanwhile, and the reason.
        """
        label = f"{self._run}/{version}"
        keep_kv = None if self.in_flight is None else self.in_flight.keep_kv
        with self._changed:
            members = [m for m in self._members if m.joined and m.server.index in indices]
            self._versions[label] = version
            self._updating = True

        def update(member: _Member) -> None:
            member.version = None
            try:
                member.server.update(version, label, keep_kv)
                member.version = version
            except ServerLostError as error:
                self._lose(member, str(error))
                on_lost(member.server.index, str(error))

        try:
            with ThreadPoolExecutor(max(1, len(members)), "server-update") as threads:
                list(threads.map(update, members))
            self._newest = version
        finally:
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def weights(self) -> dict[str, ServerWeights]:
        """Return what the servers with the newest version hold, by their names.

        A server that does not answer is lost.
        """
        with self._changed:
            version = self._newest
            members = [m for m in self._members if None is not m.version == version]
        held = dict[str, ServerWeights]()

        def read(member: _Member) -> None:
            with self._losing(member):
                held[str(member.server)] = member.server.weights()

        with ThreadPoolExecutor(max(1, len(members)), "server-weights") as threads:
            list(threads.map(read, members))
        return dict(sorted(held.items()))  # answers come in any order

    # Requests

    def call(self, request: Callable[[VllmServer, Mapping[str, int]], T], num_sequences: int) -> T:
        """Return request(server, weight versions by their labels) of the one with the fewest to do.

        num_sequences: that the request generates. It waits for an update that runs, and is repeated
        on another server where one is lost. Raises NoServerError if there is none.
        """
        while True:
            member = self._acquire(num_sequences)
            try:
                with self._losing(member):
                    return request(member.server, self._versions)
            finally:
                with self._changed:
                    member.running -= num_sequences
                    self._changed.notify_all()

    def _acquire(self, num_sequences: int) -> _Member:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: not self._updating or self._closed.is_set())
                version = self._newest
                ready = [m for m in self._members if m.version == version]
                if version is None or not ready or self._closed.is_set():
                    reasons = "; ".join(f"{m.server}: {m.reason}" for m in self._members)
                    raise NoServerError(f"no server has weight version {version} ({reasons})")
                member = min(ready, key=lambda m: m.running)
                if not member.running or member.running + num_sequences <= self.max_sequences:
                    member.running += num_sequences
                    return member
                self._changed.wait()

    # Lost servers

    @contextmanager
    def _losing(self, member: _Member) -> Iterator[None]:
        try:
            yield
        except ServerLostError as error:
            self._lose(member, str(error))

    def _lose(self, member: _Member, reason: str) -> None:
        with self._changed:
            if not member.joined or self._closed.is_set():
                return
            member.joined, member.version, member.reason = False, None, reason
            self._changed.notify_all()
        warnings.warn(
            f"{reason}. It gets no requests until it answers again and has new weights.",
            RuntimeWarning,
            stacklevel=2,
        )
        member.server.abort()

    def _supervise(self, member: _Member) -> None:
        """Check the health of one server, and let it join when it is (back) there."""
        misses = 0
        while True:
            try:
                member.server.check_health()
                misses = 0
                if not member.joined:
                    self._join(member.server)
                    with self._changed:
                        member.joined, member.reason = True, "it has no weights yet"
                        self._changed.notify_all()
            except ServerLostError as error:
                misses += 1
                if not member.joined:
                    member.reason = str(error)
                elif misses >= _MAX_MISSES:
                    self._lose(member, str(error))
            except UserError as error:
                with self._changed:
                    is_new = str(error) != member.reason
                    self._failure, member.reason = error, str(error)
                    self._changed.notify_all()
                if is_new and self._started:
                    warnings.warn(f"{error}. It gets no requests.", RuntimeWarning, stacklevel=2)
            if self._closed.wait(CHECK_S):
                return

    def close(self) -> None:
        """Let the servers go; requests that run are ended."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        for member in self._members:
            member.server.abort()
            if member.joined:
                with suppress(ServerLostError, RolloutError):
                    member.server.leave()


class ServerReceiver:
    """Looks for syncs to the servers of `pool`; the workers of the servers receive the weights.

    store: the sender's. The trainers are told of lost servers, so that they do not wait for them.
    """

    def __init__(self, pool: ServerPool, store: dist.Store) -> None:
        self._pool, self._store = pool, SyncStore(store)
        self._last = 0  # number of the last sync
        self.engine_state: EngineState | None = None  # of a `WeightReceiver`; servers have theirs

    def pending(self) -> bool:
        """Return whether a sync waits for one of the servers."""
        state = self._open_sync()
        return state is not None and bool(self._invited(state))

    def receive(self) -> None:
        """Update the servers that a sync waits for; does nothing if there is none."""
        if (state := self._open_sync()) is None or not (infos := self._invited(state)):
            return
        self._last = state.number

        def tell(index: int, reason: str) -> None:
            self._store.set(f"{state.number}/state/{infos[index].key}", reason)

        self._pool.update(state.version, infos, tell)

    def _open_sync(self) -> SyncState | None:
        state = self._store.get_sync()
        return state if state and state.is_open and state.number != self._last else None

    def _invited(self, state: SyncState) -> dict[int, EngineInfo]:
        """Return the own servers, as they are now, that take part; tell of those that are lost."""
        infos = {}
        for index, reason in self._pool.joined().items():
            info: EngineInfo | None = self._store.get(f"engine/{index}", EngineInfo)
            if info is None or state.invited.get(index) != info.incarnation:
                continue
            if reason:
                self._store.set(f"{state.number}/state/{info.key}", reason)
            else:
                infos[index] = info
        return infos
