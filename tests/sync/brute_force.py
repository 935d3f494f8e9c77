"""Brute force against the planner: element by element, with no code of the planner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hybridengine.lab.advisor import traffic_matrix
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.source_class import SliceCopy

__all__ = [
    "arrivals",
    "assert_both_sides_agree",
    "assert_delivers",
    "brute_force_bound",
    "brute_force_entering",
    "fused_layout",
    "walk",
]


def walk(offset: int, sizes, strides) -> np.ndarray:
    """Every linear address a strided view visits, in order."""
    address = np.array([offset])
    for size, stride in zip(sizes, strides, strict=True):
        address = (address[:, None] + np.arange(size) * stride).reshape(-1)
    return address


def fused_layout(shapes, tp_rank: int, tp_size: int) -> EngineLayout:
    """A hand-made tensor-parallel model: fused column-parallel, row-parallel, replicated."""
    copies, destinations = [], {}
    rows_at = 0
    for name, (kind, shape) in shapes.items():
        if kind == "replicated":
            destinations[name] = TensorSpec(shape, contiguous_strides(shape), torch.bfloat16)
            stride = contiguous_strides(shape)
            copies.append(Copy(name, name, 0, 0, shape, stride, stride))
        elif kind == "row":
            local = (shape[0], shape[1] // tp_size)
            destinations[name] = TensorSpec(local, contiguous_strides(local), torch.bfloat16)
            copies.append(
                Copy(name, name, tp_rank * local[1], 0, local, (shape[1], 1), (local[1], 1))
            )
        else:
            local = (shape[0] // tp_size, shape[1])
            copies.append(
                Copy(
                    name,
                    "fused",
                    tp_rank * local[0] * shape[1],
                    rows_at * shape[1],
                    local,
                    (shape[1], 1),
                    (shape[1], 1),
                )
            )
            rows_at += local[0]
    width = next(s[1] for k, s in shapes.values() if k == "column")
    destinations["fused"] = TensorSpec((rows_at, width), (width, 1), torch.bfloat16)
    return EngineLayout(destinations, copies)


def brute_force_bound(sources, layouts) -> list[int]:
    """Bytes (bfloat16) that each rank needs and does not hold."""
    ranks = range(len(layouts))
    return [
        2 * sum(len(_missing(name, spec, layouts, [rank])) for name, spec in sources.items())
        for rank in ranks
    ]


def brute_force_entering(sources, layouts, nodes) -> list[int]:
    """Elements that the ranks of each node need and none of them holds."""
    members = [[r for r, n in enumerate(nodes) if n == node] for node in sorted(set(nodes))]
    return [
        sum(len(_missing(name, spec, layouts, ranks)) for name, spec in sources.items())
        for ranks in members
    ]


def _missing(name: str, spec, layouts, ranks) -> np.ndarray:
    """Linear addresses of a parameter that `ranks` need and none of them holds."""
    wanted = [
        walk(c.source_offset, c.sizes, c.source_strides)
        for rank in ranks
        for c in layouts[rank].copies
        if c.source == name
    ]
    addresses = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
    for rank in ranks:
        if (shard := spec.shard_of(rank)) is not None:
            addresses = addresses[~_inside(addresses, spec.shape, spec.box(shard))]
    return addresses


def _inside(addresses: np.ndarray, shape, box) -> np.ndarray:
    """Which linear addresses of a contiguous tensor lie in a box of it."""
    inside = np.ones(len(addresses), bool)
    for position, (low, high) in zip(np.unravel_index(addresses, shape), box, strict=True):
        inside &= (low <= position) & (position < high)
    return inside


def assert_delivers(plan, rank: int, layout: EngineLayout, sources) -> None:
    """What arrives at this rank is, element for element, what its loader would have copied."""
    ids = {name: i * 10**6 for i, name in enumerate(sources)}
    want = {n: np.full(int(np.prod(t.shape)), -1) for n, t in layout.destinations.items()}
    got = {n: w.copy() for n, w in want.items()}
    for c in layout.copies:
        target = walk(c.destination_offset, c.sizes, c.destination_strides)
        want[c.destination][target] = ids[c.source] + walk(
            c.source_offset, c.sizes, c.source_strides
        )
    for dtype, name, copy in arrivals(plan, rank):
        assert copy.receiver == rank
        spec = sources[name]
        assert copy.sender in spec.holders[copy.shard]
        for index, block in copy.writes:
            destination = plan.destinations(name, dtype, rank)[index]
            origin = (0,) * len(spec.shape)
            offset, steps = block.address(contiguous_strides(spec.shape), origin)
            read = walk(offset, block.sizes, steps)
            assert _inside(read, spec.shape, spec.box(copy.shard)).all(), "read outside the shard"
            written = walk(block.offset, block.sizes, block.strides)
            assert (got[destination][written] == -1).all(), "an element arrives twice"
            got[destination][written] = ids[name] + read
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def arrivals(plan, rank: int) -> Iterator[tuple[torch.dtype, str, SliceCopy]]:
    """(engine dtype, parameter, slice) of all that a rank receives or keeps."""
    for bucket in plan.buckets:
        for name, copy in plan.arrivals(bucket, rank):
            yield bucket.engine_dtype, name, copy


def assert_both_sides_agree(plan, itemsize: int = 2) -> None:
    """For every pair of ranks the sender packs what the receiver unpacks, in the same order."""
    ranks = range(plan.world_size)
    sent, received = [0] * plan.world_size, [0] * plan.world_size
    traffic = np.zeros((plan.world_size, plan.world_size), np.int64)
    for bucket in plan.buckets:
        staged = [0] * plan.world_size
        arrived = [list(plan.arrivals(bucket, rank)) for rank in ranks]
        departures = [list(plan.departures(bucket, rank)) for rank in ranks]
        for sender in ranks:
            for receiver in ranks:
                if sender == receiver:
                    continue
                out = [d for d in departures[sender] if d[1].receiver == receiver]
                assert out == [a for a in arrived[receiver] if a[1].sender == sender]
                moved = itemsize * sum(copy.read.numel for _, copy in out)
                traffic[sender, receiver] += moved
                sent[sender] += moved
                received[receiver] += moved
                staged[sender] += moved
                staged[receiver] += moved
        assert max(staged) <= plan.staging_bytes
    assert (sent, received) == (plan.bytes_sent, plan.bytes_received)
    np.testing.assert_array_equal(traffic_matrix(plan), traffic)
