"""Engines with data-parallel attention and expert parallelism (vLLM's DP+EP)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridengine.lab.advisor import advise
from hybridengine.lab.layouts import TrainerLayout, record_dp_ranks
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from tests.ranks import run_ranks
from tests.sync.vllm_engines import unequal, vllm_model
from tests.tiny_models import save_tiny

SHAPES = {"attention": (16, 8), "experts": (8, 4, 6)}


def dp_ep_layout(dp_rank: int, dp_size: int = 8) -> EngineLayout:
    """An engine rank that holds all of the attention and its part of eight experts."""
    experts = (8 // dp_size, 4, 6)
    return EngineLayout(
        {
            "attention": TensorSpec((16, 8), (8, 1), torch.bfloat16),
            "experts": TensorSpec(experts, (24, 6, 1), torch.bfloat16),
        },
        [
            Copy("attention", "attention", 0, 0, (16, 8), (8, 1), (8, 1)),
            Copy("experts", "experts", dp_rank * 24 * experts[0], 0, experts, *[(24, 6, 1)] * 2),
        ],
    ).ordered()


def test_the_layouts_between_three_dp_ranks_follow() -> None:
    recorded = []

    def record(rank: int) -> EngineLayout:
        recorded.append(rank)
        return dp_ep_layout(rank)

    layouts = record_dp_ranks(record, 8)
    assert recorded == [0, 1, 7]
    assert layouts == [dp_ep_layout(rank) for rank in range(8)]


@pytest.mark.parametrize("odd", [1, 4, 7])
def test_dp_ranks_that_differ_otherwise_are_all_recorded(odd: int) -> None:
    """Round-robin experts, say: equal steps up to some rank, or copies of other shapes."""

    def record(rank: int) -> EngineLayout:
        layout = dp_ep_layout(rank)
        if rank == odd == 1:
            return replace(layout, copies=layout.copies[:1])
        if rank >= odd > 1:
            layout.copies[1] = replace(layout.copies[1], source_offset=24 * (rank - 1))
        return layout

    layouts = record_dp_ranks(record, 8)
    assert layouts == [record(rank) for rank in range(8)]


def test_advice_for_dp_ep_engines() -> None:
    """A trainer that divides the experts as the engine does receives none of them."""
    layouts = [dp_ep_layout(rank) for rank in range(8)]
    attention, experts = (2 * torch.Size(s).numel() for s in SHAPES.values())
    fsdp = advise(SHAPES, layouts, 16, dp_size=8, nodes=2)
    assert fsdp.dp_size == 8 and fsdp.tp_size == 1 and fsdp.hybridflow_bytes is None
    assert all(option.tp_in_node for option in fsdp.options), "groups of one rank"
    for option in fsdp.options:
        assert option.plan.bytes_received == option.plan.lower_bound
    aligned = advise(SHAPES, layouts, 8, dp_size=8, train_ep=8).options[0].plan
    assert aligned.bytes_received == [attention * 7 // 8] * 8
    assert aligned.bytes_needed == [attention + experts // 8] * 8
    with pytest.raises(ValueError, match="tp times dp: got 8, expected a divisor of the 12 ranks"):
        advise(SHAPES, layouts, 12, dp_size=8)


def test_trainer_layouts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="train_ep: got 3, expected a divisor of the 8 ranks"):
        TrainerLayout.of(SHAPES, {}, 16, 8, ep_size=3)
    with pytest.raises(ValueError, match="train_tp and train_ep: got 2 and 2"):
        TrainerLayout.of(SHAPES, {}, 8, 8, tp_size=2, ep_size=2)
    with pytest.raises(ValueError, match="train_tp: got 2 for an engine of TP 1"):
        TrainerLayout.of(SHAPES, {}, 8, 8, tp_size=2)


def recorded_body(rank: int, world_size: int, path: str) -> list[str]:
    import torch.distributed as dist

    from hybridengine.lab.layouts import record_engine_layouts

    dist.destroy_process_group()  # the advisor makes a world of its own
    _, layouts = record_engine_layouts(path, 2, dp_size=2, expert_parallel=True)
    return [layout.digest() for layout in layouts]


def engine_body(rank: int, world_size: int, path: str) -> dict:
    """vLLM's model of this rank, its parallel groups those of a DP 2, TP 2 engine."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers import AutoModelForCausalLM

    from hybridengine.model import parameter_shards
    from hybridengine.model.parameters import checkpoint_layout
    from hybridengine.sync.resharder import Resharder
    from tests.sync.memory_engine import MemoryEngine

    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    checkpoint = checkpoint_layout(trained)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    for layer in trained.model.layers:
        for name, full in list(layer.mlp.experts.named_parameters()):
            placed = distribute_tensor(full.detach(), mesh["ep"], [Shard(0)])
            setattr(layer.mlp.experts, name, torch.nn.Parameter(placed))
    fully_shard(trained, mesh=mesh["fsdp"])
    layout, model = vllm_model(
        rank, world_size, path, 2, checkpoint, data_parallel_size=2, enable_expert_parallel=True
    )
    engine = MemoryEngine(layout, rank, world_size)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    engine.tensors = {name: tensors[name].detach() for name in layout.destinations}
    resharder = Resharder(lambda: parameter_shards(trained), engine, 1 << 16)
    report = resharder.sync(1, verify=True)
    full = {n: p.full_tensor().to(torch.bfloat16) for n, p in parameter_shards(trained).items()}
    experts = next(t for n, t in engine.tensors.items() if n.endswith("w2_weight"))
    return {
        "digest": layout.digest(),
        "unequal": unequal(
            engine.tensors, lambda: model.load_weights(checkpoint.assemble(full.items()))
        ),
        "received": report.bytes_received,
        "bound": resharder.plan.lower_bound[rank],
        "experts": len(experts),
    }


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_a_dp_ep_engine_gets_what_vllms_own_loader_makes(tmp_path: Path) -> None:
    """Four ranks, an expert each. The layouts recorded in one process are those of real groups."""
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    path = save_tiny("qwen3_moe", tmp_path)
    (recorded,) = run_ranks(recorded_body, 1, path, timeout_s=500)
    # vLLM's worker sets it; read on CPUs with AVX-512
    identity = {"VLLM_DIST_IDENT": "dp_ranks"}
    ranks = run_ranks(engine_body, 4, path, timeout_s=300, env=identity)
    for result in ranks:
        assert result["unequal"] == [] and result["experts"] == 1
        assert result["received"] == result["bound"] > 0
    assert [result["digest"] for result in ranks] == recorded and len(set(recorded)) == 4
