"""One rank's life: process group, device, phases, and an end that says what happened."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridengine.runtime.peers import EXIT_PEER_LOST, PeerWatch
from hybridengine.runtime.status import PhaseStatus
from hybridengine.runtime.stop import StopSignals

__all__ = ["EarlyExit", "Session", "run_rank"]


class EarlyExit(RuntimeError):
    """Code inside a run ended the process instead of returning."""


class Session:
    """What every phase of a run needs to know about its rank.

    timings: seconds per phase since `take_timings`, under the phase's name.

    Attributes:
        was_stopped: whether the run ends before its last step because a signal asked for it.
    """

    def __init__(
        self, watch: PeerWatch, status: PhaseStatus, signals: StopSignals | None = None
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = _device()
        self.step = 0
        self._watch, self._status, self._signals = watch, status, signals
        self.was_stopped = False
        self._timings: dict[str, float] = {}
        self.on_phase: Callable[[str], None] = lambda phase: None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name and time what runs inside; the name shows up in any failure."""
        self._watch.enter(name, self.step)
        self._status.enter(name, self.step)
        self.on_phase(name)
        started = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._timings[name] = self._timings.get(name, 0.0) + time.perf_counter() - started

    def let_steps_finish(self) -> None:
        """From now on a stop signal waits for `stop_signal`; before, it ends the rank at once."""
        if self._signals is not None:
            self._signals.can_wait = True

    def stop_signal(self) -> signal.Signals | None:
        """The signal by which any rank was asked to stop; the same answer on all. Collective."""
        number = torch.tensor(self._signals.requested if self._signals is not None else 0)
        if self.world_size > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)  # gloo, a fraction of a millisecond
        return signal.Signals(int(number)) if number else None

    def take_timings(self) -> dict[str, float]:
        timings, self._timings = self._timings, {}
        return timings


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def run_rank(main: Callable[[Session], None], run_dir: str | Path, timeout_s: float) -> bool:
    """Run `main` as one rank of a torchrun world.

    timeout_s: how long a collective may wait for its peers.

    Returns whether `main` has finished; False if it was stopped by SIGINT or SIGTERM after a
    checkpoint. A failure ends in one line on stderr that names the rank at fault and the phase; the
    exception is raised on for the launcher to see. A rank that gets SIGTERM because another one
    failed ends with it. After a time-out, or a fatal signal (as of NCCL's watchdog), stacks are on
    stderr too.
    """
    faulthandler.enable()
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cpu" and _is_one_machine():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signals, status = StopSignals(), PhaseStatus(run_dir, rank)
    watch = PeerWatch(rank, world_size, timeout_s, status.lose)
    watch.must_end = lambda: signals.requested == signal.SIGTERM
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        session = Session(watch, status, signals)
        _call(main, session)
        signals.close(signal.SIG_IGN)
        status.end("stopped" if session.was_stopped else "finished")
    except BaseException as error:
        signals.close(signal.SIG_DFL)
        late = _is_timeout(error)
        waiting = f"; meanwhile {watch.whereabouts()}" if late and world_size > 1 else ""
        watch.fail(error)
        cause = watch.diagnose() if not late and _may_be_a_peers_fault(error) else None
        blame = f"; the cause: {cause}" if cause else waiting
        reason = f"{type(error).__name__}: {error}"
        print(f"rank {rank} failed in {watch.phase}: {reason}{blame}", file=sys.stderr)
        sys.stderr.flush()
        if not cause:
            status.fail(f"{reason}{waiting}")
        if cause or late:
            os._exit(EXIT_PEER_LOST)  # connections to a lost rank would make an orderly exit wait
        raise
    finally:
        watch.close()
    if dist.is_initialized():  # vLLM's own shutdown ends it too
        dist.destroy_process_group()
    return not session.was_stopped


def _call(main: Callable[[Session], None], session: Session) -> None:
    try:
        main(session)
    except SystemExit as error:  # exit code 0 would pass for success
        raise EarlyExit(f"sys.exit({error.code!r}) was called in the middle of the run") from error


def _may_be_a_peers_fault(error: BaseException) -> bool:
    """Gloo and NCCL report a lost peer as a plain RuntimeError or a DistError."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _is_timeout(error: BaseException) -> bool:
    """Of a collective; gloo, NCCL and the store each have words of their own for it."""
    words = str(error).lower()
    return _may_be_a_peers_fault(error) and ("timed out" in words or "timeout" in words)


def _is_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
