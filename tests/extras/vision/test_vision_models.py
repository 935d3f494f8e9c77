"""Critic, teacher and reward model read the images that the policy reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Gemma3ForSequenceClassification

from hybridengine.run.config import ConfigError, load_config
from hybridengine.run.errors import ModelError
from hybridengine.train.preflight import check_job
from hybridengine.vision import EncodedImage, load_image_preparer
from tests.extras.remote.overlapped import run_named
from tests.extras.vision.tiny_vision import save_tiny_vision
from tests.extras.vision.tool_jobs import tool_job
from tests.extras.vision.vision_jobs import check_steps, vision_job
from tests.extras.vision.vision_models import IMAGE
from tests.train.in_process import Result, run_jobs

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

GAE = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-2")


def losses_of(result: Result, name: str) -> list[float]:
    assert not result.refused, result.refused
    return [row[name] for row in result.rows if name in row]


@pytest.mark.exhaustive
def test_a_critic_is_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    job = [*vision_job(tmp_path), *GAE]
    one, plain = run_jobs(tmp_path, [job, [*job, "actor.shared_prefix=off"]])
    [two] = run_jobs(tmp_path, [[*job, "trainer.n_gpus_per_node=2"]], world_size=2)
    check_steps(one)
    check_steps(two)
    losses = losses_of(one, "critic/vf_loss")
    assert len(losses) == 3 and min(losses) > 0
    assert losses == pytest.approx(losses_of(plain, "critic/vf_loss"), rel=1e-3)
    assert min(losses_of(two, "critic/grad_norm")) > 0


def test_a_critic_on_ranks_of_its_own_reads_images_of_prompts_and_tools(tmp_path: Path) -> None:
    jobs = {"together": GAE, "apart": (*GAE, "critic.n_gpus_per_node=1")}
    results = run_named(tmp_path, tool_job(tmp_path), jobs, num_ranks=2)
    together, apart = (losses_of(results[name], "critic/vf_loss") for name in jobs)
    assert together == apart and len(apart) == 2 and min(apart) > 0
    rows = results["apart"].rollouts["step_1"]
    assert any(len(row.get("images", ())) > 1 for row in rows), "images of tools"


def test_a_teacher_reads_images(tmp_path: Path) -> None:
    teacher = save_tiny_vision("qwen2_vl", tmp_path / "teacher", seed=1)
    base = vision_job(tmp_path)
    itself, other = run_jobs(
        tmp_path,
        [
            [*base, f"algorithm.distill.teacher_path={path}", "trainer.total_training_steps=2"]
            for path in (tmp_path / "model", teacher)
        ],
    )
    # The teacher with the student's weights has its distribution, so it has read the same.
    assert losses_of(itself, "actor/distill_loss")[0] < 1e-6
    assert min(losses_of(other, "actor/distill_loss")) > 1e-3


def classifier(folder: Path) -> str:
    """Write Gemma 3 with a score for a head, and its processor."""
    save_tiny_vision("gemma3", folder, seed=2)
    model = Gemma3ForSequenceClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return str(folder)


def test_scores_of_a_reward_model_are_the_classifiers(tmp_path: Path) -> None:
    path = classifier(tmp_path / "classifier")
    job = [
        *vision_job(tmp_path, "gemma3"),
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={path}",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
    ]
    [result] = run_jobs(tmp_path, [job], world_size=2)
    assert not result.refused, result.refused
    model = Gemma3ForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    preparer = load_image_preparer(AutoConfig.from_pretrained(path), path, {})
    assert preparer is not None
    scores = set[float]()
    for row in result.rollouts["step_1"]:
        if {IMAGE, 0} & {*row["response_ids"]}:  # sampled; an image, and padding, for transformers
            continue
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        images = [
            preparer.inputs(EncodedImage.of_file("test", Path(name)))
            for name in row.get("images", ())
        ]
        tensors = preparer.image_format.join(images) if images else {}
        types = preparer.image_format.token_types(ids == IMAGE)
        with torch.no_grad():
            score = float(model(ids, **tensors, **types).logits)
        assert row["reward_model"] == pytest.approx(score, abs=1e-4)  # sums in another order
        scores.add(round(score, 4))
    assert len(scores) > 8


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("gemma3", ["rollout.name=vllm"], "vLLM's attention on CPUs is causal, .* rollout.name=hf"),
        ("gemma4", ["rollout.name=vllm"], "vLLM's attention on CPUs is causal, .* rollout.name=hf"),
        ("internvl", ["rollout.servers=[http://127.0.0.1:1]"], "writes further tokens around"),
        ("mistral3", ["rollout.servers=[http://127.0.0.1:1]"], "writes further tokens around"),
        ("qwen2_vl", ["actor.ulysses_sequence_parallel_size=2"], "does not support; leave it out"),
    ],
)
def test_settings_that_images_exclude(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if overrides == ["rollout.name=vllm"]:
        pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    job = [*vision_job(tmp_path, kind), "trainer.n_gpus_per_node=2", *overrides]
    if overrides[0].startswith("rollout.servers"):
        job.append("rollout.name=auto")
    with pytest.raises(ConfigError, match=f"line 1, image 0: the data has images.*{message}"):
        check_job(load_config(None, job))


def test_a_family_without_a_class_of_vllm_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    job = load_config(None, [*vision_job(tmp_path, "glm46v"), "rollout.name=vllm"])
    with pytest.raises(ModelError, match=r"no model Glm46V.*'glm46v'; set rollout.name=hf"):
        check_job(job)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma4", "mistral3"])
def test_a_language_model_that_is_trained_alone_takes_no_images(tmp_path: Path, kind: str) -> None:
    settings = {"model.keep_vision_tower": False, "actor.freeze_vision_tower": True}
    with pytest.raises(ConfigError) as error:
        check_job(load_config(None, vision_job(tmp_path, kind, **settings)))
    assert re.search(r"has no vision tower.*set model.keep_vision_tower=true", str(error.value))
    assert re.search(r"line 1 has 1 images.*keep_vision_tower is false", str(error.value))


def test_models_that_prepare_images_otherwise_are_refused(tmp_path: Path) -> None:
    base = vision_job(tmp_path)
    teacher = Path(save_tiny_vision("qwen2_vl", tmp_path / "teacher"))
    file = teacher / "preprocessor_config.json"
    size = {"shortest_edge": 64, "longest_edge": 256}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": size}))
    [refused] = run_jobs(tmp_path, [[*base, f"algorithm.distill.teacher_path={teacher}"]])
    assert "rows.jsonl, line 1, image 0: the data has images" in refused.refused
    assert f"algorithm.distill.teacher_path={teacher} does not support; give" in refused.refused
