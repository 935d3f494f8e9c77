"""Router replay in jobs: routes from the engine, or from the pass of the old log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.moe.routes import decode_routes
from tests.extras.remote.overlapped import run_overlapped
from tests.ranks import run_ranks
from tests.train.in_process import lines_of, moe_job, run_jobs, run_with_vllm, small_job

pytestmark = pytest.mark.multirank

OLD = "actor.router_replay=old"
REPLAY = "actor.router_replay=rollout"


@pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it")
@pytest.mark.parametrize(
    "kind", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)]
)
def test_the_routes_of_the_engine_arrive_with_their_tokens(tmp_path: Path, kind: str) -> None:
    """In float32 they are the trainer's own but for ties: any other order would show.

    Two ranks, of which each generates; micro-batches with shared prompts; old log-probs, a
    reference, two epochs of updates, recomputed layers. gpt_oss also has attention sinks, which
    the update changes.
    """
    job = [
        *moe_job(tmp_path, kind),
        REPLAY,
        "rollout.name=vllm",
        "rollout.kv_cache_gib=0.01",
        "trainer.n_gpus_per_node=2",
        "data.max_response_length=16",
        "actor.ppo_max_token_len_per_gpu=48",
        "actor.ppo_epochs=2",
        "actor.optim.lr=1e-6",
        "actor.use_kl_loss=true",
        "model.enable_gradient_checkpointing=true",
        "trainer.rollout_freq=1",
    ]
    run_ranks(run_with_vllm, 2, tmp_path, job, timeout_s=500)
    final = tmp_path / "run" / "final"
    row = lines_of(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["routing/replayed_tokens"] == 1, "that without a record, the last one, is not packed"
    assert row["routing/mismatched_routes"] <= row["routing/mismatched_tokens"] < 0.01
    assert row["training/rollout_probs_diff_max"] < 1e-4
    assert row["perf/shared_tokens_saved"] > 0
    assert row["actor/kl_loss"] == pytest.approx(0, abs=1e-4), "the reference replays as well"
    before, after = (load_file(f / "model.safetensors") for f in (tmp_path / "moe", final))
    sinks = [name for name in before if name.endswith("sinks")]
    assert len(sinks) == (2 if kind == "gpt_oss" else 0)
    assert all((before[name] != after[name]).all() for name in sinks)
    for line in lines_of(tmp_path / "run" / "rollouts" / "step_1.jsonl"):
        routes = decode_routes(line["routed_experts"], 2, 2)
        assert len(routes) == len(line["prompt_ids"]) + len(line["response_ids"]) - 1
        assert set(np.unique(routes)) <= set(range(4)) and (routes[..., 0] != routes[..., 1]).all()


@pytest.mark.exhaustive
@pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it")
def test_the_routes_arrive_from_other_ranks(tmp_path: Path) -> None:
    """A tensor-parallel engine on two ranks beside a trainer, whose updates it is behind."""
    settings = {
        "rollout.name": "vllm",
        "rollout.kv_cache_gib": 0.05,
        "rollout.n_gpus_per_node": 2,
        "rollout.tensor_model_parallel_size": 2,
        "trainer.mode": "async",
        "trainer.total_training_steps": 3,
    }
    job = [*moe_job(tmp_path), REPLAY, *(f"{key}={value}" for key, value in settings.items())]
    job = [f"{k}={v}" for k, v in dict(o.split("=", 1) for o in job).items()]
    [run] = run_overlapped(tmp_path, [job], num_ranks=3)
    assert not run.refused
    rows = [row for row in run.rows if "actor/pg_loss" in row]
    assert len(rows) == 3 and all(row["routing/replayed_tokens"] > 0.7 for row in rows)
    assert rows[0]["routing/mismatched_routes"] < 0.01
    assert rows[0]["training/rollout_probs_diff_max"] < 1e-4
    assert rows[2]["routing/mismatched_routes"] > 0, "the routers have moved on"


def test_the_routes_of_the_old_log_probs_are_replayed(tmp_path: Path) -> None:
    """With a learning rate that moves the routers; with none the update has the same routes."""
    base = [*moe_job(tmp_path), "actor.ppo_epochs=3", "actor.ppo_max_token_len_per_gpu=48"]
    still = "actor.optim.lr=1e-12"
    names = ["off", "old", "off_still", "old_still", "one_step"]
    jobs = [
        base,
        [*base, OLD],
        [*base, still],
        [*base, OLD, still],
        [*base, OLD, "actor.ppo_epochs=1"],
    ]
    results = dict(zip(names, run_jobs(tmp_path, jobs), strict=True))
    assert not any(r.refused for r in results.values())
    assert "routing/replayed_tokens" not in results["off"].last
    assert results["old"].last["routing/replayed_tokens"] == 1
    assert results["old"].last["routing/mismatched_tokens"] > 0
    assert results["old_still"].last["routing/mismatched_tokens"] == 0
    numbers = ("actor/pg_loss", "actor/grad_norm", "actor/entropy")
    for name in numbers:
        assert results["old_still"].last[name] == results["off_still"].last[name], "bit-equal"
    assert results["old"].last["actor/grad_norm"] != results["off"].last["actor/grad_norm"]
    assert "routing/replayed_tokens" not in results["one_step"].last, "there is nothing to replay"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([REPLAY, "rollout.name=hf"], "rollout.name=hf records no routes"),
        ([REPLAY, "rollout.servers=[http://10.0.0.5:8000]"], "answer without routed experts"),
        ([OLD, "model.compile=true"], "model.compile makes one graph"),
        ([OLD, "algorithm.rollout_correction.bypass_mode=true"], "no routes are recorded"),
        ([OLD, "algorithm.distill.teacher_path=t"], "no routes are recorded"),
    ],
)
def test_refused_combinations(overrides: list[str], words: str) -> None:
    from hybridengine.run.config import ConfigError, load_config

    with pytest.raises(ConfigError, match=words):
        load_config(None, ["model.path=m", "data.train_files=t.jsonl", *overrides])


def test_off_is_a_word_and_yamls_boolean() -> None:
    from hybridengine.run.config import load_config

    needed = ["model.path=m", "data.train_files=t.jsonl"]
    assert load_config(None, [*needed, "actor.router_replay=off"]).actor.router_replay == "off"


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    [result] = run_jobs(tmp_path, [[*small_job(tmp_path), OLD]])
    assert "LlamaForCausalLM has no module `experts`" in result.refused
