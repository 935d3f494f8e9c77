"""GRPO with images: engine and trainer read the same tokens and pixels."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.engine.response import Response
from hybridengine.run.errors import RolloutError
from hybridengine.train.rollouts import MultiTurn, Rollouts, ScoredResponse
from hybridengine.vision import EncodedImage
from tests.extras.vision.vision_jobs import NUM_TOKENS, check_steps, vision_job
from tests.train.in_process import run_jobs


@pytest.mark.slow
@pytest.mark.multirank
def test_plain_generate_and_trainer_agree(tmp_path: Path) -> None:
    job = vision_job(tmp_path)
    shared, plain = run_jobs(tmp_path, [job, [*job, "actor.shared_prefix=off"]])
    check_steps(shared)
    check_steps(plain)
    for ours, other in zip(shared.rows, plain.rows, strict=True):
        assert ours["critic/score/mean"] == other["critic/score/mean"]
        assert ours["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)
    assert shared.last["perf/shared_tokens_saved"] > 0


LIKE_OTHERS = {"qwen2_5_vl", "qwen3_5_moe", "glm4v_moe", "glm46v"}


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "kinds",
    [
        sorted(NUM_TOKENS.keys() - LIKE_OTHERS - {"qwen2_vl"}),
        pytest.param(sorted(LIKE_OTHERS), marks=pytest.mark.exhaustive),
    ],
    ids=["different", "alike"],
)
def test_plain_generate_of_other_families(tmp_path: Path, kinds: list[str]) -> None:
    """In batches that are padded on the left; Gemma has a sliding window of six keys.

    `final/` is read again by transformers, with the tower.
    """
    jobs = []
    for kind in kinds:
        (tmp_path / kind).mkdir()
        job = vision_job(tmp_path / kind, kind)
        jobs.append([*job, f"trainer.default_local_dir={tmp_path / 'run'}"])
    for kind, result in zip(kinds, run_jobs(tmp_path, jobs), strict=True):
        check_steps(result, kind)
        assert result.last["perf/shared_tokens_saved"] > 0, kind
        assert "final/preprocessor_config.json" in result.files, kind


@pytest.mark.slow
@pytest.mark.multirank
def test_images_move_with_responses_to_other_ranks(tmp_path: Path) -> None:
    job = vision_job(tmp_path)
    [result] = run_jobs(tmp_path, [[*job, "trainer.n_gpus_per_node=2"]], world_size=2)
    check_steps(result)


def test_a_job_of_text_refuses_images_of_tools() -> None:
    image = EncodedImage("tool 'look'", sha256="0")
    response = Response([5], [0.0], "stop")
    rollouts = Rollouts(
        None, None, [ScoredResponse(response, multi_turn=MultiTurn(images=[image]))]
    )
    rollouts.check_images(supported=True)
    with pytest.raises(RolloutError, match="tool 'look' returned an image"):
        rollouts.check_images(supported=False)
