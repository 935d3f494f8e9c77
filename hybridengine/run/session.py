"""One rank's life: process group, device, phases, and an end that names the rank at fault."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridengine.run.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from hybridengine.run.failures import (
    RESTART_COUNT,
    CollectiveGuard,
    RankReport,
    is_collective_error,
    is_timeout,
)
from hybridengine.run.messages import check_secret, share_secret
from hybridengine.run.monitor import EXIT_RANK_FAILED, RankMonitor, connect_guard
from hybridengine.run.restarts import RunMark, agree_on_run_start, connect_store, number_of_start
from hybridengine.run.status import PhaseStatus, write_error_record
from hybridengine.run.stop_signals import StopSignals

PHASE = "phase: "  # before the name of a phase, in a profile


class EarlyExit(RuntimeError):
    """Code inside a run called `sys.exit` instead of returning."""


class World:
    """The torch.distributed world of this rank: all ranks of torchrun, unless a subclass splits
    them by role into several worlds.

    name: of this world, for messages; "" where there is one.
    uses_device: whether this rank computes on a GPU where there are GPUs.
    """

    name = ""
    uses_device = True

    @property
    def num_ranks(self) -> int:
        """Ranks of all worlds."""
        return dist.get_world_size()

    def join(self, store: dist.Store, backend: str, timeout_s: float) -> None:
        """Initialize the default process group. store: of all ranks of torchrun."""
        dist.init_process_group(
            backend,
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

    Attributes:
        was_stopped: whether the run ends before its last step because a signal requested it.
        was_restarted: whether torchrun's agent has restarted the ranks of a run that had begun.
        on_phase: called with the name of every phase that begins.
    """

    def __init__(
        self,
        status: PhaseStatus,
        guard: CollectiveGuard | None = None,
        signals: StopSignals | None = None,
        world: World | None = None,
        mark: RunMark | None = None,
    ) -> None:
        self._world = world or World()
        self._mark, self.was_restarted = mark, mark is not None and mark.was_set
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = _device(self._world.uses_device)
        self._step = 0
        self._status, self._guard, self._signals = status, guard, signals
        self.was_stopped = False
        self._timings: dict[str, float] = {}
        self._phase: str | None = None
        self._entered = "starting"  # the phase that messages name: also after its end
        self.on_phase: Callable[[str], None] = lambda phase: None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_ranks(self) -> int:
        """Ranks of all worlds."""
        return self._world.num_ranks

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
        outer, self._phase = self._phase, name
        self._enter(name)
        started, before = time.perf_counter(), dict(self._timings)
        with torch.profiler.record_function(PHASE + name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if absorbs:
            self._timings = dict(before)
        others = sum(self._timings.values()) - sum(before.values())
        seconds = time.perf_counter() - started - others
        self._timings[name] = self._timings.get(name, 0.0) + seconds
        self._phase = outer
        if outer is not None:
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

    def begin_run(self) -> None:
        """From now on the files in the run's folder are of this run, also after a restart."""
        if self._mark is not None:
            self._mark.set()

    def let_steps_finish(self) -> None:
        """From now on a stop signal waits for `stop_signal`; before, it ends the rank at once."""
        if self._signals is not None:
            self._signals.can_wait = True

    @property
    def requested_signal(self) -> int:
        """The number of the stop signal that this rank has received; 0: none."""
        return self._signals.requested if self._signals is not None else 0

    def stop_signal(self, elsewhere: int = 0) -> signal.Signals | None:
        """Return the signal that requested any rank to stop, the same one on all. Collective.

        elsewhere: the number of a signal to a rank of another world.
        """
        number = torch.tensor(self.requested_signal or elsewhere)
        if self.world_size > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)  # gloo, a fraction of a millisecond
        return signal.Signals(int(number)) if number else None

    def take_timing(self, phase: str) -> float:
        """Return the seconds of one phase and forget them."""
        return self._timings.pop(phase)

    def take_timings(self) -> dict[str, float]:
        timings, self._timings = self._timings, {}
        return timings


def run_rank(
    main: Callable[[Session], None],
    run_dir: str | Path,
    timeout_s: float,
    world: World | None = None,
) -> int:
    """Run `main` as one rank of a torchrun world and return its exit code.

    world: the world of this rank; None: all ranks form one.

    0: `main` has finished; EXIT_STOPPED: SIGINT or SIGTERM stopped it after a checkpoint;
    EXIT_USER_ERROR: a UserError. Other exceptions are raised on, see `rank_session`.
    """
    try:
        with rank_session(run_dir, timeout_s, world) as session:
            _call(main, session)
    except UserError:  # its message is printed; a traceback would hide it
        return EXIT_USER_ERROR
    return EXIT_STOPPED if session.was_stopped else 0


