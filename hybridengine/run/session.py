"""What every phase of a run needs of its rank: device, phases and their times, requested stops."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from hybridengine.run.errors import EXIT_STOPPED, OutputError
from hybridengine.run.failures import RESTART_COUNT, CollectiveGuard
from hybridengine.run.storage import atomic_file

PHASE = "phase: "  # before the name of a phase, in a profile
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

SAME_REQUEST_S = 1.0  # schedulers signal every process, and torchrun forwards its own signal


@dataclass(frozen=True)
class RankStatus:
    rank: int
    pid: int
    phase: str
    step: int
    time: float  # seconds since the epoch, of this entry
    end: str = ""  # "finished", or "stopped" by a signal after a checkpoint; "" if neither
    role: str = ""  # "trainer", "critic" or "engine 0", where ranks have roles


class PhaseStatus:
    """Writes `<run>/.status/rank_<rank>.json` at every phase and at the end of a rank's work.

    So the phase of a killed rank is known.
    """

    def __init__(self, dir: str | Path, rank: int, role: str = "") -> None:
        self._current = RankStatus(rank, os.getpid(), "starting", 0, time.time(), role=role)
        self._file = Path(dir) / ".status" / f"rank_{rank}.json"
        self._write(self._current)

    def enter(self, phase: str, step: int) -> None:
        self._write(replace(self._current, phase=phase, step=step, time=time.time()))

    def end(self, how: str) -> None:
        """Record the end of this rank's work: "finished", or "stopped" before the last step."""
        self._write(replace(self._current, end=how, time=time.time()))

    def _write(self, status: RankStatus) -> None:
        self._current = status
        with suppress(OutputError), atomic_file(self._file) as temporary:  # it is only for messages
            temporary.write_text(json.dumps(asdict(status)))


def read_status(dir: str | Path) -> dict[int, RankStatus]:
    """Return the last phase that each rank entered, by rank; empty before the first."""
    files = sorted((Path(dir) / ".status").glob("rank_*.json"))
    found = (RankStatus(**json.loads(file.read_text())) for file in files)
    return {status.rank: status for status in found}


def clear_status(dir: str | Path) -> None:
    """Remove the status of an earlier run in the same folder."""
    shutil.rmtree(Path(dir) / ".status", ignore_errors=True)


class StopSignals:
    """The stop signals of one rank: the first requests a stop after the step, the second ends it.

    A thread reads them: inside a collective Python runs no handler.

    Attributes:
        requested: the number of the first signal; 0 before it.
        can_wait: whether there is a step to finish; if not, the first signal ends the process.
    """

    requested = 0
    can_wait = False

    def open(self) -> None:
        """Begin to receive them."""
        self._since = 0.0
        self._read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read, True)
        for number in STOP_SIGNALS:
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # A forked child neither writes to its parent's pipe nor ignores signals.
        os.register_at_fork(after_in_child=lambda: self.close(signal.SIG_DFL))
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    def close(self, action: signal.Handlers) -> None:
        """Set the action of further signals: ignore them at the end of a run, or let them end a
        failed rank that takes too long to exit."""
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, action)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number in STOP_SIGNALS:
                    self.receive(number)

    def receive(self, number: int) -> None:
        again = self.requested and time.monotonic() - self._since > SAME_REQUEST_S
        if again or not self.can_wait:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(EXIT_STOPPED)
        if not self.requested:
            self.requested, self._since = number, time.monotonic()


def _ignore(signum: int, frame: FrameType | None) -> None:
    """The wake-up pipe has the number already."""


class RunClock:
    """The seconds of a run by part, such as `step`; every moment belongs to exactly one part.

    Attributes:
        part: the current one.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self._seconds = defaultdict[str, float](float)
        self._since = time.perf_counter()

    def enter(self, part: str) -> str:
        """Begin a part; return the one that ends."""
        now = time.perf_counter()
        self._seconds[self.part] += now - self._since
        self._since, ended, self.part = now, self.part, part
        return ended

    @contextmanager
    def inside(self, part: str, absorbs: bool = False) -> Iterator[None]:
        """What runs inside belongs to `part`, and interrupts the part around it.

        absorbs: so does what interrupts this one.
        """
        outer, before = self.enter(part), dict(self._seconds)
        try:
            yield
        finally:
            self.enter(outer)
            if absorbs:
                seconds = sum(self._seconds.values()) - sum(before.values())
                self._seconds.clear()
                self.add(before | {part: before.get(part, 0.0) + seconds})

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all parts up to now."""
        self.enter(self.part)
        return dict(self._seconds)

    def take(self, part: str | None = None) -> dict[str, float]:
        """Return the seconds of a part, or of all, and forget them."""
        seconds = self.seconds()
        taken = seconds if part is None else {part: seconds[part]}
        for name in taken:
            del self._seconds[name]
        return taken

    def add(self, seconds: dict[str, float]) -> None:
        """Add those of an earlier part of the run."""
        for part, x in seconds.items():
            self._seconds[part] += x


