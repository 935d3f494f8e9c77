"""Who sends which slice to whom: engine layouts intersected with FSDP2 shards.

A pure function of (shard placements, engine layouts, bucket size): every rank computes the same
plan without communication, and nothing in it depends on values. Volumes are counted once per
structurally equal layer, slices are listed only for the rank that asks.
Lower bound per rank (HybridFlow, arXiv 2409.19256, table 2): the bytes its tensor-parallel slice
holds minus those it already has.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridengine.reshard.coverage import check_coverage
from hybridengine.reshard.flows import Blocks, Flows
from hybridengine.reshard.geometry import Block, cut
from hybridengine.reshard.layout import EngineLayout, LayoutError
from hybridengine.reshard.shards import ShardSpec

__all__ = ["Bucket", "Piece", "ReshardPlan", "build_plan"]


@dataclass(frozen=True)
class Piece:
    """One strided slice moving from a shard of `source` to an engine tensor of rank `receiver`."""

    source: str
    shard: int
    sender: int
    receiver: int
    destination: str
    block: Block


@dataclass(frozen=True)
class _Unit:
    """Part `part` of `parts` of every shard of one source."""

    source: str
    part: int
    parts: int


@dataclass
class Bucket:
    """What travels in one all-to-all: one source dtype, one engine dtype, one kind of source."""

    source_dtype: torch.dtype
    engine_dtype: torch.dtype
    frozen: bool
    merged: bool
    units: list[_Unit] = field(default_factory=list)


_Need = tuple[str, torch.dtype, Block]  # engine tensor, its dtype, what of the source goes there


@dataclass
class ReshardPlan:
    """The whole exchange, the same on every rank.

    bytes_received, bytes_sent, bytes_needed: per rank; lower_bound: per rank, bytes its engine
    slice needs and its own shards do not hold. staging_bytes: the largest send + receive buffer of
    any bucket on any rank. fallback: checkpoint name → why it is gathered whole.
    """

    world_size: int
    sources: Mapping[str, ShardSpec]
    buckets: list[Bucket]
    bytes_received: list[int]
    bytes_sent: list[int]
    bytes_needed: list[int]
    lower_bound: list[int]
    staging_bytes: int
    fallback: dict[str, str]
    digest: str
    _layout_of: list[int]  # rank → index of its layout
    _needs: list[dict[str, list[_Need]]]  # layout → source → needs

    def traffic(self) -> np.ndarray:
        """Bytes from sender to receiver, int64 [N, N]; nothing on the diagonal."""
        flows = Flows(self._layout_of)
        matrix = np.zeros((self.world_size, self.world_size), np.int64)
        for source, spec in self.sources.items():
            for dtype, blocks in _by_dtype(source, self._needs):
                matrix += flows.traffic(spec, blocks) * dtype.itemsize
        return matrix

    def arrivals(self, bucket: Bucket, rank: int) -> Iterator[Piece]:
        """The slices rank `rank` gets, its own included; per sender in the order they are sent."""
        for unit in bucket.units:
            spec = self.sources[unit.source]
            for need in self._needs_of(bucket, unit, rank):
                for shard in spec.shards_touched(need[2]):
                    yield from self._pieces(unit, need, shard, spec.sender(shard, rank), rank)

    def departures(self, bucket: Bucket, rank: int) -> Iterator[Piece]:
        """The slices rank `rank` sends to others; per receiver in the order they are expected."""
        for unit in bucket.units:
            spec = self.sources[unit.source]
            shard = spec.held_by(rank)
            if shard is None:
                continue
            for receiver in range(self.world_size):
                if receiver == rank or spec.sender(shard, receiver) != rank:
                    continue
                for need in self._needs_of(bucket, unit, receiver):
                    yield from self._pieces(unit, need, shard, rank, receiver)

    def _needs_of(self, bucket: Bucket, unit: _Unit, rank: int) -> list[_Need]:
        needs = self._needs[self._layout_of[rank]].get(unit.source, ())
        return [need for need in needs if need[1] == bucket.engine_dtype]

    def _pieces(
        self, unit: _Unit, need: _Need, shard: int, sender: int, receiver: int
    ) -> Iterator[Piece]:
        destination, _, block = need
        spec = self.sources[unit.source]
        if not spec.shape:
            yield Piece(unit.source, shard, sender, receiver, destination, block)
            return
        low, high = spec.part(shard, unit.part, unit.parts)
        if low < high:
            for b in cut(block, spec.dim, low, high):
                yield Piece(unit.source, shard, sender, receiver, destination, b)


def build_plan(
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    bucket_bytes: int = 64 << 20,
) -> ReshardPlan:
    """Intersect engine layouts with the training shards.

    sources: checkpoint name → placement on the training ranks.
    layouts: one engine layout per rank (ranks with the same TP rank may share the object).
    bucket_bytes: upper bound of the staging memory (send + receive) of one all-to-all on any rank.

    Raises LayoutError when a layout names an unknown source or an engine element is written by no
    source, or twice.
    """
    if bucket_bytes < 1 << 12:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}, expected at least 4096")
    distinct = list({id(layout): layout for layout in layouts}.values())
    index = {id(layout): i for i, layout in enumerate(distinct)}
    layout_of = [index[id(layout)] for layout in layouts]
    for layout in distinct:
        check_coverage(layout)
    needs = [_needs_by_source(layout, sources) for layout in distinct]
    fallback = {n: why for layout in distinct for n, why in layout.fallback.items()}

    flows = Flows(layout_of)
    received, sent, needed, bound = (np.zeros(len(layouts), np.int64) for _ in range(4))
    buckets: list[Bucket] = []
    filling: dict[tuple, tuple[Bucket, np.ndarray]] = {}
    staging_bytes = 0
    for source, spec in sources.items():
        for dtype, blocks in _by_dtype(source, needs):
            total = flows.count(spec, blocks, 0, 1)
            received += total.received * dtype.itemsize
            sent += total.sent * dtype.itemsize
            needed += total.needed * dtype.itemsize
            bound += total.lower_bound * dtype.itemsize
            if source in fallback:
                continue
            kind = (spec.dtype, dtype, spec.frozen, spec.merged)
            for part, parts, staging in flows.split(spec, blocks, dtype.itemsize, bucket_bytes):
                bucket, used = filling.get(kind, (None, None))
                if bucket is None or (used + staging).max() > bucket_bytes:
                    bucket, used = Bucket(*kind), np.zeros(len(layouts), np.int64)
                    buckets.append(bucket)
                bucket.units.append(_Unit(source, part, parts))
                filling[kind] = (bucket, used + staging)
                staging_bytes = max(staging_bytes, int((used + staging).max()))
    return ReshardPlan(
        world_size=len(layouts),
        sources=sources,
        buckets=buckets,
        bytes_received=received.tolist(),
        bytes_sent=sent.tolist(),
        bytes_needed=needed.tolist(),
        lower_bound=bound.tolist(),
        staging_bytes=staging_bytes,
        fallback=fallback,
        digest=_digest(sources, distinct, layout_of, bucket_bytes),
        _layout_of=layout_of,
        _needs=needs,
    )


def _by_dtype(
    source: str, needs: Sequence[dict[str, list[_Need]]]
) -> Iterator[tuple[torch.dtype, Blocks]]:
    wanted = [n.get(source, []) for n in needs]
    for dtype in dict.fromkeys(need[1] for group in wanted for need in group):
        yield dtype, [tuple(need[2] for need in group if need[1] == dtype) for group in wanted]


def _needs_by_source(
    layout: EngineLayout, sources: Mapping[str, ShardSpec]
) -> dict[str, list[_Need]]:
    needs: dict[str, list[_Need]] = defaultdict(list)
    for copy in layout.copies:
        spec = sources.get(copy.source)
        if spec is None:
            raise LayoutError(
                f"the engine expects the checkpoint tensor {copy.source!r}, which the trained "
                f"model does not have (it has {len(sources)}, e.g. {next(iter(sources), None)!r}). "
                "Were both built from the same model?"
            )
        dtype = layout.destinations[copy.destination].dtype
        needs[copy.source].append((copy.destination, dtype, copy.block(spec.shape)))
    return needs


def _digest(
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    layout_of: Sequence[int],
    bucket_bytes: int,
) -> str:
    h = hashlib.sha256(repr((bucket_bytes, layout_of, sorted(sources.items()))).encode())
    for layout in layouts:
        h.update(repr((layout.destinations, layout.copies, layout.fallback)).encode())
    return h.hexdigest()