@contextmanager
def rank_session(
    run_dir: str | Path, timeout_s: float, world: World | None = None
) -> Iterator[Session]:
    """Open the process group and the session of one rank of a torchrun world.

    timeout_s: how long a collective may wait for the other ranks.
    world: whose process group this rank joins; None: that of all ranks.

    A failure inside ends in one line on stderr that names the rank at fault and the phase, and is
    raised on. A rank that fails because another one did ends its process. A rank that gets SIGTERM
    because another one failed ends with it. After a timeout or a fatal signal (as of NCCL's
    watchdog) stacks are on stderr too.
    """
    faulthandler.enable()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = world or World()
    device = _device(world.uses_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if _on_one_machine():
        os.environ.update(_interfaces())
    signals, status = StopSignals(), PhaseStatus(run_dir, rank, world.name)
    secret_file = Path(run_dir) / ".secret"
    store = _join_start(rank, world_size, timeout_s, secret_file)
    guard = connect_guard(rank, world_size)
    monitor = RankMonitor(guard, timeout_s, lambda: signals.requested == signal.SIGTERM)
    try:
        world.join(store, _backend(device), timeout_s)
        session = Session(status, guard, signals, world, RunMark(store, run_dir))
        yield session
        signals.close(signal.SIG_IGN)
        status.end("stopped" if session.was_stopped else "finished")
        guard.finish()
    except BaseException as error:
        signals.close(signal.SIG_DFL)
        if _report(error, guard):  # connections to the failed rank would delay an orderly exit
            guard.end_stopped_ranks()
            os._exit(EXIT_RANK_FAILED)
        raise
    finally:
        monitor.close()
        if rank == 0:
            secret_file.unlink(missing_ok=True)
    if dist.is_initialized():  # vLLM's own shutdown ends it too
        dist.destroy_process_group()


def _interfaces() -> dict[str, str]:
    """Return the variables of gloo's and NCCL's interface: loopback, unless another one is set."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, "lo") for name in names}


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _join_start(rank: int, world_size: int, timeout_s: float, secret_file: Path) -> dist.Store:
    """Make number of restarts and start of the run the same on all ranks; connect to the store.

    Keys of later connections contain that number. secret_file: see `share_secret`.
    """
    if _on_one_machine():
        share_secret(secret_file, is_owner=rank == 0)
    else:
        check_secret("ranks on several machines sign their messages by it")
    store = connect_store(timeout_s)
    try:
        number = number_of_start(store, rank, world_size, timeout_s)
    except dist.DistError as error:
        late = RankReport(0, "running", f"has not started within {timeout_s:g} s")
        write_error_record(str(error), late)
        raise
    os.environ[RESTART_COUNT] = str(number - 1)
    agree_on_run_start(store)
    return store


@contextmanager
def script_session(run_dir: str | Path) -> Iterator[Session]:
    """Open a process group of this process alone, such as a notebook's, and its session.

    Signals keep their meaning: Ctrl-C raises KeyboardInterrupt. Torchrun's variables are set as
    long as it is open. A process group that exists already is used instead, and left open.
    """
    device = _device()
    if dist.is_initialized():
        yield Session(PhaseStatus(run_dir, dist.get_rank()))
        return
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    alone = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        **_interfaces(),
    }
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
        status = PhaseStatus(run_dir, 0)
        yield Session(status)
        status.end("finished")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _report(error: BaseException, guard: CollectiveGuard) -> bool:
    """Report why this rank ends, to the other ranks, the launcher and on stderr.

    Returns whether another rank is the cause, or is stalled.
    """
    reason, blame, cause = f"{type(error).__name__}: {error}", "", None
    late = is_timeout(error) and bool(guard.others)
    if late:
        blame = f"; meanwhile {guard.hang_report()}"
    elif is_collective_error(error) and (cause := guard.find_cause()):
        blame = f"; the cause: {cause}"
    if cause is None:
        guard.report_failure(error)
    with suppress(
        OSError, ValueError
    ):  # a closed or full log must not hide the error, nor keep this rank
        print(f"rank {guard.rank} failed in {guard.place}: {reason}{blame}", file=sys.stderr)
        sys.stderr.flush()
    own_bug = cause is None and not isinstance(error, UserError)
    stack = "".join(traceback.format_exception(error)) if own_bug else ""
    write_error_record(f"{reason}{blame}", cause, stack)
    return late or cause is not None


def _call(main: Callable[[Session], None], session: Session) -> None:
    try:
        main(session)
    except SystemExit as error:  # exit code 0 would pass for success
        raise EarlyExit(f"sys.exit({error.code!r}) was called in the middle of the run") from error


def _device(uses_device: bool = True) -> torch.device:
    if torch.cuda.is_available() and uses_device:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
