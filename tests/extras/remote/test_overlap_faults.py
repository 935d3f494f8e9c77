"""Lost ranks and a stalled link between trainer ranks and engine ranks."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridengine.run.monitor import EXIT_RANK_FAILED
from hybridengine.train.checkpoint import find_checkpoints
from tests.extras.remote.overlapped import run_overlapped
from tests.ranks import Ranks
from tests.train.in_process import small_job
from tests.train.processes import pid_of_training_rank

pytestmark = pytest.mark.multirank

TRAINER, ENGINE, LINK_S = 0, 1, 3.0


def run_rank(rank: int, world_size: int, folder: Path, overrides: list[str], link: bool) -> int:
    """One rank of a job. link: rollouts of the second step and later ones are lost on their way."""
    import torch.distributed as dist

    from hybridengine.remote.overlap import queue
    from hybridengine.run import monitor
    from hybridengine.run.config import load_config
    from hybridengine.train import report
    from hybridengine.train.rl import RLTrainer

    monitor.STOPPED_S = 1.0  # not 10
    report.plugins = lambda group: {}
    dist.barrier()
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"record_{rank}.json")
    connect = queue.TrainerQueue.__init__

    class Delivered:
        def wait(self) -> None: ...

    def connect_with_limit(self: Any, link: Any) -> None:
        connect(self, link)
        self._group = Limited(self._group)

    class Limited:
        def __init__(self, group: Any) -> None:
            self._group = group

        def recv(self, *args: Any) -> Any:
            work = self._group.recv(*args)
            wait = partial(work.wait, timedelta(seconds=LINK_S))  # not 600 s
            return type("Limited", (), {"wait": lambda self: wait()})()

    send = queue.EngineQueue.send

    def lose(self: Any, item: queue.WorkItem, *rest: Any) -> None:
        if item.batch > 1 and not hasattr(self, "opened"):
            self.opened = self._group  # its connections stay open
            self._group = type("Stalled", (), {"send": lambda *args: Delivered()})()
        send(self, item, *rest)

    if link:
        queue.TrainerQueue.__init__, queue.EngineQueue.send = connect_with_limit, lose
    return RLTrainer.run(load_config(None, overrides))


@pytest.mark.parametrize(
    ("fault", "lost", "message"),
    [
        (signal.SIGKILL, TRAINER, "rank 0 has ended"),
        (signal.SIGSTOP, ENGINE, "rank 1 is stopped (SIGSTOP) for "),
        ("link", None, "meanwhile rank 1 is in phase '"),
    ],
)
def test_a_lost_rank_or_link_ends_the_run_and_costs_the_running_step(
    tmp_path: Path, fault: signal.Signals | str, lost: int | None, message: str
) -> None:
    settings = {
        "trainer.mode": "one_step_off",
        "rollout.n_gpus_per_node": 1,
        "trainer.total_training_steps": 100_000,
        "trainer.save_freq": 1,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.resume_mode": "auto",
    }
    pairs = dict(o.split("=", 1) for o in small_job(tmp_path)) | settings
    overrides = [f"{key}={value}" for key, value in pairs.items()]
    found: list[int] = []
    with Ranks(run_rank, 2, tmp_path, overrides, fault == "link", timeout_s=500) as ranks:
        if lost is not None:
            pid = pid_of_training_rank(tmp_path / "run", lost)
            found = [c.step for c in find_checkpoints(tmp_path / "run")]
            os.kill(pid, fault)
        survivor = ranks.processes[ENGINE if lost == TRAINER else TRAINER]
        survivor.join(240)
        assert survivor.exitcode == EXIT_RANK_FAILED
    number = ENGINE if lost == TRAINER else TRAINER
    record = json.loads((tmp_path / f"record_{number}.json").read_text())["message"]["message"]
    assert message in record, record
    if fault == "link":
        assert "timed out" in record.lower() or "timeout" in record.lower(), record
    newest = max((c.step for c in find_checkpoints(tmp_path / "run")), default=0)
    assert newest >= max(found, default=0)
    overrides.append(f"trainer.total_training_steps={newest + 1}")
    [resumed] = run_overlapped(tmp_path, [overrides], num_ranks=2)
    assert not resumed.refused
    steps = [row["step"] for row in resumed.rows if "actor/pg_loss" in row]
    assert steps == [*range(1, newest + 2)]
