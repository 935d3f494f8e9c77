"""N uninterrupted steps equal k steps, SIGKILL, and the rest resumed: all weights and metrics."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hybridengine.train.checkpoint import find_checkpoints
from tests.ranks import Ranks, run_ranks
from tests.train.checkpoint.runs import metrics
from tests.train.sft_job import sft_settings, write_sft_job
from tests.train.toy import toy_job

pytestmark = pytest.mark.multirank


def wait_for_checkpoint(folder: Path, step: int, is_running: Callable[[], bool]) -> None:
    """Wait until a job that is running has saved `step`."""
    deadline = time.monotonic() + 200
    while not any(c.step >= step for c in find_checkpoints(folder)):
        assert is_running() and time.monotonic() < deadline
        time.sleep(0.02)
    assert is_running(), "the job ended before it could be killed"


def assert_resume_is_exact(
    tmp_path: Path, run: Callable[[Path], str], kill: Callable[[Path], None]
) -> None:
    """run: the job in a folder, and return its output; kill: it, some time after a checkpoint."""
    uninterrupted, broken = tmp_path / "uninterrupted", tmp_path / "broken"
    run(uninterrupted)
    kill(broken)
    assert not (broken / "final").exists()
    assert "resumed after step" in run(broken)
    assert metrics(broken) == metrics(uninterrupted)
    weights = "final/model.safetensors"
    assert (broken / weights).read_bytes() == (uninterrupted / weights).read_bytes()


@pytest.mark.exhaustive
def test_sft(tmp_path: Path) -> None:
    """Two ranks, dropout and shuffling on, learning rate and epochs under way; the command line."""
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
        return [sys.executable, "-m", "hybridengine", "sft", config, *settings]

    def run(folder: Path) -> str:
        ended = subprocess.run(command(folder), capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def kill(folder: Path) -> None:
        """End every process of the job."""
        job = subprocess.Popen(
            command(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for_checkpoint(folder, 8, lambda: job.poll() is None)
        finally:
            files = (folder / ".status").glob("rank_*.json")
            for pid in (job.pid, *(json.loads(file.read_text())["pid"] for file in files)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job.wait()

    assert_resume_is_exact(tmp_path, run, kill)


def train(rank: int, world_size: int, folder: Path, overrides: list[str]) -> str:
    """Run a GRPO job; return what it printed."""
    from hybridengine.run.config import load_config
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.rl import RLTrainer

    config = load_config(None, [*overrides, f"trainer.default_local_dir={folder}"])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        RLTrainer(config, Session(PhaseStatus(folder, rank))).train()
    return printed.getvalue()


def test_grpo(tmp_path: Path) -> None:
    """With an adaptive KL controller and several optimizer steps per rollout."""
    command = toy_job(
        tmp_path,
        **{
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
    overrides = [o for o in command if "=" in o and "default_local_dir" not in o]

    def run(folder: Path) -> str:
        return run_ranks(train, 1, folder, overrides)[0]

    def kill(folder: Path) -> None:
        with Ranks(train, 1, folder, overrides) as ranks:
            wait_for_checkpoint(folder, 2, ranks.processes[0].is_alive)

    assert_resume_is_exact(tmp_path, run, kill)
