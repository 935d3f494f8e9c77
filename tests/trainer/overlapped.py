"""Jobs on trainer ranks and engine ranks, one after another on the same processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks import run_ranks
from tests.trainer.in_process import Result, _result

__all__ = ["run_overlapped"]


def run_overlapped(
    folder: Path, jobs: Sequence[Sequence[str]], num_ranks: int, timeout_s: float = 200.0
) -> list[Result]:
    """Run jobs, each given by its overrides, on `num_ranks` ranks of both roles in all.

    A job that sets trainer.mode has them all; any other trains on the first ranks alone.
    """
    return run_ranks(_jobs, num_ranks, folder, jobs, timeout_s=timeout_s)[0]


def _jobs(rank: int, num_ranks: int, folder: Path, jobs: Sequence[Sequence[str]]) -> list[Result]:
    from hybridengine.config import load_config
    from hybridengine.runtime import failures
    from hybridengine.trainer import report
    from hybridengine.trainer.rl import GRPOTrainer

    report.plot_learning_curves = lambda *args, **options: None
    environment, results = dict(os.environ), list[Any]()
    dist.barrier()
    dist.destroy_process_group()
    for number, overrides in enumerate(jobs):
        config = load_config(None, overrides)
        ranks = config.ranks_per_node
        assert ranks <= num_ranks
        run = Path(config.trainer.default_local_dir)
        if rank < ranks:
            # As torchrun numbers its restarts: every job has keys of its own in the store.
            os.environ.update(environment, TORCHELASTIC_RESTART_COUNT=str(number))
            os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            failures._guards = itertools.count()
            code = GRPOTrainer.run(config)
            if rank == 0:
                results.append(_result(run, f"exit code {code}" if code else ""))
    return results
