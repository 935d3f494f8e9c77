"""Find the rank that failed or stalled when a collective does not complete.

Every rank records in the rendezvous store which process it is and, when it fails, why and in which
phase. A rank whose collective fails asks the others. They answer with their failure, that they wait
too, or, from a thread, which line their main thread executes. Of a rank that does not answer, the
operating system tells whether its process ended or is stopped.
"""

from __future__ import annotations

import faulthandler
import functools
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hybridengine.run.activity import Activity
from hybridengine.run.all_ranks import default_groups, limited
from hybridengine.run.errors import reason_of
from hybridengine.run.messages import MessageError, SignedStore

STORE_GONE = "the rendezvous store is gone: its host, rank 0's node or agent, ended"
STORE_SILENT = "the rendezvous store, on rank 0's node, has not answered"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"  # of the environment

_ANSWER_S = 6.0  # a collective fails on all ranks, and monitors answer, within this time
_POLL_S = 1.0  # between two looks for a question
_LOOK_S, _LONGEST_LOOK_S = 2.0, 60.0  # between two looks for lost ranks: longer and longer
_MAX_NAMED = 4  # ranks in one message
# Of the plain RuntimeErrors of gloo and NCCL; those of a computation have none of these words.
_OF_A_CONNECTION = re.compile(
    r"gloo|nccl|pair closure|connection|socket|timed out|time-?out|aborted", re.IGNORECASE
)
_guards = itertools.count()  # every rank makes its guards in the same order


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
        self._timeout_s, self._groups = timeout_s, groups
        self.rank, self.others = rank, [r for r in range(world_size) if r != rank]
        self.activity = Activity(name or f"rank {rank}", rank, world_size)
        restarts = os.environ.get(RESTART_COUNT, "0")
        self._prefix = f"hybridengine/{restarts}/{next(_guards)}"
        self._own_store = store
        self._operation, self._count, self._phase = "", 0, "starting"
        self._answered: set[str] = set()
        self._lock = threading.Lock()
        self.set(f"process/{rank}", this_process())
        self.activity.join(self._world())

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self.activity.enter(self.place)

    def _world(self) -> str:
        """Return an identifier that the ranks of this guard have in common; "" without a store."""
        with suppress(RuntimeError, ValueError):
            return str(self._store().claim("world", secrets.token_hex(8), str))
        return ""

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
        limit_s, activity = timeout_s or self._timeout_s, self.activity
        world = activity.record.worlds[0] if activity.record.worlds else ""
        try:
            with (
                activity.in_collective(self.place, f"{self._count}/{phase}", world),
                limited(self._groups(), limit_s) if limit_s else nullcontext(),
            ):
                yield
        except RuntimeError as error:
            if not is_collective_error(error) or not self.others:
                raise
            cause = _summary(self.ask())
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
        look_s, started = _LOOK_S, time.monotonic()
        while device.type == "cpu" and not work.is_completed():
            try:
                work.wait(timedelta(seconds=look_s))
            except RuntimeError:
                if work.is_completed():
                    break
                lost: object = self.lost_rank()
                if time.monotonic() - started > stopped_after_s:
                    lost = lost or self._stopped_ranks()
                if lost:
                    raise dist.DistError(str(lost)) from None
                look_s = min(2 * look_s, stopped_after_s, _LONGEST_LOOK_S)
        work.wait()

    def _stopped_ranks(self) -> str:
        return stopped_ranks(self.get(f"process/{r}") for r in range(len(self.others) + 1))

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        self.set(self._key("failure", self.rank), f"failed in {self.place}: {one_line(error)}")

    def finish(self) -> None:
        """Tell the other ranks that this one may end."""
        self.set(f"finished/{self.rank}", "1")

    def failed_rank(self) -> RankReport | None:
        """Another rank that has reported its failure."""
        for rank in self.others:
            if reason := self.get(self._key("failure", rank)):
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
        if not self.set(self._key("answer", self.rank), answer):
            return []
        self.set(self._key("question"), "stacks" if stacks else "place")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            late = time.monotonic() > deadline
            if failed := self.failed_rank():
                return [failed]
            reports = [self._report_of(rank) for rank in self.others]
            if late or all(r.state not in ("running", "remote") for r in reports):
                return reports
            time.sleep(0.05)

    def find_cause(self) -> RankReport | None:
        """Return the other rank that made a collective fail here; None if no rank is known to."""
        return next((report for report in self.ask() if report.is_cause), None)

    def hang_report(self) -> str:
        """Return where the other ranks are while this one waits, ranks in other phases first."""
        return _joined(sorted(self.ask(stacks=True), key=lambda r: self.phase in r.text))

    def answer(self) -> None:
        """Answer a rank that asks: report the line that the main thread executes."""
        question = self.get(self._key("question"))
        if not question or question in self._answered:
            return
        self._answered.add(question)
        place = f"busy|is in {self.place}, at {_line_of_main_thread()}"
        self.set(self._key("answer", self.rank), place)
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
        if answer := self.get(self._key("answer", rank)):
            return RankReport(rank, *answer.split("|", 1))
        if self.get(f"finished/{rank}"):
            return RankReport(rank, "waiting", "has finished")
        beat = self.get(f"heartbeat/{rank}").rpartition("|")[0]
        last = f"; it was last in {beat}" if beat else ""
        state = self.process_state(rank)
        texts = {"ended": "has ended", "stopped": "is stopped (SIGSTOP)"}
        return RankReport(rank, state, texts.get(state, "was killed or stalled") + last)

    def _key(self, kind: str, rank: int | str = "") -> str:
        return f"{self._count}/{kind}/{rank}"

    def set(self, key: str, value: str) -> bool:
        """Write to the store; return whether it could be reached."""
        with self._lock, suppress(RuntimeError, ValueError):  # ValueError: no process group
            self._store().set(key, value)
            return True
        return False

    def get(self, key: str) -> str:
        """Return what the store has under `key`, or ""."""
        with self._lock, suppress(RuntimeError, ValueError):
            try:
                return self._store().get(key, str) or ""
            except MessageError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return ""

    def _store(self) -> SignedStore:
        store = self._own_store or dist.distributed_c10d._get_default_store()
        return SignedStore(store, self._prefix, is_required=False)


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


