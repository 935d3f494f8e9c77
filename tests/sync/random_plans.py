"""Random sources and engines, and the exchanges of all their ranks run in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from hybridengine.sync.blocks import Axis, Block, contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import Box, ShardSpec, Split
from hybridengine.sync.tables import Exchange, ExchangeBuilder, PullBuilder

__all__ = [
    "Case",
    "assert_written",
    "boxes",
    "exchange_all",
    "pull_all",
    "random_cases",
    "values_of",
]

Sources = Mapping[str, ShardSpec]
Layouts = Sequence[EngineLayout]
Tensors = Mapping[str, torch.Tensor]


class Case(NamedTuple):
    """Parameters of a model, the engine layout of every rank, and the node of every rank."""

    sources: dict[str, ShardSpec]
    layouts: list[EngineLayout]
    nodes: list[int]


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


@st.composite
def grids(draw, num_dims: int, shards: int) -> tuple[Split, ...]:
    """Divide one dimension, one dimension twice, or two dimensions, into `shards` in all."""
    first = draw(st.integers(0, num_dims - 1))
    count = draw(st.sampled_from([n for n in range(1, shards + 1) if shards % n == 0]))
    if count == shards:
        return (Split(first, (shards,)),)
    second = draw(st.integers(0, num_dims - 1))
    if second == first:
        return (Split(first, (count, shards // count)),)
    return Split(first, (count,)), Split(second, (shards // count,))


@st.composite
def random_cases(draw) -> Case:
    world, replicas = draw(
        st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 4)])
    )
    shards = world // replicas
    nodes = draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    sources, by_tp = {}, [EngineLayout({}, []) for _ in range(draw(st.integers(1, 2)))]
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        holders = tuple(tuple(range(s, world, shards)) for s in range(shards))
        frozen, merged = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
        splits = draw(grids(len(shape), shards))
        sources[f"w{i}"] = ShardSpec(shape, torch.float32, splits, holders, frozen, merged)
        for layout in by_tp:
            for j in range(draw(st.integers(0, 3))):
                block, to = draw(boxes(shape)), f"e{i}.{j}"
                layout.destinations[to] = TensorSpec(block.sizes, block.strides, torch.float32)
                layout.copies.append(_copy_of(f"w{i}", block, shape, to))
    return Case(sources, [by_tp[rank % len(by_tp)] for rank in range(world)], nodes)


def _copy_of(name: str, block: Block, shape: tuple[int, ...], to: str) -> Copy:
    offset, strides = block.address(contiguous_strides(shape), (0,) * len(shape))
    return Copy(name, to, offset, 0, block.sizes, tuple(strides), block.strides)


def values_of(sources: Sources) -> dict[str, torch.Tensor]:
    """Full parameters in which every element is different."""
    return {
        n: torch.arange(math.prod(s.shape), dtype=torch.float32).view(s.shape) + 1000 * i
        for i, (n, s) in enumerate(sources.items())
    }


def assert_written(layouts: Layouts, full: Tensors, engines: Sequence[Tensors]) -> None:
    """Every rank's engine tensors hold what its layout copies from the full parameters."""
    for layout, engine in zip(layouts, engines, strict=True):
        for c in layout.copies:
            source = full[c.source].as_strided(c.sizes, c.source_strides, c.source_offset)
            got = engine[c.destination].as_strided(c.sizes, c.destination_strides)
            assert torch.equal(got, source)


class PlannedRanks:
    """The shards and engines of all ranks, and what builds their exchanges."""

    def __init__(
        self,
        plan: ReshardPlan,
        sources: Sources,
        layouts: Layouts,
        full: Tensors,
        builder: type[ExchangeBuilder],
    ) -> None:
        self.ranks, self._sources = range(plan.world_size), sources
        self.shards = [
            {n: _held(full[n], spec, r) for n, spec in sources.items()} for r in self.ranks
        ]
        self.engines = [
            {
                n: torch.full((math.prod(s.shape),), torch.nan)
                for n, s in layouts[r].destinations.items()
            }
            for r in self.ranks
        ]
        strides = [{n: t.stride() for n, t in s.items()} for s in self.shards]
        device = torch.device("cpu")
        self.builders = [builder(plan, r, strides[r], device) for r in self.ranks]

    def pack(self, rank: int, step: Exchange, size: int) -> torch.Tensor:
        """Return the send buffer of a rank, of `size` elements; copy what the rank keeps."""
        packed = [self._part(name, box, rank) for name, box in step.sources]
        buffer = torch.full((size,), torch.nan)
        step.pack.copy(packed, [buffer, *self.targets(rank, step)])
        return buffer

    def targets(self, rank: int, step: Exchange) -> list[torch.Tensor]:
        return [self.engines[rank][name] for name in step.destinations]

    def _part(self, name: str, box: Box, rank: int) -> torch.Tensor:
        spec, held = self._sources[name], self.shards[rank][name]
        if not spec.merged or (shard := spec.shard_of(rank)) is None:
            return held
        origin = [low for low, _ in spec.box(shard)]
        ranges = zip(origin, box, strict=True)
        return held[*(slice(low - o, high - o) for o, (low, high) in ranges)].contiguous()


def _held(tensor: torch.Tensor, spec: ShardSpec, rank: int) -> torch.Tensor:
    shard = spec.shard_of(rank)
    box = [(0, 0)] * tensor.ndim if shard is None else spec.box(shard)
    return tensor[*(slice(*r) for r in box)].contiguous()


def exchange_all(
    plan: ReshardPlan, sources: Sources, layouts: Layouts, full: Tensors
) -> list[dict[str, torch.Tensor]]:
    """Run the all-to-all tables of all ranks; return every rank's engine tensors."""
    world = PlannedRanks(plan, sources, layouts, full, ExchangeBuilder)
    for bucket in plan.buckets:
        steps = [builder.build(bucket) for builder in world.builders]
        outboxes = [
            world.pack(r, step, sum(step.send_counts)).split(step.send_counts)
            for r, step in enumerate(steps)
        ]
        for r, step in enumerate(steps):
            inbox = [outboxes[sender][r] for sender in world.ranks]
            assert [part.numel() for part in inbox] == step.receive_counts
            step.unpack.copy(inbox, world.targets(r, step))
    return world.engines


def pull_all(
    plan: ReshardPlan, sources: Sources, layouts: Layouts, full: Tensors
) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Run the pull tables of all ranks; return their engine tensors and the packed elements."""
    world = PlannedRanks(plan, sources, layouts, full, PullBuilder)
    packed = 0
    for bucket in plan.buckets:
        steps = [builder.build(bucket) for builder in world.builders]
        (size,) = {builder.buffer_bytes // 4 for builder in world.builders}
        buffers = [world.pack(r, step, size) for r, step in enumerate(steps)]
        packed += sum(int((~buffer.isnan()).sum()) for buffer in buffers)
        for r, step in enumerate(steps):
            assert [steps[sender].send_counts[r] for sender in world.ranks] == step.receive_counts
            step.unpack.copy(buffers, world.targets(r, step))
    return world.engines, packed
