"""Start the ranks of one machine through torch's launcher, and describe a failure."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from hybridengine.run.activity import private_folder
from hybridengine.run.errors import EXIT_STOPPED, EXIT_USER_ERROR, ConfigError, print_error
from hybridengine.run.failures import RESTART_COUNT
from hybridengine.run.messages import SECRET, new_secret
from hybridengine.run.monitor import EXIT_RANK_FAILED
from hybridengine.run.rank import run_start
from hybridengine.run.session import STOP_SIGNALS, RankStatus, read_status

_POLL_S = 0.1  # between two looks at the ranks
_STOPPED = (EXIT_STOPPED, -signal.SIGTERM, -signal.SIGINT)  # exit codes of ranks ended by request


def launch_ranks(
    arguments: Sequence[str],
    run_dir: Path,
    num_ranks: int,
    how_to_resume: Callable[[], str],
    address: str = "127.0.0.1",
) -> int:
    """Run `python arguments...` as `num_ranks` ranks until they end and return the exit code.

    run_dir: where the ranks write their status (`PhaseStatus`); the caller holds its lock.
    how_to_resume: called after a stop without a checkpoint for the end of the message.
    address: the address on which the ranks' store listens; "": every one of this machine.

    0: the run has finished. EXIT_STOPPED: SIGINT or SIGTERM ended it, and it can be resumed.
    EXIT_USER_ERROR: a UserError before the first step. 1: a rank failed. After a failure one
    sentence on stderr says which rank failed, how, and in which phase.
    """
    failures, signum = _run_ranks(arguments, run_dir, num_ranks, listening_store(address))
    statuses = read_status(run_dir)
    if any(status.end == "stopped" for status in statuses.values()):  # rank 0 has printed it
        return EXIT_STOPPED
    if (signum or failures) and only_stopped(failures):
        by = signal.Signals(signum).name if signum else "a signal to a rank"
        print(f"stopped by {by}: {how_to_resume()}", file=sys.stderr)
        return EXIT_STOPPED
    if not failures and statuses and all(s.end == "finished" for s in statuses.values()):
        return 0
    print_error(describe_failure(failures, statuses))
    return exit_code_of(failures, statuses)


def _run_ranks(
    arguments: Sequence[str], run_dir: Path, num_ranks: int, store: dist.TCPStore
) -> tuple[dict[int, Any], int]:
    """Run the ranks with the variables that torchrun sets; return (their failures, stop signal).

    After one has failed, the others get SIGTERM, and SIGKILL 30 s later. A first SIGINT or SIGTERM
    goes to the ranks, a second one ends them; before all have started, the first one does.
    """
    from torch.distributed.elastic import multiprocessing as elastic

    logging.disable(logging.ERROR)  # of torch's launcher; `describe_failure` replaces it
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
        SECRET: new_secret(),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    os.environ.update(defaults | os.environ)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # `stop` handles the others
    run_start()  # its processes inherit it
    same = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 makes none
        RESTART_COUNT: "0",
    }
    variables = {r: {"RANK": str(r), "LOCAL_RANK": str(r), **same} for r in range(num_ranks)}
    commands = dict.fromkeys(variables, tuple(arguments))
    ranks: Any = None
    first = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        again, first = first, first or signum
        statuses = read_status(run_dir)
        if again:
            _send(ranks, signal.SIGKILL)
        if again or len(statuses) < num_ranks:  # a rank that has not started has no step
            raise elastic.SignalException("stopped", signal.SIGTERM)
        if any(status.step > 0 for status in statuses.values()):
            print(
                f"{signal.Signals(signum).name}: the ranks finish their step and save a "
                "checkpoint; a second signal ends them at once",
                file=sys.stderr,
            )
        _send(ranks, signum)

    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, stop)
    with temporary_folder() as errors:  # of the error records: the run's disk may be full
        logs = elastic.DefaultLogsSpecs(log_dir=str(errors))
        try:
            ranks = elastic.start_processes("ranks", sys.executable, commands, variables, logs)
            return dict(ranks.wait(period=_POLL_S).failures), first
        except elastic.SignalException as error:
            if ranks is not None:
                ranks.close(error.sigval)
            return {}, first or error.sigval


def _send(ranks: Any, signum: int) -> None:
    for pid in ranks.pids().values() if ranks is not None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def listening_store(address: str, port: int = 0) -> dist.TCPStore:
    """Return a new store of this process, which listens on `address` alone.

    address: "" for all of this machine.
    port: 0 for a free one.
    Raises OSError if the address is not one of this machine, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    options: dict[str, Any] = {"master_listen_fd": listening.detach(), "use_libuv": True}
    host = address or "127.0.0.1"
    return dist.TCPStore(host, port, None, is_master=True, wait_for_workers=False, **options)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder in this user's shared memory, or the system's temporary folder.

    It is removed at the end, or by the next run where this process is killed.
    """
    prefix, root = f"{os.getpid()}.", private_folder()
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def run_lock(dir: str | Path) -> Iterator[None]:
    """Hold an exclusive lock on `<dir>/.lock`: one run at a time in a folder.

    The launcher holds it, or under torchrun rank 0. The operating system releases it when the
    process ends, so no stale lock remains.

    Raises ConfigError if another process holds it; the message names its pid, host and start.
    """
    file = Path(dir) / ".lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        held = file.open("a+b", buffering=0)  # "w" would empty it before the lock is ours
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir {str(file.parent)!r} cannot be written: {error}"
        ) from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            who = held.read().decode() or "another process"  # it has only just taken the lock
            raise ConfigError(
                f"another run is using {str(file.parent)!r} ({who}); wait for it, stop it, or set "
                "another trainer.default_local_dir"
            ) from None
        except OSError as error:  # a file system without locks
            print(
                f"warning: {file} cannot be locked ({error}); do not start a second run in "
                "its folder",
                file=sys.stderr,
            )
        started = datetime.now().isoformat(sep=" ", timespec="seconds")
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {started}"
        with suppress(OSError):  # a full disk: the lock is held all the same
            held.truncate(0)
            held.write(holder.encode())
        yield


def only_stopped(failures: Mapping[int, Any]) -> bool:
    """Return whether all ranks were ended by request, or failed since such a rank had ended.

    The ranks reach the first step one after another: a signal ends some of them at once, while
    others wait for these in their step.

    failures: see `describe_failure`.
    """
    stopped = {r for r, f in failures.items() if f.exitcode in _STOPPED and not _record(f)}
    causes = {rank: r["extraInfo"]["cause"] for rank, r in _records(failures).items()}
    victims = {r for r, c in causes.items() if c and c["state"] == "ended" and c["rank"] in stopped}
    return failures.keys() == stopped | victims


def exit_code_of(failures: Mapping[int, Any], statuses: Mapping[int, RankStatus]) -> int:
    """Return EXIT_USER_ERROR if the rank to blame has met a UserError before its first step."""
    rank = _first_failure(failures, statuses, _records(failures))[0]
    if rank not in failures or rank not in statuses or statuses[rank].step:
        return 1
    return EXIT_USER_ERROR if failures[rank].exitcode == EXIT_USER_ERROR else 1


def describe_failure(failures: Mapping[int, Any], statuses: Mapping[int, RankStatus]) -> str:
    """Name the rank that failed first, how, and in which phase.

    failures: rank → torch's `ProcessFailure`, for every rank whose exit code is not 0. Ranks that
      the launcher ended by SIGTERM are among them.
    """
    records = _records(failures)
    rank, how = _first_failure(failures, statuses, records)
    status, failure, record = statuses.get(rank), failures.get(rank), records.get(rank)
    where = f"in phase {status.phase!r} of step {status.step}" if status else "while starting"
    process = status or failure
    role = f"{status.role}, " if status and status.role else ""
    pid = f" ({role}pid {process.pid})" if process else ""
    why = f": {record['message']}" if record and not record["extraInfo"]["cause"] else ""
    others = "; the other ranks were stopped" if len({*statuses, *failures}) > 1 else ""
    return f"rank {rank}{pid} {how} {where}{why}{others}."


def _first_failure(
    failures: Mapping[int, Any], statuses: Mapping[int, RankStatus], records: Mapping[int, Any]
) -> tuple[int, str]:
    """The rank to blame: stalled, killed, failed by itself, or ended with exit code 0."""
    infos = {rank: record["extraInfo"] for rank, record in records.items()}
    causes = [e["cause"] for e in sorted(infos.values(), key=lambda e: e["time"]) if e["cause"]]
    for cause in causes:  # the launcher has killed a stalled rank by now
        if cause["state"] not in ("failed", "ended"):
            return cause["rank"], cause["text"].partition(";")[0]
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return rank, f"was killed by {signal.Signals(-failure.exitcode).name}"
    if own := [(e["time"], rank) for rank, e in infos.items() if not e["cause"]]:
        return min(own)[1], "failed"
    victims = (EXIT_RANK_FAILED, -signal.SIGTERM)
    for rank, failure in failures.items():
        if failure.exitcode not in victims:
            return rank, f"ended with exit code {failure.exitcode}"
    named = [cause["rank"] for cause in causes if cause["rank"] not in failures]
    unfinished = [rank for rank, s in statuses.items() if not s.end and rank not in failures]
    if named or unfinished or not failures:
        return (*named, *unfinished, 0)[0], "ended without finishing the run (exit code 0)"
    rank = min(failures)
    return rank, f"ended with exit code {failures[rank].exitcode}"


def _records(failures: Mapping[int, Any]) -> dict[int, Any]:
    return {rank: record for rank, f in failures.items() if (record := _record(f))}


def _record(failure: Any) -> Any:
    """What `write_error_record` wrote of a rank; None if it wrote nothing."""
    return failure.message if isinstance(failure.message, dict) else None