def _summary(reports: Sequence[RankReport]) -> str:
    causes = [r for r in reports if r.is_cause]
    if to_blame := causes or [r for r in reports if r.state in ("busy", "running")]:
        return _joined(to_blame)
    if reports:
        return "all ranks are running, but their connection failed"
    return STORE_GONE


def _joined(reports: Sequence[RankReport]) -> str:
    more = len(reports) - _MAX_NAMED
    return "; ".join(map(str, reports[:_MAX_NAMED])) + (f"; and {more} more" if more > 0 else "")


@functools.cache
def machine_id() -> str:
    """Identify the processes that can see each other in /proc; elsewhere unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown/{os.getpid()}"


def this_process() -> str:
    """Return an identifier of this process, for `process_state`."""
    return f"{machine_id()}|{os.getpid()}"


def machine_of(process: str) -> str:
    """Return the machine of a process: equal for those that can see each other in /proc."""
    return process.rpartition("|")[0]


def process_state(process: str) -> str:
    """Return "running", "stopped" or "ended"; "remote" for a process on another machine."""
    if machine_of(process) != machine_id():
        return "remote"
    try:
        status = psutil.Process(int(process.rpartition("|")[2])).status()
    except psutil.NoSuchProcess:
        return "ended"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "ended"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"


def stopped_ranks(processes: Iterable[str]) -> str:
    """Return which processes, on this machine, are stopped; "" for none. processes: by rank."""
    stopped = (rank for rank, p in enumerate(processes) if process_state(p) == "stopped")
    return ", ".join(f"rank {rank} is stopped (SIGSTOP)" for rank in stopped)


def _line_of_main_thread() -> str:
    """Return the innermost line outside torch and the standard library: file:line in function."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    calls = traceback.extract_stack(frame)
    libraries = (os.path.dirname(os.__file__), "site-packages")
    own = [c for c in calls if not any(part in c.filename for part in libraries)]
    call = (own or calls)[-1]
    return f"{call.filename}:{call.lineno} in {call.name}"
