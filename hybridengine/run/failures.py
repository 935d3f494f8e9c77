"""Find the rank that failed or stalled when a collective does not complete.

Every rank records in the rendezvous store which process it is and, when it fails, why and in which
phase. A rank whose collective fails asks the others. They answer with their failure, that they wait
too, or, from a thread, which line their main thread executes. Of a rank that does not answer, the
operating system tells whether its process ended or is stopped.
"""

from __future__ import annotations

import faulthandler
import itertools
import math
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from hybridengine.run.activity import Activity, process_state, stopped_ranks, this_process
from hybridengine.run.errors import reason_of
from hybridengine.run.messages import MessageError, SignedStore, group_timeout, wait_for

STORE_GONE = "the rendezvous store is gone: its host, rank 0's node or agent, ended"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"  # of the environment

ANSWER_S = 6.0  # a collective fails on all ranks, and monitors answer, within this time
_POLL_S = 1.0  # between two looks for a question
LOOK_S, _LONGEST_LOOK_S = 2.0, 60.0  # between two looks for lost ranks: longer and longer
LIMIT_SHARE = 0.8  # of a group's timeout, at which NCCL's watchdog ends the process
_MAX_NAMED = 4  # ranks in one message
# Of the plain RuntimeErrors of gloo and NCCL; those of a computation have none of these words.
_OF_A_CONNECTION = re.compile(
    r"gloo|nccl|pair closure|connection|socket|timed out|time-?out|aborted", re.IGNORECASE
)
guard_numbers = itertools.count()  # every rank makes its guards in the same order


class CollectiveError(dist.DistError):
    """A collective failed because of another rank; the message names the rank and its phase."""


@dataclass(frozen=True)
class RankReport:
    """What is known of another rank while a collective does not complete.

    state: "failed", "waiting" (its collective does not complete either) or "busy", as it answered;
    without an answer the state of its process: "ended", "stopped", "running", or "remote" for a
    process on another machine.
    """

    rank: int
    state: str
    text: str

    @property
    def is_cause(self) -> bool:
        return self.state in ("failed", "ended", "stopped", "remote")

    def __str__(self) -> str:
        return f"rank {self.rank} {self.text}"


def default_groups() -> list[dist.ProcessGroup]:
    return [dist.distributed_c10d._get_default_group()]


