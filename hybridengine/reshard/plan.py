"""Who sends which slice to whom: engine layouts intersected with FSDP2 shards.

A pure function of (shard placements, engine layouts, bucket size): every rank computes the same
plan without communication, and nothing in it depends on values. Volumes and slices are worked out
once per structurally equal layer, slices only for the rank that asks.
Lower bound per rank (HybridFlow, arXiv 2409.19256, table 2): the bytes its tensor-parallel slice
holds minus those it already has.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hybridengine.reshard.coverage import check_coverage
from hybridengine.reshard.flows import Flows, Kind, Share
from hybridengine.reshard.geometry import Block
from hybridengine.reshard.layout import EngineLayout, LayoutError
from hybridengine.reshard.shards import ShardSpec

__all__ = ["Bucket", "Piece", "ReshardPlan", "Slice", "Unit", "build_plan"]


class Slice(NamedTuple):
    """One strided slice, in any source of a kind. need: which of the layout's blocks it is of."""

    need: int
    shard: int
    sender: int
    receiver: int
    block: Block


class Piece(NamedTuple):
    """One strided slice moving from a shard of `source` to an engine tensor of rank `receiver`."""

    source: str
    shard: int
    sender: int
    receiver: int
    destination: str
    block: Block


@dataclass(frozen=True)
class Unit:
    """One share of one source."""

    source: str
    share: Share


@dataclass
class Bucket:
    """What travels in one all-to-all: one source dtype, one engine dtype, one sort of source."""

    source_dtype: torch.dtype
    engine_dtype: torch.dtype
    frozen: bool
    merged: bool
    units: list[Unit] = field(default_factory=list)


