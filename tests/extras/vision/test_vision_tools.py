"""Tools that return images: trajectories whose turns have images, in every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.vision.tool_jobs import tool_job
from tests.extras.vision.vision_jobs import run_vllm
from tests.train.in_process import Result, run_jobs

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def check_trajectories(result: Result) -> None:
    assert not result.refused, result.refused
    assert max(row["training/rollout_probs_diff_max"] for row in result.rows) < 1e-4
    rows = result.rollouts["step_2"]
    for row in rows:
        own = [image for image in row.get("images", ()) if image.startswith("sha256:")]
        seen = [turn for turn in row["turns"] if turn["role"] == "tool" and turn["tokens"]]
        assert all(turn["content"] == "seen" for turn in seen)
        assert len(own) <= len(seen)  # the last result may have left no room for a turn
        tool_ids = [i for i, s in zip(row["response_ids"], row["sampled"], strict=True) if not s]
        assert tool_ids.count(98) == len(own)  # <|vision_end|>, one for each image
    assert any(len(row.get("images", ())) > 1 for row in rows)


def test_images_of_tools_reach_the_ranks_that_train(tmp_path: Path) -> None:
    job = [*tool_job(tmp_path), "trainer.n_gpus_per_node=2"]
    two_at_once = [*job, "rollout.multi_turn.max_parallel_calls=2"]
    two_at_once += ["trainer.total_training_steps=1"]
    trained, broken = run_jobs(tmp_path, [job, two_at_once], world_size=2)
    check_trajectories(trained)
    assert not broken.refused, broken.refused
    assert broken.last["agent_loop/tool_errors"] > 0
    assert broken.last["training/rollout_probs_diff_max"] < 1e-4


def test_images_of_tools_through_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    job = tool_job(tmp_path, **{"data.mm_processor_kwargs": "{max_pixels: 256}"})
    check_trajectories(run_vllm(tmp_path, job))
