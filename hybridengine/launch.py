"""Ranks of one machine through torch's elastic launcher, and what is said when one dies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridengine.config import (
    GRPOConfig,
    JobConfig,
    SFTConfig,
    config_to_yaml,
    load_config,
    load_sft_config,
)
from hybridengine.distributed.peers import EXIT_PEER_LOST, PeerLost
from hybridengine.errors import EXIT_USER_ERROR, UserError
from hybridengine.tracking.atomic import atomic_file
from hybridengine.tracking.status import clear_status, read_status

__all__ = ["launch_ranks", "run_rank"]


def launch_ranks(config: JobConfig) -> str | None:
    """Run `trainer.n_gpus_per_node` ranks on this machine until they end.

    Returns None after success, else one sentence: which rank failed, how, and in which phase.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    dir, num_ranks = Path(config.trainer.default_local_dir), config.trainer.n_gpus_per_node
    clear_status(dir)
    handed_over = dir / ".status" / "config.yaml"  # overrides applied
    with atomic_file(handed_over) as temporary:
        temporary.write_text(config_to_yaml(config))
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
    )
    try:
        kind = type(config).__name__
        elastic_launch(launch, sys.executable)("-m", "hybridengine.launch", kind, str(handed_over))
    except ChildFailedError as error:
        return _describe(error.failures, dir)
    except SignalException as error:
        return f"stopped by {error.sigval.name}; all ranks were ended."
    return None


def _describe(failures: Mapping[int, Any], dir: Path) -> str:
    """Name the rank that failed first; those that only lost it as a peer are not to blame.

    failures: by rank, what the launcher saw end (pid, exitcode, timestamp); others it has stopped.
    """
    statuses = read_status(dir)
    killed = [
        rank  # the launcher ends the others by SIGTERM
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    ]
    raised = sorted((s.time, rank) for rank, s in statuses.items() if s.error)
    if killed:
        rank = killed[0]
        how = f"was killed by {signal.Signals(-failures[rank].exitcode).name}"
    elif raised:
        rank = raised[0][1]
        how = "failed"
    else:
        rank = min(failures, key=lambda r: (failures[r].exitcode == EXIT_PEER_LOST, r))
        how = f"ended with exit code {failures[rank].exitcode}"
    status = statuses.get(rank)
    where = f"in phase {status.phase!r} of step {status.step}" if status else "while starting"
    pid = status.pid if status else failures[rank].pid
    why = f": {status.error}" if status and status.error else ""
    return f"rank {rank} (pid {pid}) {how} {where}{why}; the other ranks were stopped."


def run_rank(config: JobConfig) -> int:
    """Train as the rank that the environment names; returns its exit code."""
    from transformers.utils.logging import disable_progress_bar

    from hybridengine.trainer.rl import train_grpo
    from hybridengine.trainer.sft import train_sft

    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    try:
        if isinstance(config, SFTConfig):
            train_sft(config)
        elif isinstance(config, GRPOConfig):
            train_grpo(config)
    except UserError:  # the rank has said it, with its phase; a traceback would bury that
        return EXIT_USER_ERROR
    except (PeerLost, KeyboardInterrupt):  # likewise: the launcher stops this rank
        return EXIT_PEER_LOST
    return 0


if __name__ == "__main__":
    load = load_sft_config if sys.argv[1] == SFTConfig.__name__ else load_config
    sys.exit(run_rank(load(sys.argv[2])))
