"""Ranks of one machine through torch's elastic launcher, and what is said when one dies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console

from hybridengine.config import ConfigError, GRPOConfig, config_to_yaml, load_config
from hybridengine.data import DataError
from hybridengine.distributed.peers import EXIT_PEER_LOST
from hybridengine.model import ModelError
from hybridengine.rewards import RewardError
from hybridengine.tracking.atomic import atomic_file
from hybridengine.tracking.status import clear_status, read_status

__all__ = [
    "EXIT_USER_ERROR",
    "USER_ERRORS",
    "launch_ranks",
    "print_error",
    "run_rank",
]

USER_ERRORS = (ConfigError, DataError, ModelError, RewardError)
EXIT_USER_ERROR = 2


def launch_ranks(config: GRPOConfig) -> str | None:
    """Run `trainer.n_gpus_per_node` ranks on this machine until they end.

    Returns None after success, else one sentence: which rank failed, how, and in which phase.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    dir, num_ranks = Path(config.trainer.default_local_dir), config.trainer.n_gpus_per_node
    clear_status(dir)
    handed_over = dir / ".status" / "config.yaml"  # overrides applied
    with atomic_file(handed_over) as temporary:
        temporary.write_text(config_to_yaml(config))
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it shorter
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "hybridengine.launch", str(handed_over))
    except ChildFailedError as error:
        return _describe(error.failures, dir)
    return None


def _describe(failures: dict[int, Any], dir: Path) -> str:
    """Name the rank that failed first; those that only lost it as a peer come last."""

    def order(rank: int) -> tuple[int, float, int]:
        code = failures[rank].exitcode
        killed = code < 0 and code != -signal.SIGTERM  # the launcher ends the others by SIGTERM
        victim = code in (EXIT_PEER_LOST, -signal.SIGTERM)
        culprit = 0 if killed else 1 if code == EXIT_USER_ERROR else 3 if victim else 2
        return culprit, failures[rank].timestamp, rank

    rank = min(failures, key=order)
    failure, status = failures[rank], read_status(dir).get(rank)
    if failure.exitcode < 0:
        how = f"was killed by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"ended with exit code {failure.exitcode}"
    where = f"in phase {status.phase!r} of step {status.step}" if status else "while starting"
    return f"rank {rank} (pid {failure.pid}) {how} {where}; the other ranks were stopped."


def run_rank(config: GRPOConfig) -> int:
    """Train as the rank that the environment names; returns its exit code."""
    from hybridengine.trainer.rl import train_grpo

    try:
        train_grpo(config)
    except USER_ERRORS:  # the rank has said it, with its phase; a traceback would bury that
        return EXIT_USER_ERROR
    return 0


def print_error(error: Exception | str) -> None:
    """One red sentence on stderr."""
    Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="bold red", markup=False)


if __name__ == "__main__":
    sys.exit(run_rank(load_config(sys.argv[1])))
