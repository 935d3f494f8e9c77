"""Sources that feed several engine tensors: every element is sent once to a rank, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.blocks import Block, contiguous_strides, disjoint_regions
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.planner import build_plan
from hybridengine.sync.shards import ShardSpec
from tests.sync.brute_force import (
    arrivals,
    assert_both_sides_agree,
    assert_delivers,
    brute_force_bound,
    brute_force_entering,
    walk,
)
from tests.sync.random_plans import (
    Case,
    assert_written,
    boxes,
    exchange_all,
    random_cases,
    values_of,
)


def region(block: Block, shape: tuple[int, ...]) -> list[int]:
    """Every source element a block reads, as often as it reads it."""
    offset, strides = block.address(contiguous_strides(shape), (0,) * len(shape))
    return walk(offset, block.sizes, strides).tolist()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_regions_are_disjoint_and_lose_nothing(data, shape) -> None:
    shape = tuple(shape)
    blocks = data.draw(st.lists(boxes(shape), min_size=1, max_size=4))
    regions = disjoint_regions(blocks)
    sent = [x for writes in regions for x in region(writes[0][1].read, shape)]
    wanted = {x for block in blocks for x in region(block, shape)}
    assert len(sent) == len(set(sent)) and set(sent) == wanted
    for writes in regions:
        for _, block in writes:  # in the order of the first, which is that of the elements sent
            assert region(block.read, shape) == region(writes[0][1].read, shape)
    for number, block in enumerate(blocks):
        parts = [part for writes in regions for i, part in writes if i == number]
        pairs = [
            pair
            for part in parts
            for pair in zip(
                region(part, shape), walk(part.offset, part.sizes, part.strides), strict=True
            )
        ]
        own = zip(region(block, shape), walk(0, block.sizes, block.strides), strict=True)
        assert sorted(pairs) == sorted(own)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(random_cases())
def test_any_plan_sends_each_element_once(case: Case) -> None:
    """Random sources on 1-D and 2-D meshes, HSDP, over nodes, uneven; frozen, merged; any reads."""
    plan = build_plan(case.sources, case.layouts, 4096, case.nodes)
    bound = [2 * b for b in brute_force_bound(case.sources, case.layouts)]  # float32, not bfloat16
    assert plan.bytes_received == plan.lower_bound == bound
    crossing = [4 * n for n in brute_force_entering(case.sources, case.layouts, case.nodes)]
    for number, least in zip(sorted(set(case.nodes)), crossing, strict=True):
        of_node = [b for b, n in zip(plan.bytes_crossing, case.nodes, strict=True) if n == number]
        assert max(of_node) <= least <= sum(of_node)
    for rank, layout in enumerate(case.layouts):
        assert_delivers(plan, rank, layout, case.sources)
        for _, name, copy in arrivals(plan, rank):
            holders = case.sources[name].holders[copy.shard]
            near = [h for h in holders if case.nodes[h] == case.nodes[rank]]
            assert copy.sender in ([rank] if rank in holders else near or holders)
    assert_both_sides_agree(plan, itemsize=4)
    full = values_of(case.sources)
    assert_written(case.layouts, full, exchange_all(plan, case.sources, case.layouts, full))


def test_keys_that_are_the_values_too_travel_once() -> None:
    """Attention that takes its values from the keys' weight, and a head tied to the embedding."""
    shape, world = (64, 16), 4
    strides = contiguous_strides(shape)
    qkv = TensorSpec((128, 16), (16, 1), torch.bfloat16)
    copies = [Copy("k", "qkv", 0, at * 16, shape, strides, strides) for at in (0, 64)]
    tied = [Copy("e", name, 0, 0, shape, strides, strides) for name in ("embed", "head")]
    table = TensorSpec(shape, strides, torch.bfloat16)
    layout = EngineLayout({"qkv": qkv, "embed": table, "head": table}, copies + tied)
    holders = tuple((rank,) for rank in range(world))
    sources = {n: ShardSpec.along(shape, torch.float32, 0, holders) for n in ("k", "e")}
    plan = build_plan(sources, [layout] * world)
    once = 2 * 64 * 16 * 2
    assert plan.bytes_received == plan.lower_bound == [once * 3 // 4] * world
    assert plan.bytes_needed == [2 * once] * world
    for rank in range(world):
        assert_delivers(plan, rank, layout, sources)


def test_a_view_that_repeats_an_element_receives_it_once() -> None:
    layout = EngineLayout(
        {"scales": TensorSpec((6, 5), (5, 1), torch.bfloat16)},
        [Copy("w", "scales", 0, 0, (6, 5), (1, 0), (5, 1))],
    )
    sources = {"w": ShardSpec.along((6,), torch.float32, 0, ((0,), (1,), (2,)))}
    plan = build_plan(sources, [layout] * 3)
    assert plan.bytes_received == [8] * 3
    engines = exchange_all(plan, sources, [layout] * 3, {"w": torch.arange(6.0)})
    assert all(e["scales"].view(6, 5)[:, 4].tolist() == list(range(6)) for e in engines)
