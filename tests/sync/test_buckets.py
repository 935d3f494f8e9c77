"""Every bucket loads all ranks alike, and shards come from the receiver's node where they can."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.buckets import divide
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.planner import ReshardPlan, build_plan
from hybridengine.sync.shards import ShardSpec, Split, dim1_parameters, tp_groups
from tests.sync.brute_force import (
    arrivals,
    assert_both_sides_agree,
    assert_delivers,
    brute_force_bound,
)

Model = dict[str, tuple[str, tuple[int, ...]]]


def tensor_parallel(model: Model, rank: int, tp: int) -> EngineLayout:
    """Each weight in an engine tensor of its own, cut as vLLM cuts it."""
    layout = EngineLayout({}, [])
    for name, (sort, shape) in model.items():
        strides = contiguous_strides(shape)
        dim = {"column": 0, "row": 1, "gate_up": 1, "down": 2, "replicated": None}[sort]
        if dim is None:
            spans = [(0, 0, shape)]
            local = shape
        else:
            halves = 2 if sort == "gate_up" else 1
            size = shape[dim] // halves // tp
            part = (*shape[:dim], size, *shape[dim + 1 :])
            local = (*shape[:dim], halves * size, *shape[dim + 1 :])
            spans = [
                ((half * tp + rank) * size * strides[dim], half * size, part)
                for half in range(halves)
            ]
        to = contiguous_strides(local)
        layout.destinations[name] = TensorSpec(local, to, torch.bfloat16)
        for offset, position, sizes in spans:
            at = 0 if dim is None else position * to[dim]
            layout.copies.append(Copy(name, name, offset, at, sizes, strides, to))
    return layout


def groups_of(world: int, tp: int, grouping: str) -> list[list[int]]:
    if grouping == "contiguous":
        return [list(range(first, first + tp)) for first in range(0, world, tp)]
    return tp_groups(world, tp, 8 if grouping == "strided in nodes" else None)


def plan_of(
    model: Model,
    world: int,
    tp: int,
    grouping: str,
    dim1: bool,
    shards: int | None = None,
    **options,
) -> tuple[ReshardPlan, dict[str, ShardSpec], list[EngineLayout]]:
    shards = shards or world
    by_tp = [tensor_parallel(model, rank, tp) for rank in range(tp)]
    shapes = {name: shape for name, (_, shape) in model.items()}
    columns = dim1_parameters(shapes, by_tp[0].sliced_dims(shapes), shards) if dim1 else set()
    holders = tuple(tuple(range(rank, world, shards)) for rank in range(shards))
    sources = {
        name: ShardSpec.along(shape, torch.float32, int(name in columns), holders)
        for name, shape in shapes.items()
    }
    tp_rank = {rank: i for group in groups_of(world, tp, grouping) for i, rank in enumerate(group)}
    layouts = [by_tp[tp_rank[rank]] for rank in range(world)]
    return build_plan(sources, layouts, **options), sources, layouts


def bucket_loads(plan: ReshardPlan, bucket_bytes: int) -> np.ndarray:
    """Bytes that each rank stages in each bucket: [buckets, N]."""
    staged: dict = {}  # per class, of each chunk
    loads = np.zeros((len(plan.buckets), plan.world_size), np.int64)
    for load, bucket in zip(loads, plan.buckets, strict=True):
        for name, chunk in bucket.chunks:
            source_class = plan.source_classes[name, bucket.engine_dtype]
            if source_class not in staged:
                table = divide(name, source_class, 2, bucket_bytes)
                bytes_of = np.diff(table.staged_before, axis=0)
                staged[source_class] = dict(zip(table.chunks, bytes_of, strict=True))
            load += staged[source_class][chunk]
    return loads


def assert_balanced(
    plan: ReshardPlan,
    bucket_bytes: int,
    by_source: bool = False,
    most_bytes: float = 1.1,
    most_buckets: float = 1.2,
) -> None:
    """Both limits are ratios to the minimum.

    by_source: the minimum is the sum over sources of their busiest ranks, not the busiest rank of
    all. Sources follow each other, so it is larger where different ranks send different sources.
    """
    loads = bucket_loads(plan, bucket_bytes)
    busiest = loads.sum(0).max()
    assert (np.array(plan.bytes_received) + plan.bytes_sent == loads.sum(0)).all()
    assert loads.max() == plan.staging_bytes <= bucket_bytes
    if by_source:
        busiest = sum(
            2 * cls.loads(cls.num_needed)[0].sum(0).max() for cls in plan.source_classes.values()
        )
    assert loads.max(1).sum() <= most_bytes * busiest, "bytes of the busiest rank of each bucket"
    assert len(plan.buckets) <= most_buckets * -(-busiest // bucket_bytes), "buckets"


LLAMA_405B: Model = {
    "qkv": ("column", (16384 + 2 * 1024, 16384)),
    "o": ("row", (16384, 16384)),
    "gate": ("column", (53248, 16384)),
    "up": ("column", (53248, 16384)),
    "down": ("row", (16384, 53248)),
    "norm": ("replicated", (16384,)),
    "head": ("column", (128256, 16384)),
}
DEEPSEEK_V3: Model = {
    "q_a": ("replicated", (1536, 7168)),
    "q_b": ("column", (24576, 1536)),
    "kv_a": ("replicated", (576, 7168)),
    "kv_b": ("column", (32768, 512)),
    "o": ("row", (7168, 16384)),
    "experts.gate_up": ("gate_up", (256, 4096, 7168)),
    "experts.down": ("down", (256, 7168, 2048)),
    "head": ("column", (129280, 7168)),
}
QWEN3_235B: Model = {
    "qkv": ("column", (8192 + 2 * 512, 4096)),
    "o": ("row", (4096, 8192)),
    "experts.gate_up": ("gate_up", (128, 3072, 4096)),
    "experts.down": ("down", (128, 4096, 1536)),
    "head": ("column", (151936, 4096)),
}


@pytest.mark.parametrize("dim1", [True, False])
@pytest.mark.parametrize("grouping", ["strided", "strided in nodes", "contiguous"])
@pytest.mark.parametrize(
    ("model", "world", "tp"),
    [(LLAMA_405B, 64, 8), (DEEPSEEK_V3, 256, 16), (QWEN3_235B, 256, 8), (QWEN3_235B, 256, 4)],
    ids=["llama-405b", "deepseek-v3", "qwen3-235b", "qwen3-235b-tp4"],
)
def test_buckets_of_large_models_load_all_ranks_alike(
    model: Model, world: int, tp: int, grouping: str, dim1: bool
) -> None:
    plan, _, _ = plan_of(model, world, tp, grouping, dim1)
    assert len(plan.buckets) > 20
    assert_balanced(plan, 64 << 20)


@pytest.mark.parametrize("dim1", [True, False])
def test_parts_of_a_matrix_are_rows_of_it(dim1: bool) -> None:
    """However it is sharded: parts of the columns would be short runs, which copy slowly."""
    model: Model = {"qkv": ("column", (512, 96)), "o": ("row", (96, 512))}
    plan, sources, layouts = plan_of(model, 4, 2, "contiguous", dim1, bucket_bytes=1 << 15)
    width = {"qkv": 96, "o": 512 // (4 if dim1 else 2)}
    for rank, layout in enumerate(layouts):
        assert_delivers(plan, rank, layout, sources)
        for chunk, name, copy in arrivals(plan, rank):
            assert copy.read.axes[-1][:3] == (width[name], 1, 1), f"{chunk} of {name} on {rank}"
    divided = {name for b in plan.buckets for name, chunk in b.chunks if chunk.num_parts > 1}
    assert divided == set(model)


@pytest.mark.parametrize("dims", [(0, 1), (1,)])
def test_parts_of_few_experts_are_rows_of_them(dims: tuple[int, ...]) -> None:
    """Where no axis outside of the rows is long enough, or all of those are sharded."""
    shape = (4, 512, 96)
    splits = tuple(Split(dim, (4 // len(dims),)) for dim in dims)
    holders = tuple((rank,) for rank in range(4))
    sources = {"experts": ShardSpec(shape, torch.float32, splits, holders)}
    layouts = [tensor_parallel({"experts": ("gate_up", shape)}, rank % 2, 2) for rank in range(4)]
    plan = build_plan(sources, layouts, bucket_bytes=1 << 15)
    for rank, layout in enumerate(layouts):
        assert_delivers(plan, rank, layout, sources)
        assert all(copy.read.axes[-1].size == 96 for _, _, copy in arrivals(plan, rank))
    assert max(chunk.num_parts for bucket in plan.buckets for _, chunk in bucket.chunks) > 4


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.sampled_from([(4, 2), (8, 4), (16, 4), (24, 8), (32, 4), (48, 16), (64, 8)]),
    st.sampled_from(["strided", "strided in nodes", "contiguous"]),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.integers(1, 40),
    st.integers(20, 40),
)
def test_buckets_of_any_model_load_all_ranks_alike(
    case, grouping, dim1, replicas, sizes, experts, buckets
) -> None:
    world, tp = case
    rows, columns, hidden = (64 * size for size in sizes)
    model: Model = {
        f"{layer}.{name}": weight
        for layer in range(2)
        for name, weight in {
            "qkv": ("column", (tp * rows, hidden)),
            "o": ("row", (hidden, tp * columns)),
            "gate_up": ("gate_up", (experts, 2 * tp * 16, hidden)),
            "down": ("down", (experts, hidden, tp * 16)),
            "norm": ("replicated", (hidden,)),
        }.items()
    }
    shards = world // replicas if world % (2 * replicas) == 0 else world
    nodes = [rank // 8 for rank in range(world)]
    unlimited, _, _ = plan_of(model, world, tp, grouping, dim1, shards, nodes=nodes)
    busiest = max(map(sum, zip(unlimited.bytes_received, unlimited.bytes_sent, strict=True)))
    bucket_bytes = max(1 << 16, busiest // buckets)
    plan, _, _ = plan_of(
        model, world, tp, grouping, dim1, shards, nodes=nodes, bucket_bytes=bucket_bytes
    )
    if busiest > 10 * bucket_bytes:
        # A bucket is uneven by up to one chunk, an eighth. With replicas (HSDP) on dim 0 the worst
        # of 364 random cases had 1.23 times the bytes and 1.29 times the buckets.
        limits = (1 + 1 / 8, 1.2) if replicas == 1 else (1.25, 1.35)
        assert_balanced(plan, bucket_bytes, True, *limits)


@pytest.mark.parametrize("replicas", [2, 4, 16])
@pytest.mark.parametrize("grouping", ["strided in nodes", "contiguous"])
def test_replicas_send_inside_the_node(grouping: str, replicas: int) -> None:
    """HSDP on nodes of 8 ranks; 16 replicas are two in each node."""
    world, tp = 64, 4
    model: Model = {
        "qkv": ("column", (640, 48)),
        "o": ("row", (48, 640)),
        "norm": ("replicated", (77,)),
    }
    nodes = [rank // 8 for rank in range(world)]
    shards = world // replicas
    plan, sources, layouts = plan_of(model, world, tp, grouping, True, shards, nodes=nodes)
    sent: Counter = Counter()
    for rank in range(world):
        assert_delivers(plan, rank, layouts[rank], sources)
        for _, name, copy in arrivals(plan, rank):
            holders = sources[name].holders[copy.shard]
            near = {h for h in holders if nodes[h] == nodes[rank]}
            assert copy.sender in (near or holders)
            sent[copy.sender] += copy.read.numel * (copy.sender != rank)
    if shards <= 8:
        assert not any(plan.bytes_crossing)
    else:  # 32 shards: 8 of them are in the node
        assert max(plan.bytes_crossing) <= max(plan.bytes_received)
    loads = np.array(plan.bytes_sent)
    assert [2 * sent[rank] for rank in range(world)] == loads.tolist()
    assert plan.bytes_received == plan.lower_bound == brute_force_bound(sources, layouts)
    # A pair of ranks is not divided, and nobody receives more than one shard here.
    assert loads.max() <= 1.1 * max(plan.bytes_received) + 2 * 77, "holders share the sending"


def test_node_numbers_need_no_order() -> None:
    """Nodes need not be numbered in order, nor have the same number of ranks."""
    model: Model = {"w": ("replicated", (8, 6))}
    nodes = [7, 7, 7, 3, 3, 9]
    plan, sources, layouts = plan_of(model, 6, 1, "strided", False, 3, nodes=nodes)
    for rank in range(6):
        assert_delivers(plan, rank, layouts[rank], sources)
        for _, name, copy in arrivals(plan, rank):
            near = {h for h in sources[name].holders[copy.shard] if nodes[h] == nodes[rank]}
            assert copy.sender in near or not near
    assert_both_sides_agree(plan)
    with pytest.raises(ValueError, match="nodes: got 2 entries, expected one per rank: 6"):
        build_plan(sources, layouts, nodes=[0, 1])
