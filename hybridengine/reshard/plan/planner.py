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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hybridengine.reshard.plan.coverage import check_coverage
from hybridengine.reshard.plan.flows import Kind, Share, Staged, find_shares
from hybridengine.reshard.plan.overlaps import Read
from hybridengine.reshard.plan.routes import Ranks, Route
from hybridengine.sharding.geometry import Block
from hybridengine.sharding.layout import EngineLayout, LayoutError
from hybridengine.sharding.shards import ShardSpec

__all__ = ["Bucket", "Piece", "Planner", "ReshardPlan", "Slice", "Unit", "build_plan"]


class Slice(NamedTuple):
    """One strided slice, in any source of a kind, that travels once.

    block: what is read. targets: where it is written, (which of the layout's blocks, its part).
    """

    shard: int
    sender: int
    receiver: int
    block: Block
    targets: Read


class Piece(NamedTuple):
    """One strided slice from a shard of `source` to an engine tensor of rank `receiver`.

    shared: its elements travel with the piece before it, which goes to another engine tensor.
    """

    source: str
    shard: int
    sender: int
    receiver: int
    destination: str
    block: Block
    shared: bool


@dataclass(frozen=True)
class Unit:
    """One share of one source."""

    source: str
    share: Share


@dataclass
class Bucket:
    """What travels in one all-to-all: one source dtype, one engine dtype, one sort of source.

    intra_bytes, inter_bytes: what the busiest rank receives or sends (the larger of the two) inside
    its node and across nodes.
    """

    source_dtype: torch.dtype
    engine_dtype: torch.dtype
    frozen: bool
    merged: bool
    units: list[Unit] = field(default_factory=list)
    intra_bytes: int = 0
    inter_bytes: int = 0


_Source = tuple[str, torch.dtype]  # what a kind belongs to: source and engine dtype
_Pair = tuple[int, int]  # shard, receiver


@dataclass
class ReshardPlan:
    """The whole exchange, the same on every rank.

    Per rank: bytes_received, bytes_sent; bytes_crossing, the part of the received that comes from
    other nodes; bytes_needed, what its engine holds; lower_bound, the distinct source elements it
    needs and its own shards do not hold. staging_bytes: the largest send + receive buffer of any
    bucket on any rank. fallback: checkpoint name → why it is gathered whole.
    """

    world_size: int
    sources: Mapping[str, ShardSpec]
    buckets: list[Bucket]
    bytes_received: list[int]
    bytes_sent: list[int]
    bytes_crossing: list[int]
    bytes_needed: list[int]
    lower_bound: list[int]
    staging_bytes: int
    fallback: dict[str, str]
    digest: str
    _layout_of: list[int]  # rank → index of its layout
    _kinds: dict[_Source, Kind]
    _destinations: dict[_Source, list[list[str]]]  # per layout, one per block of the kind
    _slices: dict[tuple, list[Slice]] = field(default_factory=dict)
    _pairs: dict[tuple, dict[int, list[_Pair]]] = field(default_factory=dict)

    def traffic(self) -> np.ndarray:
        """Bytes from sender to receiver, int64 [N, N]; nothing on the diagonal."""
        times: dict[Kind, int] = defaultdict(int)
        for (_, dtype), kind in self._kinds.items():
            times[kind] += dtype.itemsize
        matrix = np.zeros((self.world_size, self.world_size), np.int64)
        ranks = np.arange(self.world_size)
        for kind, size in times.items():
            for shard in np.flatnonzero(kind.elements.any(0)).tolist():
                moved = kind.elements[self._layout_of, shard] * size
                matrix[kind.route.sender[shard], ranks] += moved
        np.fill_diagonal(matrix, 0)
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

    def shard(self, bucket: Bucket, unit: Unit, rank: int) -> int | None:
        """The shard of a unit's source that `rank` holds."""
        own = int(self._kinds[unit.source, bucket.engine_dtype].route.own[rank])
        return None if own < 0 else own

    def incoming(self, bucket: Bucket, unit: Unit, rank: int) -> list[Slice]:
        """What `rank` gets of a unit; the very same list for every source of the same kind."""
        kind = self._kinds[unit.source, bucket.engine_dtype]
        key = ("in", kind, unit.share, rank)
        if key not in self._slices:
            turns = self._turns("in", kind, unit.share.turns, rank)
            pairs = ((shard, rank) for shard, _ in turns.get(unit.share.turn, ()))
            self._slices[key] = list(self._cut(kind, unit.share, pairs))
        return self._slices[key]

    def outgoing(self, bucket: Bucket, unit: Unit, rank: int) -> list[Slice]:
        """What `rank` sends to others of a unit; one list per kind, as `incoming`."""
        kind = self._kinds[unit.source, bucket.engine_dtype]
        key = ("out", kind, unit.share, rank)
        if key not in self._slices:
            turns = self._turns("out", kind, unit.share.turns, rank)
            pairs = turns.get(unit.share.turn, ())
            self._slices[key] = list(self._cut(kind, unit.share, pairs))
        return self._slices[key]

    def _turns(self, way: str, kind: Kind, turns: int, rank: int) -> dict[int, list[_Pair]]:
        """The pairs (shard, receiver) that have `rank` at one end, by turn."""
        key = (way, kind, turns, rank)
        if key not in self._pairs:
            find = kind.pairs_to if way == "in" else kind.pairs_from
            shards, receivers, turn = (a.tolist() for a in find(rank, turns))
            by_turn: dict[int, list[_Pair]] = defaultdict(list)
            for shard, receiver, t in zip(shards, receivers, turn, strict=True):
                by_turn[t].append((shard, receiver))
            self._pairs[key] = dict(by_turn)
        return self._pairs[key]

    def _cut(self, kind: Kind, share: Share, pairs: Iterable[_Pair]) -> Iterator[Slice]:
        """The slices of some pairs; of one pair in the same order whichever rank asks."""
        known: dict[tuple[int, int], list[Read]] = {}
        for shard, receiver in pairs:
            at = (shard, self._layout_of[receiver])
            if at not in known:
                known[at] = list(kind.pieces(at[1], shard, share))
            sender = int(kind.route.sender[shard, receiver])
            for targets in known[at]:
                yield Slice(shard, sender, receiver, targets[0][1].read, targets)

    def _pieces(self, bucket: Bucket, unit: Unit, slices: list[Slice]) -> Iterator[Piece]:
        names = self._destinations[unit.source, bucket.engine_dtype]
        for shard, sender, receiver, _, targets in slices:
            for i, (need, block) in enumerate(targets):
                destination = names[self._layout_of[receiver]][need]
                yield Piece(unit.source, shard, sender, receiver, destination, block, i > 0)


