"""LoRA on FSDP2 ranks → real vLLM ranks: merged weights bit for bit, the frozen base sent once."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.reshard.test_vllm_sync import LargestAllocation, build
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

BUCKET = 1 << 14


def merged_in_float64(base: dict, adapters: dict) -> dict:
    """The checkpoint the engine should hold: every weight formed whole, then cast."""
    whole = {name: p.full_tensor() for name, p in base.items()}
    for name, adapter in adapters.items():
        left, right = adapter.left.full_tensor(), adapter.right.full_tensor()
        delta = adapter.scale * (left.double() @ right.double())
        whole[name] = (whole[name].double() + delta).float()
    return {name: tensor.to(torch.bfloat16) for name, tensor in whole.items()}


def unequal(engine, checkpoint: dict) -> list[str]:
    """Engine tensors that differ from what vLLM's own loader makes of `checkpoint`."""
    arrived = {name: tensor.clone() for name, tensor in engine.weights().items()}
    for tensor in engine.weights().values():
        tensor.fill_(float("nan"))
    engine.load_whole(checkpoint.items())
    return [n for n, t in engine.weights().items() if not torch.equal(t, arrived[n])]


def sync_body(rank: int, world_size: int, path: str, tp_size: int) -> dict:
    from hybridengine.model import parameter_shards
    from hybridengine.model.lora import adapter_shards, apply_lora

    engine, model, resharder = build(
        path, tp_size, torch.bfloat16, BUCKET, adapt=lambda m: apply_lora(m, 4, 6.0)
    )
    base, adapters = parameter_shards(model), adapter_shards(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    reports, wrong, largest = [], [], LargestAllocation()
    for version in range(1, 5):
        with torch.no_grad():
            for p in trained:
                p.add_(0.1 * version)
            if version == 4:
                model.get_input_embeddings().weight.mul_(
                    0.5
                )  # the base is not as frozen as it says
        with contextlib.nullcontext() if version == 3 else largest:
            reports.append(resharder.sync(version, verify=version == 3))
        wrong.append(unequal(engine, merged_in_float64(base, adapters)))
    adapted = {c.source for c in engine.layout.copies} & adapters.keys()
    return {
        "wrong": wrong,
        "received": [r.bytes_received for r in reports],
        "sent": [r.bytes_sent for r in reports],
        "planned": resharder.plan.bytes_sent[rank],
        "staging": resharder.plan.staging_bytes,
        "largest": largest.bytes,
        "buckets": len(resharder.plan.buckets),
        "adapted": len(adapted),
        "trained": {p.dtype for p in trained},
        "adapters": len(adapters),
    }


@pytest.mark.parametrize(("architecture", "world_size"), [("llama", 4), ("qwen2", 2)])
def test_merged_weights_and_a_base_that_moves_once(
    tmp_path: Path, architecture: str, world_size: int
) -> None:
    """Row- and column-sharded weights, tied and untied embeddings, biases."""
    path = save_tiny(architecture, tmp_path)
    results = run_ranks(sync_body, world_size, path, 2, timeout_s=240)
    for result in results:
        assert result["wrong"] == [[], [], [], []]
        assert result["adapted"] == result["adapters"] == 14
        assert result["trained"] == {torch.float32}
        first, second, third, written = result["sent"]
        assert first == written == result["planned"], "a base that was written to moves again"
        assert second == third <= first
        assert result["staging"] <= BUCKET and result["buckets"] > 2
        assert result["largest"] <= 2 * BUCKET  # the float64 sums of a float32 slab
    saved = sum(r["received"][0] - r["received"][1] for r in results)
    assert saved > 0, "embeddings, norms and biases were moved again"