_Source = tuple[str, torch.dtype]  # what a kind belongs to: source and engine dtype


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
    _kinds: dict[_Source, Kind]
    _destinations: dict[_Source, list[list[str]]]  # per layout, one per block of the kind
    _slices: dict[tuple, list[Slice]] = field(default_factory=dict)

    def traffic(self) -> np.ndarray:
        """Bytes from sender to receiver, int64 [N, N]; nothing on the diagonal."""
        flows = Flows(self._layout_of)
        times: dict[Kind, int] = defaultdict(int)
        for (_, dtype), kind in self._kinds.items():
            times[kind] += dtype.itemsize
        matrix = np.zeros((self.world_size, self.world_size), np.int64)
        for kind, size in times.items():
            matrix += flows.traffic(kind) * size
        return matrix

    def arrivals(self, bucket: Bucket, rank: int) -> Iterator[Piece]:
        """The slices rank `rank` gets, its own included; per sender in the order they are sent."""
        for unit in bucket.units:
            yield from self._pieces(bucket, unit, self.incoming(bucket, unit, rank))

    def departures(self, bucket: Bucket, rank: int) -> Iterator[Piece]:
        """The slices rank `rank` sends to others; per receiver in the order they are expected."""
        for unit in bucket.units:
            yield from self._pieces(bucket, unit, self.outgoing(bucket, unit, rank))

    def destinations(self, bucket: Bucket, unit: Unit, rank: int) -> list[str]:
        """The engine tensor of `rank` for each `need` of a unit's slices."""
        return self._destinations[unit.source, bucket.engine_dtype][self._layout_of[rank]]

    def incoming(self, bucket: Bucket, unit: Unit, rank: int) -> list[Slice]:
        """What `rank` gets of a unit; the very same list for every source of the same kind."""
        kind = self._kinds[unit.source, bucket.engine_dtype]
        key = ("in", kind, unit.share, rank)
        if key not in self._slices:
            share, spec = unit.share, kind.spec
            self._slices[key] = [
                Slice(need, shard, spec.sender(shard, rank), rank, part)
                for need, block in enumerate(kind.blocks[self._layout_of[rank]])
                for shard in spec.shards_touched(block)
                if (shard + rank) % share.turns == share.turn
                for part in kind.cut(block, shard, share)
            ]
        return self._slices[key]

    def outgoing(self, bucket: Bucket, unit: Unit, rank: int) -> list[Slice]:
        """What `rank` sends to others of a unit; one list per kind, as `incoming`."""
        kind = self._kinds[unit.source, bucket.engine_dtype]
        key = ("out", kind, unit.share, rank)
        if key not in self._slices:
            self._slices[key] = list(self._outgoing(kind, unit.share, rank))
        return self._slices[key]

    def _outgoing(self, kind: Kind, share: Share, rank: int) -> Iterator[Slice]:
        shard = kind.spec.held_by(rank)
        if shard is None:
            return
        parts: dict[int, list[tuple[int, Block]]] = {}
        for receiver, layout in enumerate(self._layout_of):
            if (shard + receiver) % share.turns != share.turn or receiver == rank:
                continue
            if kind.spec.sender(shard, receiver) != rank:
                continue
            if layout not in parts:
                blocks = enumerate(kind.blocks[layout])
                parts[layout] = [(n, p) for n, b in blocks for p in kind.cut(b, shard, share)]
            for need, part in parts[layout]:
                yield Slice(need, shard, rank, receiver, part)

    def _pieces(self, bucket: Bucket, unit: Unit, slices: list[Slice]) -> Iterator[Piece]:
        names = self._destinations[unit.source, bucket.engine_dtype]
        for need, shard, sender, receiver, block in slices:
            destination = names[self._layout_of[receiver]][need]
            yield Piece(unit.source, shard, sender, receiver, destination, block)


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
    source, or twice, or when a bucket cannot hold one row of a source.
    """
    if bucket_bytes < 1 << 12:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}, expected at least 4096")
    distinct = list({id(layout): layout for layout in layouts}.values())
    index = {id(layout): i for i, layout in enumerate(distinct)}
    layout_of = [index[id(layout)] for layout in layouts]
    for layout in distinct:
        check_coverage(layout)
    fallback = {n: why for layout in distinct for n, why in layout.fallback.items()}
    kinds, destinations = _kinds(sources, distinct)

    flows = Flows(layout_of)
    totals = np.zeros((4, len(layouts)), np.int64)
    buckets: list[Bucket] = []
    filling: dict[tuple, tuple[Bucket, np.ndarray]] = {}
    staging_bytes = 0
    for (source, dtype), kind in kinds.items():
        totals += flows.count(kind) * dtype.itemsize
        if source in fallback:
            continue
        spec = kind.spec
        sort = (spec.dtype, dtype, spec.frozen, spec.merged)
        for share, staging in flows.shares(source, kind, dtype.itemsize, bucket_bytes):
            bucket, used = filling.get(sort, (None, None))
            if bucket is None or (used + staging).max() > bucket_bytes:
                bucket, used = Bucket(*sort), np.zeros(len(layouts), np.int64)
                buckets.append(bucket)
            bucket.units.append(Unit(source, share))
            filling[sort] = (bucket, used + staging)
            staging_bytes = max(staging_bytes, int((used + staging).max()))
    described = (bucket_bytes, layout_of, list(sources.items()), [la.digest() for la in distinct])
    digest = hashlib.sha256(repr(described).encode()).hexdigest()
    summed = (*totals.tolist(), staging_bytes, fallback, digest)
    return ReshardPlan(len(layouts), sources, buckets, *summed, layout_of, kinds, destinations)


def _kinds(
    sources: Mapping[str, ShardSpec], layouts: Sequence[EngineLayout]
) -> tuple[dict[_Source, Kind], dict[_Source, list[list[str]]]]:
    """What is needed of each source, one Kind object for all sources of equal needs."""
    needs: dict[_Source, list[list[tuple[str, Block]]]] = defaultdict(lambda: [[] for _ in layouts])
    for i, layout in enumerate(layouts):
        for copy in layout.copies:
            spec = sources.get(copy.source)
            if spec is None:
                raise LayoutError(
                    f"the engine expects the checkpoint tensor {copy.source!r}, which the trained "
                    f"model does not have (it has {len(sources)}, e.g. "
                    f"{next(iter(sources), None)!r}). Were both built from the same model?"
                )
            dtype = layout.destinations[copy.destination].dtype
            needs[copy.source, dtype][i].append((copy.destination, copy.block(spec.shape)))
    place = {source: i for i, source in enumerate(sources)}
    ordered = sorted(needs, key=lambda key: (place[key[0]], str(key[1])))
    kinds: dict[_Source, Kind] = {}
    known: dict[tuple, Kind] = {}
    for source, dtype in ordered:
        groups, spec = needs[source, dtype], sources[source]
        blocks = [tuple(block for _, block in group) for group in groups]
        kind = known.setdefault((spec, dtype, *blocks), Kind(spec, blocks))
        kinds[source, dtype] = kind
    return kinds, {key: [[name for name, _ in group] for group in needs[key]] for key in ordered}