def build_plan(
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    bucket_bytes: int = 64 << 20,
    nodes: Sequence[int] | None = None,
) -> ReshardPlan:
    """Intersect engine layouts with the training shards.

    sources: checkpoint name → placement on the training ranks.
    layouts: one engine layout per rank (ranks with the same TP rank may share the object).
    bucket_bytes: upper bound of the staging memory (send + receive) of one all-to-all on any rank.
    nodes: the node of each rank, any numbers; all on one node if None. A shard with several holders
      is sent by one in the receiver's node where there is one.

    Raises LayoutError when a layout names an unknown source or an engine element is written by no
    source, or twice, or when a bucket cannot hold one row of a source.
    """
    return Planner(layouts, bucket_bytes, nodes).plan(sources)


class Planner:
    """Plans for the same engine layouts and different placements of what is trained (the arguments
    are those of `build_plan`). What some placements have in common is worked out once."""

    def __init__(
        self,
        layouts: Sequence[EngineLayout],
        bucket_bytes: int = 64 << 20,
        nodes: Sequence[int] | None = None,
    ) -> None:
        if bucket_bytes < 1 << 12:
            raise ValueError(f"bucket_bytes: got {bucket_bytes}, expected at least 4096")
        self._bucket_bytes = bucket_bytes
        self._nodes = [0] * len(layouts) if nodes is None else list(nodes)
        if len(self._nodes) != len(layouts):
            raise ValueError(
                f"nodes: got {len(self._nodes)} entries, expected one per rank: {len(layouts)}"
            )
        self._layouts = list({id(layout): layout for layout in layouts}.values())
        index = {id(layout): i for i, layout in enumerate(self._layouts)}
        self._layout_of = [index[id(layout)] for layout in layouts]
        for layout in self._layouts:
            check_coverage(layout)
        self._routes = _Routes(Ranks(self._layout_of, self._nodes))
        self._known_kinds: dict[tuple, Kind] = {}
        self._known_shares: dict[tuple[Kind, int], _Shares] = {}

    def plan(self, sources: Mapping[str, ShardSpec]) -> ReshardPlan:
        """As `build_plan`, which raises the same."""
        world_size = len(self._layout_of)
        fallback = {n: why for layout in self._layouts for n, why in layout.fallback.items()}
        kinds, destinations = _kinds(sources, self._layouts, self._routes, self._known_kinds)
        moving = {key: kind for key, kind in kinds.items() if key[0] not in fallback}
        buckets, moved, staging_bytes = _fill_buckets(
            sources, moving, self._bucket_bytes, world_size, self._known_shares
        )
        needed, lower_bound = np.zeros((2, world_size), np.int64)
        for (_, dtype), kind in kinds.items():
            needed += kind.needed[self._layout_of] * dtype.itemsize
            lower_bound += kind.missing * dtype.itemsize
        digest = _digest(self._bucket_bytes, self._layout_of, self._nodes, sources, self._layouts)
        per_rank = (moved[:2].sum(0), moved[2:].sum(0), moved[1], needed, lower_bound)
        summed = (*(a.tolist() for a in per_rank), staging_bytes, fallback, digest)
        return ReshardPlan(
            world_size, sources, buckets, *summed, self._layout_of, kinds, destinations
        )


