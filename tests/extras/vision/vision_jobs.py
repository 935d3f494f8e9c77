"""Small GRPO jobs with images, and what has to be true of their steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.extras.vision.tiny_vision import PLACES, count_rows, save_tiny_vision
from tests.forked import run_forked
from tests.train.in_process import Result, lines_of

__all__ = ["check_steps", "run_vllm", "vision_job"]

# Of an image of a job's rows.
NUM_TOKENS = {"qwen2_vl": 9, "qwen2_5_vl": 9, "qwen3_vl": 9, "qwen3_vl_moe": 9}
NUM_TOKENS |= {"llava_onevision": 88, "internvl": 20, "gemma3": 4}
NUM_TOKENS |= {"qwen3_5": 9, "qwen3_5_moe": 9, "mistral3": 9, "gemma4": 64}
NUM_TOKENS |= {"glm4v": 9, "glm4v_moe": 9, "glm46v": 9}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = [c for c in solution_str if c.isdigit()]
    return float(digits[:1] == [ground_truth]) + len(digits) / 8
"""


def vision_job(
    folder: Path,
    kind: str = "qwen2_vl",
    text: Mapping[str, object] = MappingProxyType({}),
    **overrides: object,
) -> list[str]:
    """Write model, images, data and reward to `folder`; every step has all its rows.

    text: of `save_tiny_vision`.
    """
    rows = count_rows(folder, num_rows=6, num_texts=2)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "model.path": save_tiny_vision(kind, folder / "model", **text),
        "model.keep_vision_tower": True,
        "data.train_files": folder / "rows.jsonl",
        "data.train_batch_size": len(rows),
        "data.max_prompt_length": 112 if NUM_TOKENS[kind] > 40 else 48,
        "data.max_response_length": 4,
        "actor.ppo_mini_batch_size": len(rows) // 2,
        "actor.ppo_max_token_len_per_gpu": 512 if NUM_TOKENS[kind] > 40 else 256,
        "actor.optim.lr": 3e-3,
        "actor.fsdp_config.dtype": "float32",
        "rollout.name": "hf",
        "rollout.dtype": "float32",
        "rollout.n": 4,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.num_workers": 1,
        "trainer.total_training_steps": 3,
        "trainer.logger": "[jsonl]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "run",
        **overrides,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def check_steps(result: Result, kind: str = "qwen2_vl", largest: float = 1e-4) -> None:
    """Assert that engine and trainer agree on every token, also after updates of the tower."""
    assert not result.refused, result.refused
    assert max(row["training/rollout_probs_diff_max"] for row in result.rows) < largest
    assert max(row["actor/grad_norm"] for row in result.rows) > 0
    for line in result.rollouts["step_3"]:
        is_text = line["data_source"] == "text"
        assert ("images" in line) == (not is_text)
        # The placeholder is one token of the text, and several of the ids.
        assert line["prompt_ids"].count(100) == (0 if is_text else NUM_TOKENS[kind])
        assert line["prompt"].count(PLACES[kind]) == (0 if is_text else 1)


def run_vllm(folder: Path, job: list[str]) -> Result:
    """Run a job with vLLM in a process of its own, which vLLM's settings need."""
    (folder / "empty.yaml").write_text("")
    options = ["rollout.name=vllm", "rollout.enforce_eager=true", "rollout.kv_cache_gib=0.25"]
    command = [sys.executable, "-m", "hybridengine", "grpo", str(folder / "empty.yaml")]
    overrides = [*job, *options, "trainer.n_gpus_per_node=1"]
    run = run_forked([*command, *overrides], uses_vllm=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [r for r in lines_of(folder / "run/metrics.jsonl") if "actor/grad_norm" in r]
    rollouts = {file.stem: lines_of(file) for file in (folder / "run/rollouts").glob("*.jsonl")}
    return Result(rows, rollouts, set())
