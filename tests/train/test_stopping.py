"""SIGINT and SIGTERM, to the launcher or to one rank, end a run after its step and a checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hybridengine.run.errors import EXIT_STOPPED
from hybridengine.run.session import read_status
from hybridengine.train.checkpoint import find_checkpoints
from tests.forked import ForkedProcess
from tests.train.sft_job import sft_settings, write_sft_job
from tests.train.toy import start_toy, toy_job

pytestmark = pytest.mark.multirank

LIMIT_S = 240


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


Run = subprocess.Popen[str] | ForkedProcess


def wait_for_step(folder: Path, run: Run, step: int) -> None:
    """Wait until the run has logged `step`."""
    deadline, file = time.monotonic() + LIMIT_S, folder / "metrics.jsonl"
    while run.poll() is None and time.monotonic() < deadline:
        if file.is_file() and any(f'"step": {step},' in row for row in file.open()):
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step}:\n{run.communicate(timeout=5)[0]}")


def output_of(run: subprocess.Popen[str]) -> str:
    try:
        return run.communicate(timeout=LIMIT_S)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def stopped_step(output: str, name: str) -> int:
    found = re.search(rf"stopped by {name} after step (\d+) of \d+; saved .*global_step_\1", output)
    assert found, output
    assert "resumes from it" in output and "Traceback" not in output, output
    return int(found[1])


@pytest.mark.exhaustive
def test_sft_stops_resumes_and_refuses_a_second_run(tmp_path: Path) -> None:
    job, folder = write_sft_job(tmp_path), tmp_path / "run"
    (tmp_path / "config.yaml").write_text("")

    def command(*more: str) -> list[str]:
        settings = {
            "trainer.n_gpus_per_node": 2,
            "trainer.total_training_steps": 100_000,
            "trainer.max_actor_ckpt_to_keep": 1,
            "trainer.logger": "[jsonl,console]",
        }
        pairs = sft_settings(job, **settings)
        return ["hybridengine", "sft", str(tmp_path / "config.yaml"), *pairs, *more]

    alone = [sys.executable, "-m", *command()]
    run = start(alone)
    wait_for_step(folder, run, 3)
    second = subprocess.run(alone, capture_output=True, text=True, timeout=LIMIT_S)
    assert second.returncode == 2 and f"(process {run.pid} on" in second.stderr, second.stderr
    run.send_signal(signal.SIGINT)
    first = stopped_step(output := output_of(run), "SIGINT")
    assert run.returncode == EXIT_STOPPED, output
    assert [c.step for c in find_checkpoints(folder)] == [first]

    run = start(
        [sys.executable, "-m", *command("optim.weight_decay=0.5")]
    )  # one rank gets the signal
    wait_for_step(folder, run, first + 2)
    os.kill(read_status(folder)[1].pid, signal.SIGTERM)
    second_step = stopped_step(output := output_of(run), "SIGTERM")
    assert run.returncode == EXIT_STOPPED, output
    assert second_step >= first + 2
    assert f"resumed after step {first}" in output
    assert "changed since: optim.weight_decay: 0.01 → 0.5" in output

    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        *command(),
    ]
    run = start(torchrun)
    wait_for_step(folder, run, second_step + 2)
    run.send_signal(signal.SIGTERM)
    output = output_of(run)
    assert run.returncode != 0
    assert [c.step for c in find_checkpoints(folder)] > [second_step], output
    steps = [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and {*range(1, steps[-1] + 1)} == set(steps)
    assert not list(folder.glob("previous-*"))


def test_ppo_stops_after_its_step(tmp_path: Path) -> None:
    command = toy_job(tmp_path, **{"rollout.name": "hf", "trainer.total_training_steps": 10_000})
    command[command.index("grpo")] = "ppo"
    with start_toy(command) as run:
        wait_for_step(tmp_path / "run", run, 1)
        run.send_signal(signal.SIGTERM)
        output = "".join(run.communicate(timeout=LIMIT_S))
    step = stopped_step(output, "SIGTERM")
    assert run.returncode == EXIT_STOPPED, output
    assert "SIGTERM: the ranks finish their step" in output
    [checkpoint] = find_checkpoints(tmp_path / "run")
    assert checkpoint.step == step
    assert (tmp_path / "run" / "curves.png").is_file()
