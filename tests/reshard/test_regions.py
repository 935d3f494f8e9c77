"""Sources that feed several engine tensors: every element is sent once to a rank, exactly."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.reshard import ReshardPlan, build_plan
from hybridengine.reshard.execute.exchange import Exchange, ExchangeBuilder
from hybridengine.reshard.plan.regions import disjoint_regions
from hybridengine.sharding import Copy, EngineLayout, ShardSpec, TensorSpec
from hybridengine.sharding.geometry import Axis, Block, contiguous_strides
from tests.reshard.brute_force import (
    arrivals,
    assert_both_sides_agree,
    assert_delivers,
    brute_force_bound,
    walk,
)


def region(block: Block, shape: tuple[int, ...]) -> list[int]:
    """Every source element a block reads, as often as it reads it."""
    offset, strides = block.address(contiguous_strides(shape), (0,) * len(shape))
    return walk(offset, block.sizes, strides).tolist()


@st.composite
def boxes(draw, shape: tuple[int, ...]) -> Block:
    """Part of a tensor, some dimensions in steps, the axes in any order, perhaps one repeated."""
    start, axes = [], []
    for dim, size in enumerate(shape):
        step = draw(st.sampled_from([1, 1, 2]))
        low = draw(st.integers(0, size - 1))
        count = draw(st.integers(1, 1 + (size - 1 - low) // step))
        start.append(low)
        if count > 1:
            axes.append((count, dim, step))
    if draw(st.sampled_from([False, False, True])):
        axes.append((2, -1, 0))
    axes = draw(st.permutations(axes))
    strides = contiguous_strides(tuple(size for size, _, _ in axes))
    axes = tuple(Axis(*axis, stride) for axis, stride in zip(axes, strides, strict=True))
    return Block(tuple(start), axes, 0)


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


def copy_of(name: str, block: Block, shape: tuple[int, ...], to: str) -> Copy:
    offset, strides = block.address(contiguous_strides(shape), (0,) * len(shape))
    return Copy(name, to, offset, 0, block.sizes, tuple(strides), block.strides)


def held(tensor: torch.Tensor, spec: ShardSpec, rank: int) -> torch.Tensor:
    shard = spec.shard_of(rank)
    low, high = (0, 0) if shard is None else spec.row_range(shard)
    return tensor.narrow(spec.dim, low, high - low).contiguous()


def exchange_all(plan: ReshardPlan, sources, layouts, full) -> list[dict[str, torch.Tensor]]:
    """Run the copy tables of all ranks in one process; return every rank's engine tensors."""
    ranks = range(plan.world_size)
    shards = [{n: held(full[n], spec, r) for n, spec in sources.items()} for r in ranks]
    engines = [
        {
            n: torch.full((math.prod(s.shape),), torch.nan)
            for n, s in layouts[r].destinations.items()
        }
        for r in ranks
    ]
    builders = [
        ExchangeBuilder(plan, r, {n: t.stride() for n, t in shards[r].items()}, torch.device("cpu"))
        for r in ranks
    ]
    for bucket in plan.buckets:
        steps: list[Exchange] = [builder.build(bucket) for builder in builders]
        outboxes = []
        for r, step in enumerate(steps):
            packed = [_rows(shards[r], sources, name, rows, r) for name, rows in step.sources]
            targets = [engines[r][name] for name in step.destinations]
            outbox = torch.full((sum(step.send_counts),), torch.nan)
            step.pack.copy(packed, [outbox])
            step.local.copy(packed, targets)
            outboxes.append(outbox.split(step.send_counts))
        for r, step in enumerate(steps):
            inbox = torch.cat([outboxes[sender][r] for sender in ranks])
            assert [outboxes[sender][r].numel() for sender in ranks] == step.receive_counts
            step.unpack.copy([inbox], [engines[r][name] for name in step.destinations])
    return engines


def _rows(shards, sources, name: str, rows, rank: int) -> torch.Tensor:
    spec = sources[name]
    if not spec.merged or (shard := spec.shard_of(rank)) is None:
        return shards[name]
    start = rows.start - spec.row_range(shard).start
    return shards[name].narrow(spec.dim, start, rows.stop - rows.start).contiguous()


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 4)]))
def test_any_plan_sends_each_element_once(data, case) -> None:
    """Random sources on 1-D meshes and HSDP, over nodes, uneven; frozen, merged; any reads."""
    world, replicas = case
    shards = world // replicas
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    sources, by_tp = {}, [EngineLayout({}, []) for _ in range(data.draw(st.integers(1, 2)))]
    for i in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        holders = tuple(tuple(range(s, world, shards)) for s in range(shards))
        dim = data.draw(st.integers(0, len(shape) - 1))
        frozen, merged = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
        sources[f"w{i}"] = ShardSpec(shape, torch.float32, dim, holders, frozen, merged)
        for layout in by_tp:
            for j in range(data.draw(st.integers(0, 3))):
                block, to = data.draw(boxes(shape)), f"e{i}.{j}"
                layout.destinations[to] = TensorSpec(block.sizes, block.strides, torch.float32)
                layout.copies.append(copy_of(f"w{i}", block, shape, to))
    layouts = [by_tp[rank % len(by_tp)] for rank in range(world)]
    plan = build_plan(sources, layouts, 4096, nodes)
    bound = [2 * b for b in brute_force_bound(sources, layouts)]  # float32, not bfloat16
    assert plan.bytes_received == plan.lower_bound == bound
    for rank, layout in enumerate(layouts):
        assert_delivers(plan, rank, layout, sources)
        for _, name, copy in arrivals(plan, rank):
            holders = sources[name].holders[copy.shard]
            near = [h for h in holders if nodes[h] == nodes[rank]]
            assert copy.sender in ([rank] if rank in holders else near or holders)
    assert_both_sides_agree(plan, itemsize=4)
    full = {
        n: torch.arange(math.prod(s.shape), dtype=torch.float32).view(s.shape) + 1000 * i
        for i, (n, s) in enumerate(sources.items())
    }
    for rank, engine in enumerate(exchange_all(plan, sources, layouts, full)):
        for c in layouts[rank].copies:
            source = full[c.source].as_strided(c.sizes, c.source_strides, c.source_offset)
            got = engine[c.destination].as_strided(c.sizes, c.destination_strides)
            assert torch.equal(got, source)


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
    sources = {n: ShardSpec(shape, torch.float32, 0, holders) for n in ("k", "e")}
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
    sources = {"w": ShardSpec((6,), torch.float32, 0, ((0,), (1,), (2,)))}
    plan = build_plan(sources, [layout] * 3)
    assert plan.bytes_received == [8] * 3
    engines = exchange_all(plan, sources, [layout] * 3, {"w": torch.arange(6.0)})
    assert all(e["scales"].view(6, 5)[:, 4].tolist() == list(range(6)) for e in engines)