class CollectiveGuard:
    """The record of this rank in the store of the process group, and its view of the other ranks.

        guard = CollectiveGuard(rank, world_size)
        with guard.operation("the sync to version 2"):
            with guard.collective("exchanging bucket 1 of 7"):
                dist.all_to_all_single(...)

    store: a store whose connection only the guard and its `RankMonitor` use, so that other ranks
      are observed at all times; default: the process group's store, observed during an operation.
    timeout_s: the time limit of collectives; None: that of their process groups.
    groups: returns the process groups of the collectives; default: the default group.
    name: the name of this rank in `activity`.

    Attributes:
        phase: what this rank is doing, for messages.
        activity: the same, for `doctor --attach`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store | None = None,
        timeout_s: float | None = None,
        groups: Callable[[], Iterable[dist.ProcessGroup]] = default_groups,
        name: str = "",
    ) -> None:
        self.timeout_s, self._groups, self._own_store = timeout_s, groups, store
        self.rank, self.others = rank, [r for r in range(world_size) if r != rank]
        self.activity = Activity(name or f"rank {rank}", rank, world_size)
        self.prefix = f"hybridengine/{os.environ.get(RESTART_COUNT, '0')}/{next(guard_numbers)}"
        self._operation, self._count, self._phase = "", 0, "starting"
        self._answered: set[str] = set()
        self.set(f"process/{rank}", this_process())
        with suppress(RuntimeError, ValueError):  # of the store, see `set`
            self.activity.join(self._store().claim("world", secrets.token_hex(8), str))

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self.activity.enter(self.place)

    @property
    def place(self) -> str:
        """The phase, and the operation that it is part of."""
        return f"{self._operation} while {self.phase}" if self._operation else self.phase

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Several collectives: an error inside is reported to the other ranks, with its phase.

        All ranks enter the same operations in the same order.
        """
        self._operation, self._count = name, self._count + 1
        self.phase = "starting"
        self._answered.clear()
        done = threading.Event()
        if self._own_store is None and self.others:
            threading.Thread(target=self._answer_until, args=(done,), daemon=True).start()
        try:
            yield
        except CollectiveError:
            raise
        except BaseException as error:
            self.report_failure(error)
            error.add_note(f"rank {self.rank} failed in {self.place}")
            raise
        finally:
            done.set()
            self.activity.enter(f"after {name}")

    @contextmanager
    def collective(self, phase: str, timeout_s: float | None = None) -> Iterator[None]:
        """Raise CollectiveError if what runs inside fails because of another rank.

        An error of this rank's own is raised as it is; the operation reports it to the others.
        timeout_s: instead of the guard's.
        """
        self._phase = phase
        key, limit_s = f"{self._count}/{phase}", timeout_s or self.timeout_s
        limit = _limited(self._groups(), limit_s) if limit_s else nullcontext()
        try:
            with self.activity.in_collective(self.place, key), limit:
                yield
        except RuntimeError as error:
            if not is_collective_error(error) or not self.others:
                raise
            reports, cause = self.ask(), STORE_GONE
            if reports:
                causes = [r for r in reports if r.is_cause]
                causes = causes or [r for r in reports if r.state in ("busy", "running")]
                cause = _joined(causes) or "all ranks are running, but their connection failed"
            raise CollectiveError(
                f"rank {self.rank} stopped in {self.place}: {cause} ({one_line(error)})."
            ) from error

    def wait(
        self, work: dist.Work, device: torch.device, stopped_after_s: float = math.inf
    ) -> None:
        """Wait, inside `collective`, for an asynchronous one; look for lost ranks meanwhile.

        A closed connection is an error of those ranks only that still wait for data of its other
        end. All others wait for them, who have raised, until a timeout.
        device: of the tensors. On a GPU this is `work.wait`, which blocks no host.
        stopped_after_s: after this time a stopped rank counts as lost, too.
        """
        look_s, started = LOOK_S, time.monotonic()
        while device.type == "cpu" and not work.is_completed():
            try:
                work.wait(timedelta(seconds=look_s))
            except RuntimeError:
                if work.is_completed():
                    break
                lost: object = self.lost_rank()
                if time.monotonic() - started > stopped_after_s:
                    ranks = range(len(self.others) + 1)
                    lost = lost or stopped_ranks(self.get(f"process/{rank}") for rank in ranks)
                if lost:
                    raise dist.DistError(str(lost)) from None
                look_s = min(2 * look_s, stopped_after_s, _LONGEST_LOOK_S)
        work.wait()

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        self.set(self.key("failure", self.rank), f"failed in {self.place}: {one_line(error)}")

    def finish(self) -> None:
        """Tell the other ranks that this one may end."""
        self.set(f"finished/{self.rank}", "1")

    def failed_rank(self) -> RankReport | None:
        """Another rank that has reported its failure."""
        for rank in self.others:
            if reason := self.get(self.key("failure", rank)):
                return RankReport(rank, "failed", reason)
        return None

    def lost_rank(self) -> RankReport | None:
        """Another rank that has reported its failure, or whose process here has ended."""
        if failed := self.failed_rank():
            return failed
        for rank in self.others:
            if self.process_state(rank) == "ended" and not self.get(f"finished/{rank}"):
                return RankReport(rank, "ended", "has ended")
        return None

    def ask(self, *, stacks: bool = False) -> list[RankReport]:
        """Return what the other ranks report: at once if one has failed, else after some seconds;
        nothing if the store cannot be reached.

        stacks: running ranks also print the stacks of all their threads.
        """
        self._answered |= {"place", "stacks"}
        answer = f"waiting|is in {self.place}, and waits too"
        if not self.set(self.key("answer", self.rank), answer):
            return []
        self.set(self.key("question"), "stacks" if stacks else "place")
        deadline = time.monotonic() + ANSWER_S

        def read() -> list[RankReport] | None:
            late = time.monotonic() > deadline
            if failed := self.failed_rank():
                return [failed]
            reports = [self._report_of(rank) for rank in self.others]
            has_all = all(r.state not in ("running", "remote") for r in reports)
            return reports if late or has_all else None

        return wait_for(read)

    def hang_report(self) -> str:
        """Return where the other ranks are while this one waits, ranks in other phases first."""
        return _joined(sorted(self.ask(stacks=True), key=lambda r: self.phase in r.text))

    def answer(self) -> None:
        """Answer a rank that asks: report the line that the main thread executes."""
        question = self.get(self.key("question"))
        if not question or question in self._answered:
            return
        self._answered.add(question)
        place = f"busy|is in {self.place}, at {_line_of_main_thread()}"
        self.set(self.key("answer", self.rank), place)
        if question == "stacks":
            with suppress(OSError, ValueError):  # a log that is closed, or full
                print(f"rank {self.rank} stalls in {self.place}; its stacks:", file=sys.stderr)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _answer_until(self, done: threading.Event) -> None:
        while not done.wait(_POLL_S):
            self.answer()

    def end_stopped_ranks(self) -> None:
        """Kill the other ranks on this machine that are stopped: SIGTERM would not end them."""
        for rank in self.others:
            if process_state(process := self.get(f"process/{rank}")) == "stopped":
                with suppress(ProcessLookupError):
                    os.kill(int(process.rpartition("|")[2]), signal.SIGKILL)

    def process_state(self, rank: int) -> str:
        """Return "running", "stopped" or "ended"; "remote" for a process on another machine."""
        return process_state(self.get(f"process/{rank}"))

    def _report_of(self, rank: int) -> RankReport:
        if answer := self.get(self.key("answer", rank)):
            return RankReport(rank, *answer.split("|", 1))
        if self.get(f"finished/{rank}"):
            return RankReport(rank, "waiting", "has finished")
        beat = self.get(f"heartbeat/{rank}").rpartition("|")[0]
        last = f"; it was last in {beat}" if beat else ""
        state = self.process_state(rank)
        texts = {"ended": "has ended", "stopped": "is stopped (SIGSTOP)"}
        return RankReport(rank, state, texts.get(state, "was killed or stalled") + last)

    def key(self, kind: str, rank: int | str = "") -> str:
        return f"{self._count}/{kind}/{rank}"

    def set(self, key: str, value: str) -> bool:
        """Write to the store; return whether it could be reached."""
        with suppress(RuntimeError, ValueError):  # ValueError: no process group
            self._store().set(key, value)
            return True
        return False

    def get(self, key: str) -> str:
        """Return what the store has under `key`, or ""."""
        try:
            return self._store().get(key, str) or ""
        except MessageError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        except (RuntimeError, ValueError):
            pass
        return ""

    def _store(self) -> SignedStore:
        store = self._own_store or dist.distributed_c10d._get_default_store()
        return SignedStore(store, self.prefix, is_required=False)


