"""Images through vLLM: log-probs of engine and trainer agree, and other tokens are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.in_process import Result, lines_of
from tests.vision.vision_jobs import check_steps, vision_job

pytestmark = [pytest.mark.multirank, pytest.mark.slow]
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def _run(folder: Path, job: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "empty.yaml").write_text("")
    command = [sys.executable, "-m", "hybridengine.cli", "grpo", str(folder / "empty.yaml"), *job]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_vllm_and_trainer_agree(tmp_path: Path) -> None:
    job = vision_job(
        tmp_path,
        **{
            "rollout.name": "vllm",
            "rollout.enforce_eager": True,
            "rollout.kv_cache_gib": 0.25,
            "trainer.n_gpus_per_node": 1,
        },
    )
    run = _run(tmp_path, job)
    assert run.returncode == 0, run.stdout + run.stderr
    folder = tmp_path / "run"
    rows = [row for row in lines_of(folder / "metrics.jsonl") if "actor/grad_norm" in row]
    rollouts = {"step_3": lines_of(folder / "rollouts" / "step_3.jsonl")}
    check_steps(Result(rows, rollouts, set()))
