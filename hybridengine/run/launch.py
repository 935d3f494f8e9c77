"""Start the ranks of one machine through torch's elastic launcher, and describe a failure."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hybridengine.run.errors import EXIT_STOPPED, EXIT_USER_ERROR, print_error
from hybridengine.run.messages import SECRET, new_secret
from hybridengine.run.monitor import EXIT_RANK_FAILED
from hybridengine.run.status import RankStatus, read_status
from hybridengine.run.stop_signals import STOP_SIGNALS

_TEMPORARY = "hybridengine-errors-"  # the beginning of names in the system's temporary folder
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
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _set_environment(num_ranks)
    requests, failures = _StopRequests(run_dir, num_ranks), dict[int, Any]()
    with temporary_folder() as errors:  # the run's disk may be full
        try:
            config = _elastic_config(str(errors), num_ranks, address)
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            failures = dict(error.failures)
        except SignalException as error:
            requests.signum = requests.signum or error.sigval
    statuses = read_status(run_dir)
    if any(status.end == "stopped" for status in statuses.values()):  # rank 0 has printed it
        return EXIT_STOPPED
    if only_stopped(failures) and (requests.signum or failures):
        by = signal.Signals(requests.signum).name if requests.signum else "a signal to a rank"
        print(f"stopped by {by}: {how_to_resume()}", file=sys.stderr)
        return EXIT_STOPPED
    if not failures and all(s.end == "finished" for s in statuses.values()) and statuses:
        return 0
    print_error(describe_failure(failures, statuses))
    return _exit_code(failures, statuses)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder in the system's temporary folder; it is removed at the end.

    Its process holds a lock on it. Folders whose process was killed have none, and are removed.
    """
    root = Path(tempfile.gettempdir())
    for left in root.glob(_TEMPORARY + "*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    hidden = Path(tempfile.mkdtemp(prefix="." + _TEMPORARY))
    with _locked(hidden):
        folder = hidden.rename(root / hidden.name[1:])
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; OSError if another process has it, or it is not accessible."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _set_environment(num_ranks: int) -> None:
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    os.environ.setdefault(SECRET, new_secret())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.ERROR)  # of torch's launcher; `describe_failure` replaces it


def _elastic_config(error_dir: str, num_ranks: int, address: str) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from hybridengine.run import rendezvous

    rendezvous.register()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=address,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=error_dir),  # of the error records
        signals_to_handle="SIGHUP,SIGQUIT",  # `_StopRequests` handles the others
    )


class _StopRequests:
    """SIGINT and SIGTERM of the launcher: the first goes to the ranks, the second ends them."""

    def __init__(self, run_dir: Path, num_ranks: int) -> None:
        self.signum = 0
        self._dir, self._num_ranks = run_dir, num_ranks
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        name, again = signal.Signals(signum).name, self.signum
        self.signum = self.signum or signum
        statuses = read_status(self._dir)
        if again:
            self._send(statuses, signal.SIGKILL)
        if again or len(statuses) < self._num_ranks:  # a rank that has not started has no step
            raise SignalException(f"stopped by {name}", signal.SIGTERM)
        if any(status.step > 0 for status in statuses.values()):
            print(
                f"{name}: the ranks finish their step and save a checkpoint; "
                "a second signal ends them at once",
                file=sys.stderr,
            )
        self._send(statuses, signum)

    @staticmethod
    def _send(statuses: Mapping[int, RankStatus], signum: int) -> None:
        for status in statuses.values():
            with suppress(ProcessLookupError):
                os.kill(status.pid, signum)


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


def _exit_code(failures: Mapping[int, Any], statuses: Mapping[int, RankStatus]) -> int:
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
