"""A toy job from scratch: answer each of four prompts with words of its own quarter."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked import ForkedProcess
from tests.tiny_models import save_tiny
from tests.train.processes import WITHIN_S, pid_of_training_rank

__all__ = ["assert_named_when_killed", "start_toy", "toy_job"]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = [int(word[1:]) for word in solution_str.split() if word.startswith("w")]
    low, high = ground_truth
    return sum(low <= word < high for word in words) / max(1, len(words))
"""


def toy_job(folder: Path, **overrides: object) -> list[str]:
    """Write model, data, reward and config to `folder`; returns the command that runs the job."""
    model = save_tiny("llama", folder / "model")
    quarters = [(3, 27), (27, 51), (51, 76), (76, 101)]
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"w{10 * (k + 1)} w{5 + k}"}],
            "reward_model": {"ground_truth": quarter},
        }
        for k, quarter in enumerate(quarters)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "model.path": model,
        "data.train_files": str(folder / "prompts.jsonl"),
        "data.train_batch_size": 16,
        "data.max_prompt_length": 8,
        "data.max_response_length": 4,
        "actor.ppo_max_token_len_per_gpu": 2048,
        "actor.optim.lr": 2e-3,
        "rollout.n": 8,
        "rollout.enforce_eager": True,
        "reward.custom_reward_function.path": str(folder / "reward.py"),
        "trainer.n_gpus_per_node": 2,
        "trainer.default_local_dir": str(folder / "run"),
        **overrides,
    }
    (folder / "config.yaml").write_text("")
    pairs = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "hybridengine", "grpo", str(folder / "config.yaml"), *pairs]


@contextmanager
def start_toy(command: list[str]) -> Iterator[ForkedProcess]:
    """Start a job without vLLM; its launcher does not outlive the block."""
    run = ForkedProcess(command)
    try:
        yield run
    finally:
        run.kill_all()


def assert_named_when_killed(folder: Path, settings: dict[str, object], role: str) -> None:
    """Kill rank 1, a `role`, in the middle of a step: the last line of the output names it."""
    with start_toy(toy_job(folder, **settings)) as run:
        pid = pid_of_training_rank(folder / "run", rank=1)
        os.kill(pid, signal.SIGKILL)
        output = "".join(run.communicate(timeout=WITHIN_S))
    assert run.returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith(f"error: rank 1 ({role}, pid {pid}) was killed by SIGKILL in"), output


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Return what the steps of the run at `folder` have measured, without times."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kinds = ("actor/", "critic/", "training/", "response", "prompt")
    return [
        {name: value for name, value in row.items() if name.startswith(kinds)}
        for row in rows
        if "actor/kl_loss" in row
    ]
