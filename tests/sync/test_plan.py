"""The planner against brute force: every element once, no byte more than the lower bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, TensorSpec
from hybridengine.sync.planner import build_plan
from hybridengine.sync.shards import ShardSpec
from tests.sync.brute_force import (
    arrivals,
    assert_both_sides_agree,
    assert_delivers,
    brute_force_bound,
    brute_force_entering,
    fused_layout,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (6, 3)]),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_plan_moves_every_element_once(case, rows, width, row_on_dim1, replicas) -> None:
    world, tp = case
    shapes = {f"c{i}": ("column", (r * tp, width)) for i, r in enumerate(rows)}
    shapes["r"] = ("row", (width + 1, 2 * tp * world))
    shapes["norm"] = ("replicated", (width, 3))
    replicas = replicas if world % replicas == 0 else 1
    shards = world // replicas
    holders = tuple(tuple(range(s, world, shards)) for s in range(shards))  # HSDP when replicas > 1
    sources = {
        n: ShardSpec.along(s, torch.float32, 1 if k == "row" and row_on_dim1 else 0, holders)
        for n, (k, s) in shapes.items()
    }
    by_tp = [fused_layout(shapes, r, tp) for r in range(tp)]
    stride = world // tp
    layouts = [by_tp[rank // stride] for rank in range(world)]
    plan = build_plan(sources, layouts, bucket_bytes=4096)
    assert plan.bytes_received == plan.lower_bound == brute_force_bound(sources, layouts)
    assert sum(plan.bytes_received) == sum(plan.bytes_sent)
    assert plan.staging_bytes <= 4096
    for rank, layout in enumerate(layouts):
        assert_delivers(plan, rank, layout, sources)
    assert_both_sides_agree(plan)


def one_tensor(copies: list[Copy]) -> tuple[dict[str, ShardSpec], list[EngineLayout]]:
    sources = {"w": ShardSpec.along((4, 2), torch.float32, 0, ((0,),))}
    return sources, [EngineLayout({"e": TensorSpec((4, 2), (2, 1), torch.bfloat16)}, copies)]


def test_hole_and_overlap_are_refused_at_planning() -> None:
    half = Copy("w", "e", 0, 0, (2, 2), (2, 1), (2, 1))
    with pytest.raises(LayoutError, match=r"'e': 4 of 8 elements are written by no"):
        build_plan(*one_tensor([half]))
    with pytest.raises(LayoutError, match=r"'e': some elements would be written twice"):
        build_plan(*one_tensor([half, Copy("w", "e", 2, 2, (3, 2), (2, 1), (2, 1))]))


def test_unknown_checkpoint_tensor_is_named() -> None:
    with pytest.raises(LayoutError, match="'x', which the trained model does not have"):
        build_plan(*one_tensor([Copy("x", "e", 0, 0, (4, 2), (2, 1), (2, 1))]))


def test_bucket_size_has_a_floor() -> None:
    with pytest.raises(ValueError, match="bucket_bytes: got 10"):
        build_plan({}, [EngineLayout({})], bucket_bytes=10)


def experts(world: int, tp: int) -> tuple[dict[str, ShardSpec], list[EngineLayout]]:
    """Four fused experts on more ranks than experts: most shards are empty, each row is large."""
    shape, local = (4, 2 * tp, 512), (4, 2, 512)
    copies = [
        [Copy("w", "w13", r * 2 * 512, 0, local, (2 * tp * 512, 512, 1), (2 * 512, 512, 1))]
        for r in range(tp)
    ]
    spec = TensorSpec(local, (2 * 512, 512, 1), torch.bfloat16)
    layouts = [EngineLayout({"w13": spec}, c) for c in copies]
    holders = tuple((rank,) for rank in range(world))
    by_rank = [layouts[rank * tp // world] for rank in range(world)]
    return {"w": ShardSpec.along(shape, torch.float32, 0, holders)}, by_rank


@pytest.mark.parametrize(("world", "tp"), [(8, 2), (8, 4), (16, 2)])
@pytest.mark.parametrize("bucket_bytes", [4096, 8192, 1 << 20])
def test_large_rows_are_divided_by_pairs_then_along_other_axes(
    world: int, tp: int, bucket_bytes: int
) -> None:
    sources, layouts = experts(world, tp)
    plan = build_plan(sources, layouts, bucket_bytes)
    assert plan.staging_bytes <= bucket_bytes
    assert plan.bytes_received == plan.lower_bound == brute_force_bound(sources, layouts)
    for rank, layout in enumerate(layouts):
        assert_delivers(plan, rank, layout, sources)
    assert_both_sides_agree(plan)
    one_bucket = build_plan(sources, layouts, 1 << 20)
    num_slices = [sum(1 for _ in arrivals(p, 0)) for p in (plan, one_bucket)]
    parts = {chunk.num_parts for bucket in plan.buckets for _, chunk in bucket.chunks}
    assert num_slices[0] <= num_slices[1] * max(parts)
    assert bucket_bytes > 8192 or parts != {1}, "a pair alone is more than its part of a bucket"


def test_a_bucket_that_holds_no_row_is_an_error_that_names_the_parameter() -> None:
    holders = tuple((rank,) for rank in range(64))
    layout = EngineLayout(
        {"e": TensorSpec((64, 3000), (3000, 1), torch.float64)},
        [Copy("wide", "e", 0, 0, (64, 3000), (3000, 1), (3000, 1))],
    )
    merged = ShardSpec.along((64, 3000), torch.float32, 0, holders, merged=True)
    with pytest.raises(LayoutError, match=r"bucket_bytes: parameter 'wide' of shape \(64, 3000\)"):
        build_plan({"wide": merged}, [layout] * 64, 4096)


def test_structurally_equal_layers_share_their_slices() -> None:
    """What is worked out per layer does not grow with the number of layers."""
    shapes = {
        f"layers.{i}.{n}": s
        for i in range(50)
        for n, s in (("q", ("column", (16, 8))), ("out", ("row", (8, 16))))
    }
    layouts = []
    for rank in range(4):
        parts = [
            fused_layout({n: s for n, s in shapes.items() if f".{i}." in n}, rank // 2, 2)
            for i in range(50)
        ]
        layout = EngineLayout({}, [])
        for i, part in enumerate(parts):
            for name, spec in part.destinations.items():
                layout.destinations[f"layers.{i}.fused" if name == "fused" else name] = spec
            for c in part.copies:
                to = f"layers.{i}.fused" if c.destination == "fused" else c.destination
                layout.copies.append(
                    Copy(c.source, to, *(getattr(c, f) for f in list(vars(c))[2:]))
                )
        layouts.append(layout)
    holders = ((0,), (1,), (2,), (3,))
    sources = {n: ShardSpec.along(s, torch.float32, 0, holders) for n, (_, s) in shapes.items()}
    plan = build_plan(sources, layouts, 4096)
    assert len(set(plan.source_classes.values())) == 2
    lists = {
        id(plan.source_classes[name, bucket.engine_dtype].incoming(chunk, 1))
        for bucket in plan.buckets
        for name, chunk in bucket.chunks
    }
    assert len(lists) == 2
    for rank, layout in enumerate(layouts):
        assert_delivers(plan, rank, layout, sources)


@pytest.mark.parametrize("replicas", [1, 2])
def test_nodes_with_one_engine_receive_each_byte_once(replicas: int) -> None:
    """Two nodes of four ranks, an engine of TP 4 in each; with HSDP a replica in each."""
    shapes = {"c": ("column", (24, 5)), "r": ("row", (8, 32))}
    shards = 8 // replicas
    holders = tuple(tuple(range(s, 8, shards)) for s in range(shards))
    sources = {n: ShardSpec.along(s, torch.float32, 0, holders) for n, (_, s) in shapes.items()}
    layouts = [fused_layout(shapes, rank % 4, 4) for rank in range(8)]
    nodes = [rank // 4 for rank in range(8)]
    plan = build_plan(sources, layouts, nodes=nodes)
    crossing = [sum(plan.bytes_crossing[:4]), sum(plan.bytes_crossing[4:])]
    bound = [2 * n for n in brute_force_entering(sources, layouts, nodes)]
    assert crossing == bound == [(24 * 5 + 8 * 32) * 2 * (2 - replicas) // 2] * 2
    full = [fused_layout({"norm": ("replicated", (16, 1))} | shapes, r % 4, 4) for r in range(8)]
    norm = {"norm": ShardSpec.along((16, 1), torch.float32, 0, holders)}
    plan = build_plan(sources | norm, full, nodes=nodes)
    once = (16 * 2 // 2) * (2 - replicas)
    assert sum(plan.bytes_crossing[:4]) - crossing[0] == 4 * once, "each rank of a node needs it"
    assert 2 * brute_force_entering(sources | norm, full, nodes)[0] - crossing[0] == once
