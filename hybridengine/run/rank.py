"""One rank's life: its start, its process group, and an end that names the rank at fault.

Torchrun's agent may restart the ranks. Its store outlives them, with all that they have written, so
keys are prefixed by the number of the start. TORCHELASTIC_RESTART_COUNT is no such number: every
node's agent counts for itself, and not each restart
(https://github.com/pytorch/pytorch/issues/108158).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

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
from hybridengine.run.messages import SignedStore, check_secret, share_secret
from hybridengine.run.monitor import EXIT_RANK_FAILED, RankMonitor, write_error_record
from hybridengine.run.session import PhaseStatus, Session, StopSignals, World

_STARTS = "hybridengine/starts"
_POLL_S = 0.02
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # in the environment of the ranks that its agent starts
_STARTED = "HYBRIDENGINE_RUN_START"  # in the environment, which started processes inherit


class EarlyExit(RuntimeError):
    """Code inside a run called `sys.exit` instead of returning."""


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
            try:
                main(session)
            except SystemExit as error:  # exit code 0 would pass for success
                text = f"sys.exit({error.code!r}) was called in the middle of the run"
                raise EarlyExit(text) from error
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
    world, signals = world or World(), StopSignals()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if _on_one_machine():
        os.environ.update(own_interfaces())
    signals.open()
    status = PhaseStatus(run_dir, rank, world.name)
    secret_file = Path(run_dir) / ".secret"
    if _BY_TORCHRUN in os.environ:
        store = join_start(rank, world_size, timeout_s, secret_file)
    else:
        store = connect_store(timeout_s)
    # The main thread may wait in the connection of the process group.
    guard = CollectiveGuard(rank, world_size, connect_store(timeout_s=30))
    monitor = RankMonitor(guard, timeout_s, lambda: signals.requested == signal.SIGTERM)
    try:
        world.join(store, timeout_s)
        session = Session(status, guard, signals, world)
        starts, begun = SignedStore(store, _STARTS), f"begun/{Path(run_dir).resolve()}"
        session.was_restarted = bool(starts.get(begun, bool))
        session.begin_run = lambda: starts.set(begun, True)
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


def own_interfaces() -> dict[str, str]:
    """Return the variables of gloo's and NCCL's interface: loopback, unless another one is set."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, "lo") for name in names}


def _on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _report(error: BaseException, guard: CollectiveGuard) -> bool:
    """Report why this rank ends, to the other ranks, the launcher and on stderr.

    Returns whether another rank is the cause, or is stalled.
    """
    reason, cause = f"{type(error).__name__}: {error}", None
    late = is_timeout(error) and bool(guard.others)
    if late:
        reason += f"; meanwhile {guard.hang_report()}"
    elif is_collective_error(error):
        cause = next((report for report in guard.ask() if report.is_cause), None)
        reason += f"; the cause: {cause}" if cause else ""
    if cause is None:
        guard.report_failure(error)
    with suppress(OSError, ValueError):  # a closed or full log neither hides it nor keeps the rank
        print(f"rank {guard.rank} failed in {guard.place}: {reason}", file=sys.stderr, flush=True)
    own_bug = cause is None and not isinstance(error, UserError)
    write_error_record(reason, cause, "".join(traceback.format_exception(error)) if own_bug else "")
    return late or cause is not None


def connect_store(timeout_s: float) -> dist.Store:
    """Return a new connection to the store whose address torchrun puts in the environment."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def run_start() -> datetime:
    """Return the time of the first call in this run: chat templates read the date.

    Processes inherit it from the one that started them.
    """
    now = datetime.now().isoformat(timespec="seconds")
    return datetime.fromisoformat(os.environ.setdefault(_STARTED, now))


def agree_on_run_start(store: dist.Store) -> None:
    """Let ranks that torchrun started have one `run_start`, also after it restarts them."""
    values = SignedStore(store, "hybridengine/run")
    os.environ[_STARTED] = values.claim("start", run_start().isoformat(), str)


def join_start(rank: int, world_size: int, timeout_s: float, secret_file: Path) -> dist.Store:
    """Let ranks that torchrun started agree on what the launcher puts into the environment.

    The secret, the number of restarts, which keys of later connections contain, and the start of
    the run. secret_file: see `share_secret`. Returns the connected store.
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


def number_of_start(store: Any, rank: int, world_size: int, timeout_s: float) -> int:
    """Return how often the ranks have been started, the same number on all of them.

    Rank 0 counts, and answers the questions of the others; their numbers tell these from those of
    ranks of earlier starts. store: not used by another thread.

    Raises DistError, a timeout, if rank 0 does not start.
    """
    counters: Any = dist.PrefixStore(_STARTS, store)
    if rank == 0:
        number: int = counters.add("number", 1)
        arguments = store.clone(), number, world_size - 1
        answering = threading.Thread(target=answer_questions, args=arguments, name="start-number")
        answering.daemon = True
        answering.start()
        return number
    answer = f"answer/{counters.add('questions', 1)}"
    try:
        counters.wait([answer], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise dist.DistError(
            f"timed out: rank 0 has not started within {timeout_s:g} s (trainer.timeout_s)"
        ) from error
    number = SignedStore(store, _STARTS).read(answer, int)
    counters.add(f"{number}/joined", 1)
    return number


def answer_questions(store: Any, number: int, others: int) -> None:
    """Answer questions until all other ranks of this start have theirs."""
    counters, answers = dist.PrefixStore(_STARTS, store), SignedStore(store, _STARTS)
    answered = 0
    with suppress(RuntimeError):  # the store is gone
        while counters.add(f"{number}/joined", 0) < others:
            asked = counters.add("questions", 0)
            for question in range(answered + 1, asked + 1):
                answers.set(f"answer/{question}", number)
            answered = asked
            time.sleep(_POLL_S)
