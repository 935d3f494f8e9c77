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
from hybridengine.reshard.geometry import Block, count_below, cut
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
    """What travels in one all-to-all: one source dtype, one engine dtype."""

    source_dtype: torch.dtype
    engine_dtype: torch.dtype
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

    flows = _Flows(layout_of)
    received, sent, needed, bound = (np.zeros(len(layouts), np.int64) for _ in range(4))
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.dtype], tuple[Bucket, np.ndarray]] = {}
    staging_bytes = 0
    for source, spec in sources.items():
        wanted = [n.get(source, []) for n in needs]
        for dtype in dict.fromkeys(need[1] for need_list in wanted for need in need_list):
            blocks = [tuple(n[2] for n in w if n[1] == dtype) for w in wanted]
            total = flows.count(spec, blocks, 0, 1)
            received += total.received * dtype.itemsize
            sent += total.sent * dtype.itemsize
            needed += total.needed * dtype.itemsize
            bound += total.lower_bound * dtype.itemsize
            if source in fallback:
                continue
            pair = (spec.dtype, dtype)
            for part, parts, elements in flows.split(spec, blocks, bucket_bytes // dtype.itemsize):
                staging = elements * dtype.itemsize
                bucket, used = filling.get(pair, (None, None))
                if bucket is None or (used + staging).max() > bucket_bytes:
                    bucket, used = Bucket(*pair), np.zeros(len(layouts), np.int64)
                    buckets.append(bucket)
                bucket.units.append(_Unit(source, part, parts))
                filling[pair] = (bucket, used + staging)
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


@dataclass(frozen=True)
class _Flow:
    """Elements per rank for one source (or part): received, sent, needed, the lower bound."""

    received: np.ndarray
    sent: np.ndarray
    needed: np.ndarray
    lower_bound: np.ndarray


class _Flows:
    """Counts elements that move, vectorised over ranks, once per structurally equal source."""

    def __init__(self, layout_of: Sequence[int]) -> None:
        self._layout_of = np.array(layout_of)
        self._cache: dict[tuple, _Flow] = {}

    def count(
        self, spec: ShardSpec, blocks: Sequence[tuple[Block, ...]], part: int, parts: int
    ) -> _Flow:
        key = (spec, tuple(tuple(b.region for b in group) for group in blocks), part, parts)
        if key not in self._cache:
            self._cache[key] = self._count(spec, blocks, part, parts)
        return self._cache[key]

    def split(
        self, spec: ShardSpec, blocks: Sequence[tuple[Block, ...]], limit: int
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(part, parts, staged elements per rank) with no rank above `limit`, if it divides."""
        longest = max(high - low for low, high in map(spec.interval, range(len(spec.holders))))
        parts = 1
        while True:
            staged = [self._staged(spec, blocks, part, parts) for part in range(parts)]
            worst = max(int(s.max()) for s in staged)
            if worst <= limit or parts >= longest:
                break
            parts = min(longest, max(parts + 1, -(-worst * parts // limit)))
        for part, elements in enumerate(staged):
            yield part, parts, elements

    def _staged(
        self, spec: ShardSpec, blocks: Sequence[tuple[Block, ...]], part: int, parts: int
    ) -> np.ndarray:
        flow = self.count(spec, blocks, part, parts)
        return flow.received + flow.sent

    def _count(
        self, spec: ShardSpec, blocks: Sequence[tuple[Block, ...]], part: int, parts: int
    ) -> _Flow:
        holders = np.array(spec.holders)  # [S, R]
        by_shard = np.array(  # [layouts, S]: elements of each shard that a layout needs
            [_elements_by_shard(group, spec, part, parts) for group in blocks]
        )
        distinct = [tuple({b.region: b for b in group}.values()) for group in blocks]
        once = np.array([_elements_by_shard(group, spec, part, parts) for group in distinct])
        ranks, replicas = np.arange(len(self._layout_of)), holders.shape[1]
        own = np.full(len(ranks), -1)
        own[holders] = np.arange(len(holders))[:, None]
        needed = by_shard[self._layout_of].sum(1)
        held = np.where(own >= 0, by_shard[self._layout_of, own], 0)
        held_once = np.where(own >= 0, once[self._layout_of, own], 0)
        sent = np.zeros(len(ranks), np.int64)
        for turn in range(replicas):  # receivers r with r % replicas == turn ask this replica
            asking = np.bincount(self._layout_of[turn::replicas], minlength=len(blocks))
            served = asking @ by_shard  # [S]
            np.add.at(sent, holders[:, turn], served)
        # A holder serves itself: take that out of the replica whose turn it would have been.
        keeps = own >= 0
        np.subtract.at(sent, holders[own[keeps], ranks[keeps] % replicas], held[keeps])
        return _Flow(needed - held, sent, needed, once[self._layout_of].sum(1) - held_once)


def _elements_by_shard(
    blocks: Sequence[Block], spec: ShardSpec, part: int, parts: int
) -> np.ndarray:
    """How many elements of `blocks` lie in each shard's part: int64 [S]."""
    if not spec.shape:
        return np.array([sum(b.numel for b in blocks) if part == 0 else 0])
    edges = np.array([spec.part(shard, part, parts) for shard in range(len(spec.holders))])
    total = np.zeros(len(edges), np.int64)
    for block in blocks:
        total += count_below(block, spec.dim, edges[:, 1]) - count_below(
            block, spec.dim, edges[:, 0]
        )
    return total


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