def _fill_buckets(
    sources: Mapping[str, ShardSpec],
    kinds: Mapping[_Source, Kind],
    bucket_bytes: int,
    world_size: int,
    known: dict[tuple[Kind, int], _Shares],
) -> tuple[list[Bucket], np.ndarray, int]:
    """(buckets, bytes moved int64 [4, N] as `Kind.loads`, most bytes that a rank stages).

    known: shares by (kind, bytes of an element), to which those of new kinds are added.
    """
    buckets: list[Bucket] = []
    filling: dict[tuple, tuple[Bucket, np.ndarray, np.ndarray]] = {}
    total, staging_bytes = np.zeros((4, world_size), np.int64), 0

    def close(bucket: Bucket, used: np.ndarray, moved: np.ndarray) -> None:
        nonlocal staging_bytes
        moved *= bucket.engine_dtype.itemsize
        staging_bytes = max(staging_bytes, int(used.max()))
        received_sent = moved.reshape(2, 2, -1)  # by node: inside, across
        bucket.intra_bytes, bucket.inter_bytes = received_sent.max((0, 2)).tolist()
        np.add(total, moved, out=total)

    for (source, dtype), kind in kinds.items():
        key, spec = (kind, dtype.itemsize), sources[source]
        if key not in known:
            known[key] = _Shares(find_shares(source, *key, bucket_bytes))
        shares, first = known[key], 0
        sort = (spec.dtype, dtype, spec.frozen, spec.merged)
        while first < len(shares.units):
            if sort not in filling:
                filling[sort] = Bucket(*sort), np.zeros(world_size, np.int64), np.zeros_like(total)
                buckets.append(filling[sort][0])
            bucket, used, moved = filling[sort]
            end = shares.that_fit(first, used, bucket_bytes)
            if end == first:
                close(*filling.pop(sort))
                continue
            bucket.units += [Unit(source, share) for share in shares.units[first:end]]
            used += shares.staged[end] - shares.staged[first]
            moved += shares.loads[first:end].sum(0, dtype=np.int64)
            first = end
    for last in filling.values():
        close(*last)
    return buckets, total, staging_bytes


class _Shares:
    """The T shares of a source.

    staged: bytes that each rank stages of those before a share, int64 [T + 1, N]. loads: of each
    share, as `Kind.loads`, [T, 4, N].
    """

    def __init__(self, shares: Sequence[Staged]) -> None:
        self.units = [s.share for s in shares]
        self.staged = _running_sums([s.staged for s in shares])
        self.loads = np.stack([s.loads for s in shares])
        self._busiest = _running_sums([s.staged.max() for s in shares])

    def that_fit(self, first: int, used: np.ndarray, limit: int) -> int:
        """Behind the last of the shares from `first` on that fit on every rank beside `used`."""
        room = limit - used.max() + self._busiest[first]
        end = max(first, int(np.searchsorted(self._busiest, room, "right")) - 1)  # fits at least
        begin = used - self.staged[first]
        while end < len(self.units) and (begin + self.staged[end + 1]).max() <= limit:
            end += 1
        return end


def _running_sums(values: Sequence[np.ndarray]) -> np.ndarray:
    sums = np.zeros((len(values) + 1, *np.shape(values[0])), np.int64)
    np.cumsum(values, axis=0, out=sums[1:])
    return sums


class _Routes:
    """One Route for all sources on the same holders."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._by_value: dict[tuple, Route] = {}
        self._by_id: dict[int, Route] = {}  # holders has an entry per rank: compare it once

    def of(self, spec: ShardSpec) -> Route:
        if id(spec.holders) not in self._by_id:
            if spec.holders not in self._by_value:
                self._by_value[spec.holders] = Route(spec.holders, self._ranks)
            self._by_id[id(spec.holders)] = self._by_value[spec.holders]
        return self._by_id[id(spec.holders)]


def _kinds(
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    routes: _Routes,
    known: dict[tuple, Kind],
) -> tuple[dict[_Source, Kind], dict[_Source, list[list[str]]]]:
    """What is needed of each source, one Kind object for all sources of equal needs.

    known: Kinds by what makes them equal, to which new ones are added.
    """
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
    for source, dtype in ordered:
        groups, spec = needs[source, dtype], sources[source]
        blocks = [tuple(block for _, block in group) for group in groups]
        route = routes.of(spec)
        key = (route, spec.shape, spec.dtype, spec.dim, spec.frozen, spec.merged, dtype, *blocks)
        if key not in known:
            known[key] = Kind(spec, route, blocks)
        kinds[source, dtype] = known[key]
    return kinds, {key: [[name for name, _ in group] for group in needs[key]] for key in ordered}


def _digest(
    bucket_bytes: int,
    layout_of: Sequence[int],
    nodes: Sequence[int],
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
) -> str:
    """Of all that the plan is made from: the same on every rank."""
    holders = {id(spec.holders): spec.holders for spec in sources.values()}
    named = {i: hashlib.sha256(repr(h).encode()).hexdigest() for i, h in holders.items()}
    placed = [
        (name, s.shape, s.dtype, s.dim, named[id(s.holders)], s.frozen, s.merged)
        for name, s in sources.items()
    ]
    described = (bucket_bytes, layout_of, nodes, placed, [la.digest() for la in layouts])
    return hashlib.sha256(repr(described).encode()).hexdigest()
