"""N uninterrupted steps equal k steps, SIGKILL, and the rest resumed: all weights and metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hybridengine.checkpoint import find_checkpoints
from tests.trainer.sft_job import sft_settings, write_sft_job
from tests.trainer.toy import toy_job

pytestmark = pytest.mark.multirank

# Metrics that differ between equal runs: times, memory, rates, and what a sync moves (the first one
# of a process moves everything).
_UNEQUAL = ("timing_s/", "perf/", "reshard/")


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(_UNEQUAL)} for row in rows]
    return [row for row in rows if len(row) > 1]


def run_to_the_end(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def kill_after(command: list[str], folder: Path, step: int) -> None:
    """End every process of the job, with SIGKILL, some time after it has saved `step`."""
    run = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 200
    try:
        while not any(c.step >= step for c in find_checkpoints(folder)):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert run.poll() is None, "the job ended before it could be killed"
    finally:
        ranks = [json.loads(f.read_text())["pid"] for f in (folder / ".status").glob("rank_*.json")]
        for pid in (run.pid, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()


def assert_resume_is_exact(tmp_path: Path, command, step: int) -> None:
    """command(folder) runs the job in `folder`; it is killed after it has saved `step`."""
    uninterrupted, broken = tmp_path / "uninterrupted", tmp_path / "broken"
    run_to_the_end(command(uninterrupted))
    kill_after(command(broken), broken, step)
    assert not (broken / "final").exists()
    output = run_to_the_end(command(broken))
    assert "resumed after step" in output
    assert metrics(broken) == metrics(uninterrupted)
    weights = "final/model.safetensors"
    assert (broken / weights).read_bytes() == (uninterrupted / weights).read_bytes()


@pytest.mark.exhaustive
def test_sft(tmp_path: Path) -> None:
    """Two ranks, dropout and shuffling on, learning rate and epochs under way."""
    job = write_sft_job(tmp_path, dropout=0.2)
    (tmp_path / "config.yaml").write_text("")

    def command(folder: Path) -> list[str]:
        settings = sft_settings(
            job,
            **{
                "trainer.default_local_dir": folder,
                "trainer.n_gpus_per_node": 2,
                "trainer.total_epochs": 24,
                "trainer.save_freq": 4,
                "trainer.max_actor_ckpt_to_keep": 2,
                "trainer.test_freq": 12,
                "data.val_files": job / "rows.jsonl",
                "optim.lr_scheduler_type": "cosine",
                "optim.lr_warmup_steps": 5,
            },
        )
        config = str(tmp_path / "config.yaml")
        return [sys.executable, "-m", "hybridengine.cli", "sft", config, *settings]

    assert_resume_is_exact(tmp_path, command, step=8)


def test_grpo(tmp_path: Path) -> None:
    """With an adaptive KL controller and several optimizer steps per rollout."""

    def command(folder: Path) -> list[str]:
        return toy_job(
            tmp_path,
            **{
                "trainer.default_local_dir": folder,
                "trainer.total_training_steps": 12,
                "trainer.save_freq": 2,
                "rollout.name": "hf",
                "data.train_batch_size": 8,
                "rollout.n": 4,
                "actor.ppo_mini_batch_size": 4,
                "actor.optim.lr_scheduler_type": "linear",
                "algorithm.use_kl_in_reward": "true",
                "algorithm.kl_ctrl.type": "adaptive",
                "algorithm.kl_ctrl.kl_coef": 0.05,
                "algorithm.kl_ctrl.horizon": 100,
                "trainer.n_gpus_per_node": 1,
            },
        )

    assert_resume_is_exact(tmp_path, command, step=4)
