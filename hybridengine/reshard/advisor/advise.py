"""What a weight sync would cost, from a model's configuration alone: no weights, no GPUs.

The engine's loader is recorded on the meta device for every TP rank, then planned for each way to
group the ranks and to shard row-parallel weights and fused experts. Peers' volumes for the same
case: HybridFlow (arXiv 2409.19256, table 2) M (1/t - 1/N) in the engine's dtype, verl's gather
M (1 - 1/N) in the float32 of the masters, M counting each trained parameter once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridengine.reshard.plan.planner import Planner, ReshardPlan
from hybridengine.sharding.layout import EngineLayout
from hybridengine.sharding.shards import ShardSpec, dim1_parameters
from hybridengine.sharding.tp_groups import tp_groups

__all__ = ["Advice", "Option", "advise"]


@dataclass(frozen=True)
class Option:
    """One way to place engine and shards, and what a sync then moves.

    grouping: TP groups "strided" over all ranks ({j, j+N/t, …}), "strided in nodes" or "neighbours"
    ({jt, jt+1, …}). tp_in_node: whether no TP group crosses nodes. row_dim, expert_dim: dimension
    on which row-parallel weights and fused experts are sharded. seconds: see `advise`.
    """

    grouping: str
    tp_in_node: bool
    row_dim: int
    expert_dim: int
    plan: ReshardPlan
    seconds: float

    @property
    def received_bytes(self) -> int:
        return max(self.plan.bytes_received)

    @property
    def lower_bound_bytes(self) -> int:
        return max(self.plan.lower_bound)

    @property
    def inter_bytes(self) -> int:
        """The part of received_bytes, on the busiest rank, that crosses nodes."""
        return max(self.plan.bytes_crossing)


@dataclass(frozen=True)
class Advice:
    """Options, best first, and the same case done by others; bytes are per rank.

    An option whose TP groups stay inside nodes is better than any whose groups do not: generation
    reduces over the group twice per layer and token, a sync happens once per step.
    """

    num_parameters: int
    world_size: int
    tp_size: int
    nodes: int
    options: list[Option]
    hybridflow_bytes: int
    verl_bytes: int
    fallback: dict[str, str]


def advise(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Sequence[EngineLayout],
    world_size: int,
    *,
    nodes: int = 1,
    fsdp_size: int | None = None,
    intra_gb_per_s: float = 450.0,
    inter_gb_per_s: float = 50.0,
    latency_us: float = 100.0,
    bucket_bytes: int = 64 << 20,
) -> Advice:
    """Plan every option for `world_size` ranks and one engine layout per TP rank.

    shapes: trained parameter → global shape. fsdp_size: ranks that hold the model together,
    neighbours (HSDP); all if None. intra_gb_per_s, inter_gb_per_s: what one rank can send (and at
    the same time receive) inside a node and across nodes, in 10^9 bytes per second. latency_us: of
    one all-to-all, beside its bytes.

    A sync takes, for each bucket, what its busiest rank sends or receives inside the node and
    across nodes at these speeds, and the latency of the collective.
    """
    tp_size, fsdp_size = len(layouts), fsdp_size or world_size
    for name, size in (("tp", tp_size), ("nodes", nodes), ("fsdp_size", fsdp_size)):
        if size < 1 or world_size % size:
            raise ValueError(f"{name}: got {size}, expected a divisor of the {world_size} ranks")
    node = [rank * nodes // world_size for rank in range(world_size)]
    options = []
    for grouping, groups in _groupings(world_size, tp_size, nodes).items():
        in_node = all(len({node[rank] for rank in group}) == 1 for group in groups)
        tp_rank = {rank: place for group in groups for place, rank in enumerate(group)}
        on_rank = [layouts[tp_rank[rank]] for rank in range(world_size)]
        planner = Planner(on_rank, bucket_bytes, node)
        for dims, columns in _shardings(shapes, layouts, fsdp_size).items():
            sources = _sources(shapes, columns, world_size, fsdp_size)
            plan = planner.plan(sources)
            seconds = sum(
                bucket.intra_bytes / (intra_gb_per_s * 1e9)
                + bucket.inter_bytes / (inter_gb_per_s * 1e9)
                + latency_us * 1e-6
                for bucket in plan.buckets
                if bucket.intra_bytes or bucket.inter_bytes
            )
            options.append(Option(grouping, in_node, *dims, plan, seconds))
    options.sort(key=lambda o: (not o.tp_in_node, o.seconds, o.received_bytes))
    numel = sum(math.prod(shape) for shape in shapes.values())
    engine_bytes = numel * torch.bfloat16.itemsize
    return Advice(
        num_parameters=numel,
        world_size=world_size,
        tp_size=tp_size,
        nodes=nodes,
        options=options,
        hybridflow_bytes=round(engine_bytes * (1 / tp_size - 1 / world_size)),
        verl_bytes=round(numel * torch.float32.itemsize * (1 - 1 / world_size)),
        fallback={n: why for layout in layouts for n, why in layout.fallback.items()},
    )


def _groupings(world_size: int, tp_size: int, nodes: int) -> dict[str, list[list[int]]]:
    """Ways to choose TP groups, equal ones once, under the first name."""
    ranks = list(range(world_size))
    ways = {
        "strided": tp_groups(world_size, tp_size),
        "strided in nodes": tp_groups(world_size, tp_size, world_size // nodes),
        "neighbours": [ranks[first : first + tp_size] for first in ranks[::tp_size]],
    }
    first = {repr(way): name for name, way in reversed(ways.items())}
    return {name: way for name, way in ways.items() if first[repr(way)] == name}


def _shardings(
    shapes: Mapping[str, tuple[int, ...]], layouts: Sequence[EngineLayout], num_shards: int
) -> dict[tuple[int, int], set[str]]:
    """(row_dim, expert_dim) → the parameters that are sharded on dim 1; equal ones once."""
    sliced = layouts[0].sliced_dims(shapes)
    found: dict[tuple[int, int], set[str]] = {}
    for row_dim, expert_dim in ((0, 0), (1, 0), (1, 1)) if len(layouts) > 1 else ((0, 0), (0, 1)):
        columns = dim1_parameters(
            shapes, sliced, num_shards, rows=row_dim == 1, experts=expert_dim == 1
        )
        if columns not in found.values():
            found[row_dim, expert_dim] = columns
    return found


def _sources(
    shapes: Mapping[str, tuple[int, ...]], columns: set[str], world_size: int, fsdp_size: int
) -> dict[str, ShardSpec]:
    """Every parameter on `fsdp_size` neighbours, on dim 1 if it is in `columns`."""
    holders = tuple(tuple(range(rank, world_size, fsdp_size)) for rank in range(fsdp_size))
    return {
        name: ShardSpec(shape or (1,), torch.float32, int(name in columns), holders)
        for name, shape in shapes.items()
    }
