"""Models of 70B and 671B parameters, planned from their configurations: nothing is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def plan_one(folder: str, config, world_size: int, tp_size: int) -> dict[str, object]:
    """The layers that recording one model loaded, and its plan at `world_size` ranks."""
    from hybridengine.lab.layouts import record_engine_layouts
    from hybridengine.sync import loader
    from hybridengine.sync.planner import build_plan
    from hybridengine.sync.shards import ShardSpec

    path = Path(folder) / type(config).__name__
    config.save_pretrained(path)
    loaded, record = [], loader.record_layout

    def counted(model, load_weights, tensors, *args):
        loaded.append({loader.split_layer(name)[1] for name in tensors} - {None})
        return record(model, load_weights, tensors, *args)

    loader.record_layout = counted
    try:
        shapes, layouts = record_engine_layouts(str(path), tp_size)
    finally:
        loader.record_layout = record
    holders = tuple((rank,) for rank in range(world_size))
    sources = {n: ShardSpec.along(s, torch.float32, 0, holders) for n, s in shapes.items()}
    plan = build_plan(sources, [layouts[r * tp_size // world_size] for r in range(world_size)])
    return {
        "loaded": loaded,
        "exact": plan.bytes_received == plan.lower_bound,
        "needed": sum(plan.bytes_needed) * tp_size // world_size,
        "engine": 2 * sum(torch.Size(s).numel() for s in shapes.values()),
        "sources": len(shapes),
        "classes": len(set(plan.source_classes.values())),
        "staged": plan.staging_bytes,
        "fallback": plan.fallback,
    }


def plan_both(rank: int, world_size: int, folder: str) -> dict[str, dict[str, object]]:
    import torch.distributed as dist
    from transformers import DeepseekV3Config, LlamaConfig

    dist.destroy_process_group()  # the advisor makes a world of its own
    llama = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    deepseek = DeepseekV3Config(  # 3 dense layers, then experts: 12 of the 61 layers
        num_hidden_layers=12,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        architectures=["DeepseekV3ForCausalLM"],
    )
    return {
        "llama": plan_one(folder, llama, 64, 2),
        "deepseek": plan_one(folder, deepseek, 1024, 2),
    }


def test_three_layers_of_each_class_are_loaded_and_the_plan_is_exact(tmp_path: Path) -> None:
    (plans,) = run_ranks(plan_both, 1, str(tmp_path), timeout_s=300)
    llama, deepseek = plans["llama"], plans["deepseek"]
    # The first layer is a class of its own: it owns the rotary table that all layers use.
    assert llama["loaded"] == [{0, 1, 2, 79}] * 2, "once per TP rank, three of equal layers"
    assert deepseek["loaded"] == [{0, 1, 2, 3, 4, 11}] * 2, "three dense ones, three with experts"
    assert llama["engine"] > 140e9 and deepseek["engine"] > 210e9
    for name, plan in plans.items():
        assert plan["exact"] and plan["fallback"] == {}, name
        assert plan["needed"] >= plan["engine"], name  # replicated norms on top
        assert plan["staged"] <= 64 << 20, name
        assert plan["classes"] < 30 < plan["sources"], (name, "planned once per class")
