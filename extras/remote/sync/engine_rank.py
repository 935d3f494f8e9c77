"""One rank of an engine in the protocol of a sync: what it reports and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from hybridengine.remote.messages import from_rank0
from hybridengine.remote.sync.records import (
    EngineInfo,
    Holding,
    SyncState,
    SyncStore,
    Transfer,
    device_id,
)
from hybridengine.run.activity import process_state, this_process
from hybridengine.run.failures import CollectiveError, CollectiveGuard
from hybridengine.run.messages import all_gather_values, run_on_all_ranks, wait_for
from hybridengine.sync.buckets import default_bucket_bytes
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.weight_target import RankFailedError, ReshardError, WeightTarget

T = TypeVar("T")
_COORDINATOR = "trainer rank 0"


class EngineRank:
    """This process as a rank of engine number `index`. Making it joins; collective.

    Attributes:
        device: the device that holds the weights.
        guard: the guard of the collectives of the engine's ranks.
        activity: the record of what this rank is doing, for `doctor --attach`.
        name: the name of this rank in messages.
        info: what the engine has reported to the trainers.
    """

    def __init__(
        self, engine: WeightTarget, store: SyncStore, index: int, timeout_s: float
    ) -> None:
        has_world = dist.is_initialized()
        self.rank = dist.get_rank() if has_world else 0
        self.world_size = dist.get_world_size() if has_world else 1
        self._store, self._index, self._timeout_s = store, index, timeout_s
        self.name = f"rank {self.rank} of engine {index}"
        self.guard = CollectiveGuard(self.rank, self.world_size, name=self.name)
        self.activity = self.guard.activity
        self.activity.join(store.world())
        self.phase = "joining"
        self._known_trainers: tuple[int, list[str]] = (0, [])
        self.last = 0  # number of the last sync that it took part in
        self.device = next((t.device for t in engine.weights().values()), torch.device("cpu"))
        self.info = self._join(engine)

    @property
    def phase(self) -> str:
        """What this rank is doing, for messages."""
        return self.guard.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.guard.phase = phase

    # Engine's world

    def all_gather(self, value: T, expected: Any, timeout_s: float | None = None) -> list[T]:
        """Return the value of every rank of the engine; expected: its type.

        timeout_s: see `CollectiveGuard.collective`.
        """
        if self.world_size == 1:
            return [value]
        with self._collective(timeout_s):
            return all_gather_values(value, expected)

    @contextmanager
    def _collective(self, timeout_s: float | None = None) -> Iterator[None]:
        try:
            with self.guard.collective(self.phase, timeout_s):
                yield
        except CollectiveError as error:
            raise RankFailedError(f"{self.name}: {error}") from error

    def on_rank0(self, fn: Callable[[], T], expected: Any, timeout_s: float | None = None) -> T:
        """Return on every rank of the engine what `fn` returns on rank 0, or raise its error.

        expected, timeout_s: see `all_gather`.
        """
        if self.world_size == 1:
            return fn()
        with self._collective(timeout_s):
            return from_rank0(fn, expected, ReshardError)

    def on_all_ranks(
        self, fn: Callable[[], T], error_type: type[Exception], timeout_s: float | None = None
    ) -> T:
        """Return `fn()`; if it fails on a rank of the engine, raise on all.

        timeout_s: see `CollectiveGuard`.
        """
        if self.world_size == 1:
            return fn()
        with self._collective(timeout_s):
            return run_on_all_ranks(fn, error_type)

    def _join(self, engine: WeightTarget) -> EngineInfo:
        digest, bucket_bytes = engine.layout.digest(), default_bucket_bytes(self.device)
        if not self._store.has(f"layout/{digest}"):
            self._store.set(f"layout/{digest}", engine.layout)
        count = f"engine/{self._index}/incarnations"
        incarnation = self.on_rank0(lambda: self._store.next_number(count), int)
        own = this_process(), engine.tp_rank, digest, bucket_bytes, device_id(self.device)
        ranks = self.all_gather(own, tuple[str, int, str, int, str])
        processes, tp_ranks, layouts, sizes, devices = zip(*ranks, strict=True)
        info = EngineInfo(
            self._index,
            incarnation,
            processes,
            tp_ranks,
            layouts,
            frozenset(engine.optional_parameters),
            dict(engine.model_config),
            self.device.type,
            devices,
            min(sizes),
        )
        odd = {
            tp for tp, d in zip(tp_ranks, layouts, strict=True) if info.layout_of_tp_rank[tp] != d
        }
        if odd or sorted(info.layout_of_tp_rank) != list(range(max(tp_ranks) + 1)):
            raise LayoutError(
                f"engine {self._index} consists of TP ranks {list(tp_ranks)}: none may be missing, "
                "and the weights of equal ones must be laid out alike"
            )
        if self.rank == 0:
            self._store.set(f"engine/{self._index}", info)
        return info

    # Syncs

    def invitation(self) -> SyncState | None:
        """Return the sync that waits for this engine; a dropped engine shows that it is back."""
        state = self._store.get_sync()
        if state is None or (state.number == self.last and self.is_invited(state)):
            return None
        if self.is_invited(state) and state.is_open:
            return state
        if state.number:
            self._store.set(f"engine/{self._index}/back", (self.info.incarnation, state.number))
        return None

    def is_invited(self, state: SyncState) -> bool:
        return state.invited.get(self._index) == self.info.incarnation

    def _is_member(self, transfer: Transfer) -> bool:
        """Return whether an attempt is for this engine, not for those before or after it."""
        return any(member.engine == self._index for member in transfer.members)

    def wait_for_invitation(self) -> SyncState:
        """Return the sync that waits for this engine, once one does."""
        deadline = time.monotonic() + self._timeout_s

        def check() -> None:
            state = self._store.get_sync()
            if state is not None:
                self._check_trainers(state)
            if time.monotonic() > deadline:
                raise ReshardError(
                    f"{self.name}: no sync to this engine began within {self._timeout_s:g} s. "
                    "Call pending() to see whether one waits, or use a larger timeout_s"
                )

        with self.activity.waiting_for(_COORDINATOR):
            return wait_for(self.invitation, check)

    def _check_trainers(self, state: SyncState) -> None:
        """Raise RankFailedError if processes of trainers, on this machine, have ended."""
        processes = enumerate(self.trainers(state))
        ended = [f"rank {rank} has ended" for rank, p in processes if process_state(p) == "ended"]
        if ended:
            self._fail(f"trainer {', '.join(ended)}")

    def trainers(self, state: SyncState) -> list[str]:
        """Return the processes of the trainer ranks."""
        if self._known_trainers[0] != state.trainers:
            processes = self._store.get(f"trainers/{state.trainers}", list[str])
            self._known_trainers = state.trainers, processes
        return self._known_trainers[1]

    def _fail(self, cause: str) -> NoReturn:
        raise RankFailedError(f"{self.name} stopped while {self.phase}: {cause}")

    def current_sync(self) -> SyncState:
        """Return the state of the sync that this engine takes part in."""
        state = self._store.get_sync()
        assert state is not None
        return state

    def tell_ready(self, state: SyncState, attempt: int) -> None:
        """Tell the trainers that this rank waits for an attempt to begin."""
        self._store.mark(f"{state.number}/{attempt}/ready/{self.info.key}", self.rank)

    def wait_for_transfer(self, state: SyncState, attempt: int) -> tuple[SyncState, Transfer]:
        """Return once the trainers begin the attempt; raise if they go on without this engine."""
        phase, beat, heard = self.phase, -1, time.monotonic()

        def read() -> SyncState | None:
            now = self.current_sync()
            begun = now.number == state.number and now.attempt >= attempt and now.transfer
            return now if begun and self.is_invited(now) and self._is_member(begun) else None

        def check() -> None:
            nonlocal beat, heard
            now = self.current_sync()
            if now.number != state.number or not self.is_invited(now) or not now.is_open:
                if now.failure and now.number == state.number:
                    raise RankFailedError(f"{self.name}, while {phase}: {now.failure}")
                self._check_own_engine(state)  # it may be why the trainers go on without it
                raise ReshardError(
                    f"{self.name} was dropped from the sync to version {state.version} while "
                    f"{phase}; it takes part in the next one"
                )
            self._check_trainers(now)
            self._check_own_engine(state)
            if (count := self._store.get("beat", int) or 0) != beat:
                beat, heard = count, time.monotonic()
            if time.monotonic() - heard > self._timeout_s:
                stopped = process_state(self.trainers(state)[0]) == "stopped"
                why = " and is stopped (SIGSTOP)" if stopped else ""
                self._fail(f"trainer rank 0 was not heard of for {self._timeout_s:g} s{why}")

        with self.activity.waiting_for(_COORDINATOR):
            now = wait_for(read, check)
        assert now.transfer is not None
        return now, now.transfer

    def others_may_receive(self, state: SyncState) -> bool:
        """Return whether other ranks of this engine may have begun to receive in this sync."""
        if self.world_size == 1:
            return False
        try:
            now = self.current_sync()
        except RankFailedError:  # the store is gone
            return True
        return now.number != state.number or self._index in now.begun

    def _check_own_engine(self, state: SyncState) -> None:
        """Raise if another rank of this engine has failed or ended."""
        key = f"{state.number}/state/{self.info.key}"
        if isinstance(text := self._store.get(key, Holding | str), str):
            self._fail(f"its {text}")
        if (rank := next(self.info.ended_ranks(), None)) is not None:
            self._fail(f"its rank {rank} has ended")

    def tell_state(self, state: SyncState, has: Holding | str) -> None:
        """Tell the trainers what the engine has, or why it failed."""
        self._store.set(f"{state.number}/state/{self.info.key}", has)

    def tell_committed(self, state: SyncState) -> None:
        """Tell the trainers that the weight version of this rank has moved."""
        self._store.mark(f"{state.number}/committed/{self.info.key}", self.rank)

    def all_finish(self, state: SyncState, step: str) -> bool:
        """Return True when all ranks of the engine have finished a step of an attempt.

        False if another one asks for another attempt. Raises RankFailedError if another one fails.
        """
        done = f"{state.number}/{state.attempt}/{step}/{self.info.key}"
        again = f"{state.number}/{state.attempt + 1}/ready/{self.info.key}"
        deadline = time.monotonic() + self._timeout_s
        self._store.mark(done, self.rank)

        def read() -> bool | None:
            if self._store.all_marked(done, self.world_size):
                return True
            others = range(self.world_size)
            return False if any(self._store.is_marked(again, r) for r in others) else None

        def check() -> None:
            self._check_own_engine(state)
            if time.monotonic() > deadline:
                stopped = self.info.stopped_ranks()
                why = f": {stopped}" if stopped else ""
                self._fail(f"they have not finished within {self._timeout_s:g} s{why}")

        others = (f"rank {r} of engine {self._index}" for r in self.guard.others)
        with self.activity.waiting_for(*others):
            return wait_for(read, check)