class World:
    """The torch.distributed world of this rank: all ranks of torchrun, unless a subclass splits
    them by role into several worlds.

    name: of this world, for messages; "" where there is one.
    uses_device: whether this rank computes on a GPU where there are GPUs.
    """

    name = ""
    uses_device = True

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available() and self.uses_device:
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")

    @property
    def backend(self) -> str:
        """Of the process group."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    @property
    def num_ranks(self) -> int:
        """Ranks of all worlds."""
        return dist.get_world_size()

    def join(self, store: dist.Store, timeout_s: float) -> None:
        """Initialize the default process group. store: of all ranks of torchrun."""
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"hybridengine/world/{os.environ[RESTART_COUNT]}", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout_s),
        )

    def writing(self) -> AbstractContextManager[None]:
        """Tell the ranks of other worlds that those of this one wait for a disk."""
        return nullcontext()


class Session:
    """The state of a rank that every phase of a run needs.

    guard: its `phase` names the phase in messages of failures; None: there are no other ranks.
    signals: the stop signals, if this rank receives them.
    world: the world of this rank; None: all ranks form one.

    Attributes:
        was_stopped: whether the run ends before its last step because a signal requested it.
        was_restarted: whether torchrun's agent has restarted the ranks of a run that had begun.
        signals: the stop signals; `can_wait` once there are steps to finish.
        begin_run: called as the files in the run's folder become those of this run.
        on_phase: called with the name of every phase that begins.
    """

    def __init__(
        self,
        status: PhaseStatus,
        guard: CollectiveGuard | None = None,
        signals: StopSignals | None = None,
        world: World | None = None,
    ) -> None:
        self._world, self.signals = world or World(), signals or StopSignals()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_main, self.num_ranks = self.rank == 0, self._world.num_ranks
        self.device = self._world.device
        self._status, self._guard = status, guard
        self.was_stopped = self.was_restarted = False
        self._clock, self._step, self._entered = RunClock(""), 0, "starting"
        self.begin_run: Callable[[], None] = lambda: None
        self.on_phase: Callable[[str], None] = lambda phase: None

    @property
    def step(self) -> int:
        """The step that this rank works on; 0 before the first one."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._record()

    @contextmanager
    def phase(self, name: str, *, absorbs: bool = False) -> Iterator[None]:
        """Name and time what runs inside; the name appears in the message of any failure.

        A phase inside another one interrupts it; its time is not the other one's. absorbs: the time
        of phases inside this one is that of this one alone.
        """
        outer = self._clock.part
        self._enter(name)
        with self._clock.inside(name, absorbs):
            with torch.profiler.record_function(PHASE + name):
                yield
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        if outer:
            self._enter(outer)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """As `phase`, where all ranks of this world wait for a disk; those of others wait too."""
        with self._world.writing() if self.is_main else nullcontext(), self.phase(name):
            yield

    def _enter(self, phase: str) -> None:
        self._entered = phase
        self._record()
        self.on_phase(phase)

    def _record(self) -> None:
        """Bring phase and step to where messages of failures take them from."""
        if self._guard is not None:
            self._guard.phase = f"phase {self._entered!r} of step {self.step}"
        self._status.enter(self._entered, self.step)

    def stop_signal(self, elsewhere: int = 0) -> signal.Signals | None:
        """Return the signal that requested any rank to stop, the same one on all. Collective.

        elsewhere: the number of a signal to a rank of another world.
        """
        number = torch.tensor(self.signals.requested or elsewhere)
        if self.world_size > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)  # gloo, a fraction of a millisecond
        return signal.Signals(int(number)) if number else None

    def take_timing(self, phase: str) -> float:
        """Return the seconds of one phase and forget them."""
        return self._clock.take(phase)[phase]

    def take_timings(self) -> dict[str, float]:
        """Return the seconds of all phases and forget them."""
        return {phase: seconds for phase, seconds in self._clock.take().items() if phase}
