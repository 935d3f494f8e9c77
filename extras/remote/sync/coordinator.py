"""Trainer rank 0's view of the engines: who takes part in a sync, and who has committed it.

An engine is dropped when it comes late to a sync, when one of its processes ends, or when it fails.
It is invited again when it shows itself again, or when new processes have joined under its number.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hybridengine.remote.sync.records import (
    EngineInfo,
    Generations,
    Holding,
    SyncState,
    SyncStore,
    Transfer,
)
from hybridengine.run.activity import Activity
from hybridengine.run.messages import wait_for
from hybridengine.sync.checks import check_configuration, config_differences
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.weight_target import ReshardError

BEAT_S = 1.0
NOTHING = Generations(0, 0)
Absent = Callable[[int], str | None]  # engine → why it does not come to the sync, None if it may


@dataclass
class EngineStatus:
    """What the trainers know about one engine.

    state: "absent" until it joins, "live", or "dropped".
    version: the weight version that it committed last.
    reason: why it was dropped; "" if it was not.
    """

    state: str = "absent"
    version: int | None = None
    reason: str = ""
    incarnation: int = 0
    num_ranks: int = 0
    dropped_in: int = 0  # number of the sync
    has: Generations = NOTHING  # of the parameters


class Coordinator:
    """Invites the engines to a sync and waits for them.

    engines: the status of each engine, by its number.
    trainers: the processes of the trainer ranks, as `this_process` names them.
    timeout_s: how long an engine may take to come to a sync, and to finish one.
    activity: the record of what this process is doing; it waits for the engines.
    """

    def __init__(
        self,
        store: SyncStore,
        num_engines: int,
        trainers: Sequence[str],
        timeout_s: float,
        activity: Activity,
    ) -> None:
        self._store, self._timeout_s, self._activity = store, timeout_s, activity
        self.engines = {index: EngineStatus() for index in range(num_engines)}
        number = store.next_number("trainers")
        store.set(f"trainers/{number}", list(trainers))
        last = store.get_sync()  # of trainers that ran before on this store
        self._state = last or SyncState(0, 0, number, {})
        self._publish(trainers=number, is_open=False, invited={})
        self._beats = threading.Event()
        self._absent: Absent | None = None

    def _publish(self, **changes: Any) -> None:
        state, now = replace(self._state, **changes), self._store.get_sync()
        if now is not None and now.trainers > state.trainers:
            raise ReshardError(
                "a newer WeightSender on the same store has taken the place of this one: sync with "
                "the newer one, or make this one again"
            )
        self._state = state
        self._store.set("sync", self._state)

    # Who takes part

    def open(self, version: int, absent: Absent | None = None) -> list[EngineInfo]:
        """Invite every engine that is not at `version`; return those that have come.

        The first sync waits for all engines to join. absent: as of `WeightSender.sync`. Raises
        ReshardError if no engine is left.
        """
        self._forget_keys()
        self._absent = absent
        self._beats = threading.Event()
        threading.Thread(target=self._beat, args=(self._beats,), daemon=True).start()
        self._publish(version=version)
        deadline = time.monotonic() + self._timeout_s
        if not self._state.number or all(e.state == "absent" for e in self.engines.values()):
            self._wait_for_all(deadline)
        joined = {index: self._look_at(index) for index in self.engines}
        infos = {
            index: info
            for index, info in joined.items()
            if info and self.engines[index].state == "live"
        }
        behind = {i: info for i, info in infos.items() if self.engines[i].version != version}
        self._publish(
            number=self._state.number + 1,
            version=version,
            invited={index: info.incarnation for index, info in behind.items()},
            is_open=True,
            failure="",
            attempt=0,
            transfer=None,
            begun=frozenset(),
        )
        came = [info for info in behind.values() if self._came(info, deadline)]
        self._check_any_live()
        return came

    def _check_any_live(self) -> None:
        if not any(e.state == "live" for e in self.engines.values()):
            reasons = "; ".join(f"engine {i}: {e.reason}" for i, e in self.engines.items())
            version = self._state.version
            raise ReshardError(f"no engine is left to sync to version {version} ({reasons})")

    def _wait_for_all(self, deadline: float) -> None:
        """Wait until every engine has joined or is known to be absent; drop the others."""
        missing = set(self.engines)

        def look() -> bool | None:
            for index in missing.copy():
                if self._store.has(f"engine/{index}"):
                    missing.remove(index)
                elif self._absent is not None and (reason := self._absent(index)):
                    missing.remove(index)
                    self._drop(index, reason)
            return True if not missing or time.monotonic() > deadline else None

        with self._activity.waiting_for(*(f"engine {index}" for index in missing)):
            wait_for(look)
        for index in missing:
            self._drop(index, f"it has not joined within {self._timeout_s:g} s")

    def _look_at(self, index: int) -> EngineInfo | None:
        """Return an engine that has joined; update its status if it is new or back."""
        status, info = self.engines[index], self._store.get(f"engine/{index}", EngineInfo)
        if info is None:
            return None
        if info.incarnation != status.incarnation:
            self.engines[index] = EngineStatus(
                "live", incarnation=info.incarnation, num_ranks=len(info.processes)
            )
        elif status.state == "dropped":
            back = self._store.get(f"engine/{index}/back", tuple[int, int])
            incarnation, number = back or (0, 0)
            is_back = incarnation == info.incarnation and number >= status.dropped_in
            if is_back or self._absent is not None:
                status.state, status.version = "live", None
        return info

    def _came(self, info: EngineInfo, deadline: float) -> bool:
        reason = self._wait(info, lambda: self._ready(info, 0) or None, deadline)
        if reason is not True:
            self._drop(info.index, str(reason))
        return reason is True

    def _ready(self, info: EngineInfo, attempt: int) -> bool:
        key = f"{self._state.number}/{attempt}/ready/{info.key}"
        return self._store.all_marked(key, len(info.processes))

    def _wait(
        self, info: EngineInfo, read: Callable, deadline: float, has_waited: bool = False
    ) -> object:
        """Return what `read` returns, or why there is nothing to wait for.

        has_waited: a stopped rank has had its time already.
        """
        state_key = f"{self._state.number}/state/{info.key}"

        def look() -> object:
            if (result := read()) is not None:
                return result
            if isinstance(text := self._store.get(state_key, Holding | str), str):
                return text
            if self._absent is not None and (reason := self._absent(info.index)):
                return reason
            if (rank := next(info.ended_ranks(), None)) is not None:
                return f"rank {rank} has ended"
            late = time.monotonic() > deadline
            if (late or has_waited) and (stopped := info.stopped_ranks()):
                return f"{stopped} and has not answered within {self._timeout_s:g} s"
            return f"it has not answered within {self._timeout_s:g} s" if late else None

        with self._activity.waiting_for(f"engine {info.index}"):
            return wait_for(look)

    def select(
        self, infos: Sequence[EngineInfo], layouts: dict[int, str], config: Mapping[str, Any]
    ) -> list[EngineInfo]:
        """Return the engines with these layouts (by TP rank) and this model; drop the others.

        config: the trained model's. Raises ReshardError if no engine is left.
        """
        for info in infos:
            if info.layout_of_tp_rank != layouts:
                self._drop(
                    info.index,
                    f"its weights are laid out differently (TP size {max(info.tp_ranks) + 1}, "
                    f"others {max(layouts) + 1}). Build every engine from one model with the "
                    "same options",
                )
                continue
            try:
                check_configuration(config_differences(config, info.model_config))
            except LayoutError as error:
                self._drop(info.index, str(error).rstrip("."))
        self._check_any_live()
        return [info for info in infos if self.engines[info.index].state == "live"]

    def ended(self, index: int) -> str:
        """Return which ranks of an engine, where it has joined, have ended; "" for none."""
        info = self._store.get(f"engine/{index}", EngineInfo)
        return ", ".join(f"rank {rank} has ended" for rank in info.ended_ranks()) if info else ""

    # Transfer

    def _holding(self, info: EngineInfo) -> Holding:
        held = self._store.get(f"{self._state.number}/state/{info.key}", Holding | str)
        return held if isinstance(held, Holding) else Holding(True, None)

    def has_frozen(self, infos: Sequence[EngineInfo], generation: int) -> bool:
        """Return whether all engines have this generation of the frozen parameters."""
        return all(
            self.engines[i.index].has.frozen == generation and not self._holding(i).lost
            for i in infos
        )

    def take_delta(
        self, infos: Sequence[EngineInfo], base: int, generation: int
    ) -> list[EngineInfo]:
        """Return the engines that can take a delta: they have version `base`, as it was sent last.

        generation: the generation of the trained parameters that were sent last.
        """
        return [
            info
            for info in infos
            if self.engines[info.index].has.trained == generation
            and self._holding(info).base == base
        ]

    def begin(self, transfer: Transfer) -> None:
        """Let the engines that are members start to receive."""
        engines = {member.engine for member in transfer.members}
        self._publish(transfer=transfer, begun=self._state.begun | engines)

    def settle(
        self, infos: Sequence[EngineInfo], sent: Generations, failed: bool = False
    ) -> tuple[list[EngineInfo], bool]:
        """Wait until each engine has committed, failed or asks for another attempt.

        Return (those that ask for another attempt, which is open now; whether all have committed).
        sent: the generations that the committed engines now have.
        failed: whether the transfer has failed, as it does when a rank is stopped for `timeout_s`.
        """
        number, attempt = self._state.number, self._state.attempt
        # An engine may have begun to wait for another one just now: until it has noticed, and more.
        deadline = time.monotonic() + 1.25 * self._timeout_s + 2
        again = []
        for info in infos:

            def outcome(info: EngineInfo = info) -> object:
                if self._store.all_marked(f"{number}/committed/{info.key}", len(info.processes)):
                    return "committed", ""
                return ("again", "") if self._ready(info, attempt + 1) else None

            result = self._wait(info, outcome, deadline, failed)
            status = self.engines[info.index]
            if result == ("committed", ""):
                status.version, status.has = self._state.version, sent
            elif result == ("again", ""):
                again.append(info)
            else:
                self._drop(info.index, str(result))
        if again and attempt > len(self.engines):
            raise ReshardError(
                f"the sync to version {self._state.version} failed {attempt + 1} times although "
                "trainers and engines are running: check the network between them"
            )
        self._publish(attempt=attempt + 1, transfer=None)
        version = self._state.version
        return again, all(self.engines[info.index].version == version for info in infos)

    # End

    def close(self, failure: str = "") -> dict[int, EngineStatus]:
        """End the sync and return the engines. failure: why it did not complete, they raise it."""
        self._beats.set()
        self._publish(is_open=False, failure=failure)
        return self.engines

    def _drop(self, index: int, reason: str) -> None:
        status = self.engines[index]
        status.state, status.reason, status.has = "dropped", reason, NOTHING
        status.version, status.dropped_in = None, self._state.number
        invited = {i: n for i, n in self._state.invited.items() if i != index}
        self._publish(invited=invited)
        warnings.warn(
            f"engine {index} was dropped from the sync to version {self._state.version}: {reason}. "
            "It is brought up to date with the first sync after it is back.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _beat(self, done: threading.Event) -> None:
        """Tell the engines, until the sync is over, that this process runs."""
        with suppress(ReshardError):  # the store is gone
            store = self._store.own_connection()
            while not done.wait(BEAT_S):
                store.next_number("beat")

    def _forget_keys(self) -> None:
        """Delete the keys of the last sync."""
        number, attempts = self._state.number, self._state.attempt + 2
        for index, status in self.engines.items():
            key = f"{index}.{status.incarnation}"
            steps = [f"{a}/{k}" for a in range(attempts) for k in ("ready", "moving", "committing")]
            kinds = ["committed", *steps]
            marks = [f"{number}/{k}/{key}/{r}" for k in kinds for r in range(status.num_ranks)]
            self._store.delete(f"{number}/state/{key}", *marks)