@contextmanager
def _limited(groups: Iterable[dist.ProcessGroup], timeout_s: float) -> Iterator[None]:
    """While open, collectives that begin fail after `timeout_s`, if not earlier.

    Only gloo's groups are limited. NCCL keeps its own timeout, at which its watchdog ends the
    process.
    """
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    limits = [(b, b.options._timeout) for b in backends if isinstance(b, dist.ProcessGroupGloo)]
    for backend, before in limits:
        backend._set_default_timeout(min(timedelta(seconds=timeout_s), before))
    try:
        yield
    finally:
        for backend, before in limits:
            backend._set_default_timeout(before)


class Guard(Protocol):
    """What a transfer asks about other ranks: a `CollectiveGuard`, or a link between worlds."""

    phase: str

    def collective(
        self, phase: str, timeout_s: float | None = None
    ) -> AbstractContextManager[None]: ...

    def lost_rank(self) -> object | None: ...


class DeviceProgress:
    """The phases of an operation that this rank has enqueued on a device.

        work = dist.all_to_all_single(..., async_op=True)
        work.wait()
        progress.mark("exchanging bucket 1 of 7")
        progress.wait()

    A collective of NCCL is only enqueued: `work.wait()` makes the stream wait, not the host.
    Nothing on the host would notice a lost rank, and a barrier over gloo would be passed before any
    data arrives.

    guard: asks the other ranks when a phase is not finished in time.
    device: the device of the tensors.
    limit_s: how long `wait` waits; default: 0.8 of the timeout of the process group.
    """

    def __init__(self, guard: Guard, device: torch.device, limit_s: float | None = None) -> None:
        self._guard, self._device, self._limit_s = guard, device, limit_s
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """Everything that belongs to `phase` is now enqueued on the current stream."""
        if self._device.type == "cuda":
            self._marks.append((phase, torch.cuda.current_stream(self._device).record_event()))

    def wait(self) -> None:
        """Return when the device has finished every marked phase.

        Raises CollectiveError, which names the first unfinished phase and the rank at fault, soon
        after a rank has failed or ended, and after `limit_s`.
        """
        marks, self._marks = self._marks, []
        if not marks:
            return
        limit_s = self._limit_s or LIMIT_SHARE * group_timeout(self._device).total_seconds()
        started, next_look = time.monotonic(), LOOK_S
        for phase, completion in marks:
            with self._guard.collective(phase):
                while not completion.query():
                    waited = time.monotonic() - started
                    if waited > limit_s:
                        raise dist.DistError(f"the device has not finished it after {limit_s:g} s")
                    if waited > next_look:
                        if lost := self._guard.lost_rank():
                            raise dist.DistError(str(lost))
                        next_look = waited + LOOK_S
                    time.sleep(min(1e-2, 1e-4 + waited / 100))


def is_collective_error(error: BaseException) -> bool:
    """Return whether `error` may be another rank's fault: gloo and NCCL report a failed connection
    as a plain RuntimeError or a DistError."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _OF_A_CONNECTION.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return whether `error` is the timeout of a collective; gloo, NCCL and the store word it
    differently."""
    text = str(error).lower()
    return is_collective_error(error) and ("timed out" in text or "timeout" in text)


def one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {reason_of(error)}"


def _joined(reports: list[RankReport]) -> str:
    more = len(reports) - _MAX_NAMED
    return "; ".join(map(str, reports[:_MAX_NAMED])) + (f"; and {more} more" if more > 0 else "")


def _line_of_main_thread() -> str:
    """Return the innermost line outside torch and the standard library: file:line in function."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    calls = traceback.extract_stack(frame)
    libraries = (os.path.dirname(os.__file__), "site-packages")
    own = [c for c in calls if not any(part in c.filename for part in libraries)]
    call = (own or calls)[-1]
    return f"{call.filename}:{call.lineno} in {call.name}"
