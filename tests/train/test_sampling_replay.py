"""Sampling replay: under top-p and top-k the trainer's distribution is the engine's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hybridengine.engine.vllm.environment import vllm_available
from tests.train.in_process import Result, run_jobs, small_job
from tests.train.toy import toy_job

pytestmark = pytest.mark.multirank

TRUNCATIONS = {
    "top_p": ["rollout.top_p=0.8"],
    "top_k": ["rollout.top_k=20"],
    "both": ["rollout.top_p=0.8", "rollout.top_k=20"],
    "min_p": ["rollout.min_p=0.2"],
}
OFF = "algorithm.sampling_replay=off"
LONGER = [
    "data.max_response_length=16",
    "rollout.n=8",
    "actor.ppo_max_token_len_per_gpu=256",
]
# Each takes old log-probs, reference, metrics or rows another way through the step.
VARIANTS = {
    "old_log_probs": ["actor.ppo_epochs=2"],
    "reference": ["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"],
    "logits": ["model.use_fused_kernels=false"],
    "unshared_prompts": ["actor.shared_prefix=off"],
    "micro_batches": ["actor.ppo_max_token_len_per_gpu=24", "actor.ppo_mini_batch_size=2"],
    "sequence_level": ["actor.policy_loss.loss_mode=gspo"],
    "lora": ["model.lora_rank=4", "actor.entropy_coeff=0.1"],
    "remax": ["algorithm.adv_estimator=remax"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("jobs")
    base = [*small_job(folder), *LONGER]
    jobs = {"full": base}
    for name, truncation in TRUNCATIONS.items():
        jobs |= {name: [*base, *truncation], f"{name}_off": [*base, *truncation, OFF]}
    for name, overrides in VARIANTS.items():
        jobs[name] = [*base, *TRUNCATIONS["both"], *overrides]
    found = run_jobs(folder, list(jobs.values()))
    assert not any(result.refused for result in found)
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize("name", ["full", *TRUNCATIONS, *VARIANTS])
def test_the_ratio_of_the_first_step_is_one(results, name) -> None:
    """In float32 the engine and the trainer differ by the order of their sums."""
    first = results[name].rows[0]
    assert first["training/rollout_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["training/rollout_probs_diff_max"] < 1e-5
    assert first["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
    assert abs(first["rollout_corr/kl"]) < 1e-5
    assert first["actor/grad_norm"] > 0


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_without_replay_it_is_the_kept_part(results, name) -> None:
    replayed, off = results[name].rows[0], results[f"{name}_off"].rows[0]
    assert off["training/rollout_ratio_mean"] < 0.95
    assert off["training/rollout_probs_diff_mean"] > 0.01
    assert replayed["actor/entropy"] < off["actor/entropy"]
    fewest, most = {"top_p": (1, 100), "top_k": (20, 20), "both": (1, 20), "min_p": (1, 100)}[name]
    assert fewest <= replayed["num_kept/min"] <= replayed["num_kept/max"] <= most
    assert "num_kept/mean" not in off
    texts = [
        [row["response_ids"] for row in r.rollouts["step_1"]]
        for r in (results[name], results[f"{name}_off"])
    ]
    assert texts[0] == texts[1], "recording does not change what is sampled"


def test_a_kl_of_equal_models_is_zero_over_the_kept_entries(results) -> None:
    """The reference is the policy before its first step, over the same entries."""
    first = results["reference"].rows[0]
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-5)
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)


def test_kept_entries_follow_their_tokens_to_other_ranks(tmp_path: Path) -> None:
    """Two replicas, one of which gets more than it generated; rows of a sequence on two ranks."""
    ranks = ["trainer.n_gpus_per_node=2", "actor.ppo_max_token_len_per_gpu=64"]
    base = [*small_job(tmp_path), *LONGER, *TRUNCATIONS["both"], *ranks]
    one_prompt = ["data.train_batch_size=1"]  # one of the engines generates nothing
    shared_rows = ["actor.ulysses_sequence_parallel_size=2"]
    jobs = [base, [*base, *one_prompt], [*base, *shared_rows]]
    for result in run_jobs(tmp_path, jobs, world_size=2):
        assert not result.refused
        assert result.last["training/rollout_ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert result.last["training/rollout_probs_diff_max"] < 1e-5
        assert 1 <= result.last["num_kept/min"] <= result.last["num_kept/max"] <= 20


@pytest.mark.exhaustive
@pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it")
def test_the_ratio_is_one_with_vllm(tmp_path: Path) -> None:
    """In bfloat16 engine and trainer differ by their kernels' rounding: 1 on average."""
    command = toy_job(
        tmp_path,
        **{
            "rollout.name": "vllm",
            "rollout.top_p": 0.8,
            "rollout.top_k": 20,
            "rollout.tensor_model_parallel_size": 2,
            "data.max_response_length": 16,
            "trainer.total_training_steps": 1,
            "trainer.logger": "[jsonl]",
        },
    )
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["training/rollout_ratio_mean"] == pytest.approx(1, abs=2e-3)
    assert row["training/rollout_probs_diff_mean"] < 0.01
