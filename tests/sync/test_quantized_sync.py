"""Syncs into quantized engines that only hold tensors: scales of blocks over shards, bytes, state.

The expected tensors are quantized from the full, unsharded engine tensors.
"""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hybridengine.fp8.scales import BlockScales
from hybridengine.kernels.block_quantize import block_quantize
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, TensorSpec
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.weight_target import StaleWeightsError
from tests.ranks import message_of, run_ranks
from tests.sync.memory_engine import MemoryEngine, build, quantize, shard
from tests.sync.quantized_cases import QUANTIZED, SHAPES, differing, trained


def sync_body(rank: int, world_size: int, cases: list[dict]) -> list[dict]:
    results = []
    for case in cases:
        case = {"bucket_bytes": 1 << 15} | case
        dtype = case.pop("dtype", torch.float32)
        full = trained(0, dtype)
        engine, shards, resharder = build(SHAPES, full=full, quantized=QUANTIZED, **case)
        found = []
        for seed in (0, 1):
            full = trained(seed, dtype)
            for name, tensor in shards.items():
                local = shard(full[name], tensor.device_mesh, tensor.placements[-1].dim)
                tensor.to_local().copy_(local.to_local())
            report = resharder.sync(verify=True)
            found += differing(engine, full)
        dense = build(SHAPES, full=full, **case)[2]
        results.append(
            {
                "differing": found,
                "received": report.bytes_received,
                "sent": report.bytes_sent,
                "dense": dense.sync().bytes_received,
                "buckets": len(resharder.plan.buckets),
            }
        )
    return results


TWO = [dict(tp_size=2), dict(tp_size=1, transport="all-to-all", dtype=torch.bfloat16)]
FOUR = [
    dict(tp_size=2),
    dict(tp_size=2, transport="all-to-all", bucket_bytes=1 << 20),
    dict(tp_size=2, replicas=2, rows_on_dim1=False, dtype=torch.float16),
    dict(tp_size=4, transport="all-to-all"),
]


@pytest.mark.multirank
@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)])
def test_scales_are_those_of_the_full_tensors(world_size: int, cases: list[dict]) -> None:
    for by_rank in zip(*run_ranks(sync_body, world_size, cases), strict=True):
        for result in by_rank:
            assert result["differing"] == []
            assert result["received"] <= 0.53 * result["dense"] + 2 * 39  # the norm stays bfloat16
        assert sum(r["received"] for r in by_rank) == sum(r["sent"] for r in by_rank)
    assert by_rank[0]["buckets"] > 2


def layout_of_experts(tp_rank: int) -> EngineLayout:
    """Two of four experts with gate and up fused, and all down projections by columns."""
    gate_up, down = (4, 2 * 150, 200), (4, 200, 150)
    specs = {
        "w13": TensorSpec((2, 300, 200), contiguous_strides((2, 300, 200)), torch.bfloat16),
        "w2": TensorSpec((4, 200, 75), contiguous_strides((4, 200, 75)), torch.bfloat16),
    }
    half = math.prod(gate_up) // 2
    copies = [
        Copy("gate_up", "w13", tp_rank * half, 0, (half,), (1,), (1,)),
        Copy("down", "w2", tp_rank * 75, 0, (4 * 200, 75), (down[2], 1), (75, 1)),
    ]
    layout = EngineLayout(specs, copies)
    for name in specs:
        quantize(layout, name)
    return layout


def experts_body(rank: int, world_size: int) -> list[str]:
    full = {
        "gate_up": torch.randn(4, 300, 200, generator=torch.Generator().manual_seed(0)),
        "down": torch.randn(4, 200, 150, generator=torch.Generator().manual_seed(1)),
    }
    mesh = init_device_mesh("cpu", (world_size,))
    shards = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in full.items()}
    engine = MemoryEngine(layout_of_experts(rank), rank, world_size)
    Resharder(lambda: shards, engine, 1 << 16).sync(verify=True)
    return differing(engine, full)


def adapter_body(rank: int, world_size: int) -> tuple[list[str], str]:
    """Merged adapters of one parameter change blocks that frozen ones share."""
    full = trained(0, torch.float32)
    engine, shards, _ = build(SHAPES, 2, full=full, quantized=QUANTIZED, bucket_bytes=1 << 16)
    adapters = {}
    resharder = None
    wrong = []
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        left, right = (torch.randn(s, generator=generator) for s in ((300, 2), (2, 260)))
        adapters["q"] = Adapter(left, right, float(step) ** 9)
        resharder = resharder or Resharder(lambda: shards, engine, 1 << 16, lambda: adapters)
        resharder.sync(verify=True)
        delta = adapters["q"].scale * (left.double() @ right.double())
        wrong += differing(engine, full | {"q": (full["q"].double() + delta).float()})
    if rank == 1:
        engine.tensors["fused_scale_inv"][0, 0] *= 2
        engine.tensors["fused"].view(torch.uint8)[0, 0] ^= 1
    with mock.patch.object(resharder.mover, "move_buckets"):
        message = message_of(lambda: resharder.sync(verify=True))
    return wrong, message


