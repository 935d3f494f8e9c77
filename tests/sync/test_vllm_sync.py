"""FSDP2 ranks → real vLLM ranks: what arrives is what vLLM's own loader makes, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.sync.vllm_engines import PROMPTS, LargestAllocation, build, unequal
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def sync_body(rank: int, world_size: int, path: str, tp_size: int) -> dict:
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import parameter_shards
    from hybridengine.sync.weight_target import StaleWeightsError

    engine, model, resharder = build(path, tp_size, torch.bfloat16, bucket_bytes=4096)
    with pytest.raises(StaleWeightsError, match="Run sync"):
        engine.generate(PROMPTS, SamplingSpec(max_tokens=2), seed=0)
    reports = []
    for version in (1, 2):
        with torch.no_grad():  # a training step: the second sync must carry the new values
            for parameter in model.parameters():
                parameter.mul_(-1.5).add_(0.01)
        with LargestAllocation() as largest:
            reports.append(resharder.sync(version))
    checkpoint = {n: p.full_tensor().to(torch.bfloat16) for n, p in parameter_shards(model).items()}
    return {
        "unequal": unequal(
            engine.target.weights(), lambda: engine.target.load_full(checkpoint.items())
        ),
        "engine_tensors": len(engine.target.weights()),
        "received": [r.bytes_received for r in reports],
        "lower_bound": resharder.plan.lower_bound[rank],
        "planned": resharder.plan.bytes_received[rank],
        "largest_allocation": largest.bytes,
        "largest_parameter": max(2 * p.numel() for p in model.parameters()),
        "staging": resharder.plan.staging_bytes,
        "buckets": len(resharder.plan.buckets),
        "fallback": resharder.plan.fallback,
        "version": engine.weight_version,
        "tp": (engine.tp_rank, engine.replica),
    }


@pytest.mark.parametrize(
    ("architecture", "world_size"),
    [
        ("llama", 2),
        pytest.param("llama", 4, marks=pytest.mark.exhaustive),
        ("qwen2", 2),
        ("qwen2_one_kv_head", 4),
    ],
)
def test_engine_tensors_equal_vllms_own_loader(
    tmp_path: Path, architecture: str, world_size: int
) -> None:
    """Tied and untied embeddings, biases, grouped queries, one KV head on two TP ranks."""
    tp_size = 2
    path = save_tiny(architecture, tmp_path)
    results = run_ranks(sync_body, world_size, path, tp_size, timeout_s=500)
    for rank, result in enumerate(results):
        assert result["unequal"] == []
        assert result["engine_tensors"] >= 10
        assert result["fallback"] == {}
        assert result["received"] == [result["planned"]] * 2
        assert result["planned"] == result["lower_bound"], "a rank received what it already had"
        assert 0 < result["largest_allocation"] <= 4096 < result["largest_parameter"]
        assert result["staging"] <= 4096 and result["buckets"] > 1
        assert result["version"] == 2
        assert result["tp"] == (rank // (world_size // tp_size), rank % (world_size // tp_size))


def divided_body(rank: int, world_size: int, path: str) -> list[str]:
    from hybridengine.model import parameter_shards

    engine, model, resharder = build(path, 2, torch.bfloat16, 1 << 16, expert_parallel_size=2)
    resharder.sync(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5).add_(0.01)
    resharder.sync(2, verify=True)
    checkpoint = {n: p.full_tensor().to(torch.bfloat16) for n, p in parameter_shards(model).items()}
    load = partial(engine.target.load_full, checkpoint.items())
    return unequal(engine.target.weights(), load)


def test_experts_that_are_divided_over_ranks(tmp_path: Path) -> None:
    """Shards of experts and of their second dimension, into engines that slice the latter."""
    path = save_tiny("qwen3_moe", tmp_path)
    assert run_ranks(divided_body, 4, path, timeout_s=500) == [[]] * 4


def generate_body(rank: int, world_size: int, path: str, tp_size: int) -> dict:
    from transformers import AutoModelForCausalLM

    from hybridengine.engine.interface import SamplingSpec

    engine, _, resharder = build(path, tp_size, torch.float32, bucket_bytes=1 << 20)
    resharder.sync(1)
    greedy = engine.generate(PROMPTS, SamplingSpec(temperature=0, max_tokens=12), seed=0)
    sampled = [
        engine.generate(PROMPTS, SamplingSpec(n=3, temperature=0.7, max_tokens=6), seed=s)
        for s in (5, 5, 6)
    ]
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected, gap = [], 0.0
    for prompt, completions in zip(PROMPTS, greedy, strict=True):
        ids = torch.tensor([prompt])
        out = hf.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
        assert len(completions) == 1
    for prompt, completions in zip(PROMPTS, sampled[0], strict=True):
        for c in completions:
            logits = hf(torch.tensor([prompt + c.token_ids])).logits[0, len(prompt) - 1 : -1]
            want = torch.log_softmax(logits / 0.7, -1).gather(
                -1, torch.tensor(c.token_ids)[:, None]
            )
            gap = max(gap, (want[:, 0] - torch.tensor(c.log_probs)).abs().max().item())
    return {
        "greedy": [c[0].token_ids for c in greedy],
        "hf": expected,
        "sampled": [[c.token_ids for group in s for c in group] for s in sampled],
        "log_prob_gap": gap,
    }


@pytest.mark.parametrize(
    ("architecture", "world_size"),
    [("llama", 2), pytest.param("qwen2", 4, marks=pytest.mark.exhaustive)],
)
def test_greedy_generations_agree_with_hugging_face(
    tmp_path: Path, architecture: str, world_size: int
) -> None:
    path = save_tiny(architecture, tmp_path)
    results = run_ranks(generate_body, world_size, path, 2, timeout_s=500)
    for result in results:
        assert result["greedy"] == result["hf"]
        # float32 on both sides; the sums run in another order over two tensor-parallel halves
        assert result["log_prob_gap"] < 1e-4
        assert result["sampled"][0] == result["sampled"][1] != result["sampled"][2]
    replicas = world_size // 2
    for rank, result in enumerate(results):
        same = results[rank % replicas]["sampled"]
        assert result["sampled"] == same, "TP ranks must sample as one"
    if replicas > 1:
        assert results[0]["sampled"] != results[1]["sampled"], "replicas repeat each other"
