"""Ranks of one machine through torch's elastic launcher, and what is said when one dies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hybridengine.checkpoint.folders import find_checkpoints
from hybridengine.config import (
    GRPOConfig,
    JobConfig,
    SFTConfig,
    config_to_yaml,
    load_config,
    load_sft_config,
)
from hybridengine.errors import EXIT_USER_ERROR, UserError, print_error
from hybridengine.runtime.peers import EXIT_PEER_LOST
from hybridengine.runtime.run_lock import RunLock
from hybridengine.runtime.status import RankStatus, clear_status, read_status
from hybridengine.runtime.stop import EXIT_STOPPED, STOP_SIGNALS
from hybridengine.storage import atomic_file

__all__ = ["launch_ranks", "run_rank"]


def launch_ranks(config: JobConfig) -> int:
    """Run `trainer.n_gpus_per_node` ranks on this machine until they end; returns the exit code.

    0: the run has finished. EXIT_STOPPED: SIGINT or SIGTERM ended it, and it can be resumed. 1: a
    rank failed; one sentence on stderr says which, how, and in which phase.

    Raises ConfigError if another run is using the folder.
    """
    dir = Path(config.trainer.default_local_dir)
    with RunLock(dir):
        clear_status(dir)
        handed_over = dir / ".status" / "config.yaml"  # overrides applied
        with atomic_file(handed_over) as temporary:
            temporary.write_text(config_to_yaml(config))
        return _launch(type(config).__name__, handed_over, dir, config.trainer.n_gpus_per_node)


def _launch(kind: str, config_file: Path, dir: Path, num_ranks: int) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the engine's chatter hides ours
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.ERROR)  # what torch's launcher logs, we say in one sentence
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on to the ranks
    )
    stopping, failures = _StopRequests(dir, num_ranks), dict[int, Any]()
    try:
        arguments = ("-m", "hybridengine.runtime.launch", kind, str(config_file))
        elastic_launch(launch, sys.executable)(*arguments)
    except ChildFailedError as error:
        failures = dict(error.failures)
    except SignalException as error:
        stopping.signum = stopping.signum or error.sigval
    statuses = read_status(dir)
    if any(status.end == "stopped" for status in statuses.values()):  # rank 0 has told
        return EXIT_STOPPED
    only_stopped = all(f.exitcode in _STOPPED for f in failures.values()) and not any(
        status.error for status in statuses.values()
    )
    if only_stopped and (stopping.signum or failures):
        print(f"{_stop_name(stopping.signum)}: {_what_is_left(dir)}", file=sys.stderr)
        return EXIT_STOPPED
    if not failures and all(s.end == "finished" for s in statuses.values()) and statuses:
        return 0
    print_error(_describe(failures, statuses))
    return 1


_STOPPED = (EXIT_STOPPED, -signal.SIGTERM, -signal.SIGINT)  # exit codes of ranks ended by request


class _StopRequests:
    """SIGINT and SIGTERM of the launcher: the first goes to the ranks, the second ends them."""

    def __init__(self, dir: Path, num_ranks: int) -> None:
        self.signum = 0
        self._dir, self._num_ranks = dir, num_ranks
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


def _stop_name(signum: int) -> str:
    return (
        f"stopped by {signal.Signals(signum).name}" if signum else "stopped by a signal to a rank"
    )


def _what_is_left(dir: Path) -> str:
    """What the same command will do after an end without a checkpoint of its own."""
    saved = find_checkpoints(dir)
    if not saved:
        return "no checkpoint was saved; the same command starts anew"
    return f"the same command goes on after step {saved[-1].step} (trainer.resume_mode=auto)"


def _describe(failures: Mapping[int, Any], statuses: Mapping[int, RankStatus]) -> str:
    """Name the rank that failed first; those that only lost it as a peer are not to blame.

    failures: by rank, what the launcher saw end (pid, exitcode, timestamp); others it has stopped.
    """
    killed = [
        rank  # the launcher ends the others by SIGTERM
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    ]
    raised = sorted((s.time, rank) for rank, s in statuses.items() if s.error)
    lost = [s.lost for s in statuses.values() if s.lost is not None]
    unfinished = [rank for rank, s in statuses.items() if not s.end and rank not in failures]
    if killed:
        rank = killed[0]
        how = f"was killed by {signal.Signals(-failures[rank].exitcode).name}"
    elif raised:
        rank, how = raised[0][1], "failed"
    elif lost:
        rank = max(lost, key=lost.count)
        ended = "exit code 0" if rank not in failures else _exit_of(failures[rank].exitcode)
        how = f"ended without finishing the run ({ended})"
    elif failures:
        rank = min(failures, key=lambda r: (failures[r].exitcode == EXIT_PEER_LOST, r))
        how = f"ended with {_exit_of(failures[rank].exitcode)}"
    else:
        rank = unfinished[0] if unfinished else 0
        how = "ended without finishing the run (exit code 0)"
    status = statuses.get(rank)
    where = f"in phase {status.phase!r} of step {status.step}" if status else "while starting"
    pid = f" (pid {status.pid if status else failures[rank].pid})" if status or failures else ""
    why = f": {status.error}" if status and status.error else ""
    others = "; the other ranks were stopped" if len({*statuses, *failures}) > 1 else ""
    return f"rank {rank}{pid} {how} {where}{why}{others}."


def _exit_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def run_rank(config: JobConfig) -> int:
    """Train as the rank that torchrun's environment names; returns its exit code.

    Rank 0 holds the lock on the run's folder. Raises ConfigError if another run is using it.
    """
    if os.environ["RANK"] != "0":
        return _run_rank(config)
    with RunLock(config.trainer.default_local_dir):
        return _run_rank(config)


def _run_rank(config: JobConfig) -> int:
    from transformers.utils.logging import disable_progress_bar

    from hybridengine.trainer.rl import train_grpo
    from hybridengine.trainer.sft import train_sft

    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    finished = True
    try:
        if isinstance(config, SFTConfig):
            finished = train_sft(config)
        elif isinstance(config, GRPOConfig):
            finished = train_grpo(config)
    except UserError:  # the rank has said it, with its phase; a traceback would bury that
        return EXIT_USER_ERROR
    return 0 if finished else EXIT_STOPPED


if __name__ == "__main__":
    load = load_sft_config if sys.argv[1] == SFTConfig.__name__ else load_config
    sys.exit(_run_rank(load(sys.argv[2])))  # the launcher holds the lock