@pytest.mark.multirank
def test_experts_and_merged_adapters() -> None:
    assert run_ranks(experts_body, 2) == [[], []]
    for wrong, message in run_ranks(adapter_body, 2):
        assert wrong == []
        assert "engine tensor 'fused' on rank 1 differs" in message


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sync_that_fails_leaves_an_engine_that_refuses(world_of_one) -> None:
    full = trained(0, torch.float32)
    engine, _, resharder = build(SHAPES, 1, full=full, bucket_bytes=1 << 20, quantized=QUANTIZED)
    resharder.sync(1)
    failing = mock.patch.object(BlockScales, "combine", side_effect=OSError("lost"))
    with failing, pytest.raises(OSError, match="lost"):
        resharder.sync(2)
    assert engine.weight_version == 1
    with pytest.raises(StaleWeightsError, match="sync to weight version 2 did not finish"):
        engine.check_complete()
    resharder.sync(2, verify=True)
    assert engine.weight_version == 2 and differing(engine, full) == []


@pytest.mark.parametrize(
    ("frozen", "once"),
    [
        ({"out"}, {"out"}),
        ({"q", "norm"}, {"norm"}),
        ({"q", "k", "copied"}, {"q", "k", "copied"}),
        ({"k", "out", "copied", "norm"}, {"out", "copied", "norm"}),
    ],
)
def test_frozen_parameters_that_share_blocks_with_trained_ones_travel(
    world_of_one, frozen: set[str], once: set[str]
) -> None:
    full = trained(0, torch.float32)
    engine, shards, resharder = build(
        *(SHAPES, 1), full=full, quantized=QUANTIZED, bucket_bytes=1 << 20, frozen=lambda: frozen
    )
    assert {name for name, _ in resharder.plan.sent_once} == once
    for version in (1, 2, 3):
        if version == 2:
            full = {n: t if n in frozen else t * 3 for n, t in full.items()}
            for name, tensor in shards.items():
                tensor.to_local().copy_(full[name])
        resharder.sync(version, verify=version == 3)
        assert differing(engine, full) == []


def test_what_is_not_finite(world_of_one) -> None:
    full = trained(0, torch.float32)
    full["out"][5, 7], full["out"][200, 300] = float("nan"), float("-inf")
    engine, _, resharder = build(SHAPES, 1, full=full, bucket_bytes=1 << 20, quantized=QUANTIZED)
    resharder.sync(1)
    quantized, scale = block_quantize(full["out"].bfloat16())
    assert engine.tensors["out_scale_inv"].isnan().nonzero().tolist() == [[0, 0]]
    assert torch.equal(engine.tensors["out_scale_inv"].nan_to_num(), scale.nan_to_num())
    got = engine.tensors["out"].float()
    assert torch.equal(got.nan_to_num(), quantized.float().nan_to_num())


def test_what_is_refused(world_of_one) -> None:
    full = trained(0, torch.float32)
    with pytest.raises(LayoutError, match=r"delta: got 'on', but the engine's .* are quantized"):
        build(SHAPES, 1, full=full, bucket_bytes=1 << 20, quantized=QUANTIZED, delta="on")
    with pytest.raises(LayoutError, match="tensor 'out' is computed by the engine's own loader"):
        build(SHAPES, 1, full=full, bucket_bytes=1 << 20, quantized=QUANTIZED, by_loader=("out",))
    wide = {name: tensor.double() for name, tensor in full.items()}
    with pytest.raises(LayoutError, match=r"'q' is torch.float64; expected float32"):
        build(SHAPES, 1, full=wide, bucket_bytes=1 << 20, quantized=QUANTIZED)
    engine, _, resharder = build(SHAPES, 1, full=full, bucket_bytes=1 << 20, quantized=QUANTIZED)
    engine.tensors["out_scale_inv"] = engine.tensors["out_scale_inv"].t()
    with pytest.raises(LayoutError, match="'out_scale_inv' was recorded as"):
        resharder.sync()
