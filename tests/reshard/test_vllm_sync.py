"""FSDP2 ranks → real vLLM ranks: what arrives is what vLLM's own loader makes, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

PROMPTS = [[1, 5, 9, 33, 2], [7, 8, 9, 10, 11, 12, 13], [3] * 20, [97, 4]]


def build(
    path: str,
    tp_size: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    adapt=None,
    lora_rank=0,
    fsdp_size=-1,
    **options,
):
    import torch.distributed as dist

    from hybridengine.model import load_causal_lm, parameter_shards, sharding_mesh
    from hybridengine.model.checking import check_model
    from hybridengine.model.lora import adapter_shards
    from hybridengine.reshard import Resharder
    from hybridengine.reshard.record.checkpoint import checkpoint_layout
    from hybridengine.rollout.vllm.engine import VllmEngine

    checkpoint = checkpoint_layout(check_model(path))
    engine = VllmEngine(
        path,
        checkpoint,
        tp_size=tp_size,
        max_model_len=64,
        stop_token_ids=[],
        dtype=dtype,
        kv_cache_bytes=64 << 20,
        lora_rank=lora_rank,
        engine_options={"enforce_eager": True},
    )
    sliced = engine.layout.sliced_dims(checkpoint.parameters)
    model = load_causal_lm(
        path,
        mesh=sharding_mesh("cpu", dist.get_world_size(), fsdp_size),
        shard_dim1=lambda name: sliced.get(name) == 1,
        adapt=adapt,
        **options,
    )
    resharder = Resharder(
        lambda: parameter_shards(model),
        engine,
        bucket_bytes,
        lambda: adapter_shards(model),
        merge=not lora_rank,
    )
    return engine, model, resharder


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest tensor that an operator creates while it is active."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        fresh = isinstance(result, torch.Tensor) and not func._schema.is_mutable
        if fresh and not func.is_view:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def sync_body(rank: int, world_size: int, path: str, tp_size: int) -> dict:
    from hybridengine.model import parameter_shards
    from hybridengine.rollout import SamplingSpec
    from hybridengine.sharding import StaleWeightsError

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
    arrived = {name: tensor.clone() for name, tensor in engine.weights().items()}
    checkpoint = {n: p.full_tensor().to(torch.bfloat16) for n, p in parameter_shards(model).items()}
    for tensor in engine.weights().values():
        tensor.fill_(float("nan"))
    engine.load_whole(checkpoint.items())
    unequal = [n for n, t in engine.weights().items() if not torch.equal(t, arrived[n])]
    return {
        "unequal": unequal,
        "engine_tensors": len(arrived),
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
    [("llama", 2), ("llama", 4), ("qwen2", 2), ("qwen2_one_kv_head", 4)],
)
def test_engine_tensors_equal_vllms_own_loader(
    tmp_path: Path, architecture: str, world_size: int
) -> None:
    """Tied and untied embeddings, biases, grouped queries, one KV head on two TP ranks."""
    tp_size = 2
    path = save_tiny(architecture, tmp_path)
    results = run_ranks(sync_body, world_size, path, tp_size, timeout_s=240)
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


def generate_body(rank: int, world_size: int, path: str, tp_size: int) -> dict:
    from transformers import AutoModelForCausalLM

    from hybridengine.rollout import SamplingSpec

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


@pytest.mark.parametrize(("architecture", "world_size"), [("llama", 2), ("qwen2", 4)])
def test_greedy_generations_agree_with_hugging_face(
    tmp_path: Path, architecture: str, world_size: int
) -> None:
    path = save_tiny(architecture, tmp_path)
    results = run_ranks(generate_body, world_size, path, 2, timeout_s=240)
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
