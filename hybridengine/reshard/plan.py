"""Who sends which slice to whom: engine layouts intersected with FSDP2 shards.

A pure function of (shard placements, engine layouts, bucket size): every rank computes the same
plan without communication, and nothing in it depends on values. Lower bound per rank (HybridFlow,
arXiv 2409.19256, table 2): the bytes its tensor-parallel slice holds minus those it already has.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridengine.reshard.geometry import Block, contiguous_strides, cut
from hybridengine.reshard.layout import EngineLayout, LayoutError

__all__ = ["Bucket", "Piece", "ReshardPlan", "ShardSpec", "build_plan", "check_coverage"]


@dataclass(frozen=True)
class ShardSpec:
    """How one checkpoint tensor lies on the training ranks.

    dim: the sharded dimension, split as torch.chunk does (the last shards may be short or empty).
    holders: for each shard the ranks that hold it (several under HSDP or replication).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, world_size: int) -> ShardSpec:
        """Read the placement of an FSDP2 parameter (a DTensor) or of a replicated tensor."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(shape, tensor.dtype, 0, (tuple(range(world_size)),))
        sharded = [
            (axis, p) for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate)
        ]
        if len(sharded) > 1 or any(type(p) is not Shard for _, p in sharded):
            raise LayoutError(
                f"parameter {name!r} has placements {tensor.placements}; expected at most one "
                "Shard(dim), the rest Replicate. Shard it with fully_shard over a 1-D or HSDP mesh."
            )
        ranks = tensor.device_mesh.mesh
        if not sharded:
            return cls(shape, tensor.dtype, 0, (tuple(ranks.flatten().tolist()),))
        axis, placement = sharded[0]
        by_shard = ranks.movedim(axis, 0).reshape(ranks.shape[axis], -1)
        return cls(shape, tensor.dtype, placement.dim, tuple(tuple(r) for r in by_shard.tolist()))

    def interval(self, shard: int) -> tuple[int, int]:
        """[low, high) on `dim` that this shard holds."""
        size = self.shape[self.dim] if self.shape else 1
        chunk = -(-size // len(self.holders))
        return min(shard * chunk, size), min((shard + 1) * chunk, size)

    def origin(self, shard: int) -> tuple[int, ...]:
        origin = [0] * len(self.shape)
        if self.shape:
            origin[self.dim] = self.interval(shard)[0]
        return tuple(origin)

    def held_by(self, rank: int) -> int | None:
        return next((s for s, ranks in enumerate(self.holders) if rank in ranks), None)

    def sender(self, shard: int, receiver: int) -> int:
        """Which holder serves `receiver`: itself if it can, else the replicas in turn."""
        ranks = self.holders[shard]
        return receiver if receiver in ranks else ranks[receiver % len(ranks)]


@dataclass(frozen=True)
class Piece:
    """One strided slice moving from a shard of `source` to an engine tensor of rank `receiver`."""

    source: str
    shard: int
    sender: int
    receiver: int
    destination: str
    block: Block


@dataclass
class Bucket:
    """Slices that travel in one all-to-all: one source dtype, one engine dtype."""

    source_dtype: torch.dtype
    engine_dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class ReshardPlan:
    """The whole exchange, the same object on every rank.

    bytes_received, bytes_sent, bytes_needed: per rank; lower_bound: per rank, bytes its engine
    slice needs and its own shards do not hold. staging_bytes: the largest send + receive buffer of
    any bucket on any rank. fallback: checkpoint name → why it is gathered whole.
    """

    world_size: int
    buckets: list[Bucket]
    bytes_received: list[int]
    bytes_sent: list[int]
    bytes_needed: list[int]
    lower_bound: list[int]
    staging_bytes: int
    fallback: dict[str, str]
    digest: str


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
    world_size = len(layouts)
    distinct: dict[int, EngineLayout] = {id(layout): layout for layout in layouts}
    for layout in distinct.values():
        check_coverage(layout, sources)
    needed = {key: _blocks_by_source(layout, sources) for key, layout in distinct.items()}
    fallback = {n: why for layout in distinct.values() for n, why in layout.fallback.items()}

    buckets: list[Bucket] = []
    load: dict[tuple[torch.dtype, torch.dtype], tuple[Bucket, np.ndarray]] = {}
    for source, spec in sources.items():
        if source in fallback:
            continue
        for engine_dtype in _engine_dtypes(source, distinct.values()):
            pair = (spec.dtype, engine_dtype)
            for pieces, staging in _units(
                source, spec, engine_dtype, layouts, needed, bucket_bytes, world_size
            ):
                bucket, used = load.get(pair, (None, None))
                if bucket is None or (used + staging).max() > bucket_bytes:
                    bucket, used = Bucket(*pair), np.zeros(world_size, np.int64)
                    buckets.append(bucket)
                bucket.pieces.extend(pieces)
                load[pair] = (bucket, used + staging)

    received, sent, own = (np.zeros(world_size, np.int64) for _ in range(3))
    staging_bytes = 0
    for bucket in buckets:
        staging = np.zeros(world_size, np.int64)
        for p in bucket.pieces:
            size = p.block.numel * bucket.engine_dtype.itemsize
            if p.sender == p.receiver:
                own[p.receiver] += size
                continue
            received[p.receiver] += size
            sent[p.sender] += size
            staging[[p.sender, p.receiver]] += size
        staging_bytes = max(staging_bytes, int(staging.max(initial=0)))
    return ReshardPlan(
        world_size=world_size,
        buckets=buckets,
        bytes_received=received.tolist(),
        bytes_sent=sent.tolist(),
        bytes_needed=(received + own).tolist(),
        lower_bound=[
            _lower_bound(rank, needed[id(layout)], sources) for rank, layout in enumerate(layouts)
        ],
        staging_bytes=staging_bytes,
        fallback=fallback,
        digest=_digest(sources, layouts, bucket_bytes),
    )


_Needs = dict[str, list[tuple[str, torch.dtype, Block]]]  # source → (destination, dtype, block)


def _blocks_by_source(layout: EngineLayout, sources: Mapping[str, ShardSpec]) -> _Needs:
    needs: _Needs = defaultdict(list)
    for copy in layout.copies:
        spec = sources.get(copy.source)
        if spec is None:
            raise LayoutError(
                f"the engine expects the checkpoint tensor {copy.source!r}, which the trained "
                f"model does not have (it has {len(sources)}, e.g. {next(iter(sources), None)!r}). "
                "Were both built from the same model?"
            )
        needs[copy.source].append(
            (
                copy.destination,
                layout.destinations[copy.destination].dtype,
                copy.block(spec.shape),
            )
        )
    return needs


def _engine_dtypes(source: str, layouts: Iterable[EngineLayout]) -> list[torch.dtype]:
    dtypes = {
        layout.destinations[c.destination].dtype: None
        for layout in layouts
        for c in layout.copies
        if c.source == source
    }
    return list(dtypes)


def _units(
    source: str,
    spec: ShardSpec,
    engine_dtype: torch.dtype,
    layouts: Sequence[EngineLayout],
    needed: Mapping[int, _Needs],
    bucket_bytes: int,
    world_size: int,
) -> Iterator[tuple[list[Piece], np.ndarray]]:
    """The pieces of one source, in as many parts as keep every rank under `bucket_bytes`."""
    parts = 1
    while True:
        units = [
            _pieces(source, spec, engine_dtype, layouts, needed, part, parts, world_size)
            for part in range(parts)
        ]
        worst = max(int(staging.max(initial=0)) for _, staging in units)
        longest = max(high - low for low, high in map(spec.interval, range(len(spec.holders))))
        if worst <= bucket_bytes or parts >= longest:
            yield from units
            return
        parts = min(longest, max(parts + 1, -(-worst * parts // bucket_bytes)))


def _pieces(
    source: str,
    spec: ShardSpec,
    engine_dtype: torch.dtype,
    layouts: Sequence[EngineLayout],
    needed: Mapping[int, _Needs],
    part: int,
    parts: int,
    world_size: int,
) -> tuple[list[Piece], np.ndarray]:
    staging = np.zeros(world_size, np.int64)
    pieces: list[Piece] = []
    cuts: dict[int, list[tuple[int, str, Block]]] = {}
    for receiver, layout in enumerate(layouts):
        if id(layout) not in cuts:
            cuts[id(layout)] = [
                (shard, destination, b)
                for destination, dtype, block in needed[id(layout)].get(source, ())
                if dtype == engine_dtype
                for shard in range(len(spec.holders))
                for b in _part(block, spec, shard, part, parts)
            ]
        for shard, destination, block in cuts[id(layout)]:
            sender = spec.sender(shard, receiver)
            pieces.append(Piece(source, shard, sender, receiver, destination, block))
            if sender != receiver:
                staging[[sender, receiver]] += block.numel * engine_dtype.itemsize
    return pieces, staging


def _part(block: Block, spec: ShardSpec, shard: int, part: int, parts: int) -> Iterator[Block]:
    if not spec.shape:
        yield block
        return
    low, high = spec.interval(shard)
    length = high - low
    low, high = low + length * part // parts, low + length * (part + 1) // parts
    if low < high:
        yield from cut(block, spec.dim, low, high)


def _lower_bound(rank: int, needs: _Needs, sources: Mapping[str, ShardSpec]) -> int:
    """Bytes this rank's engine holds of the checkpoint and its own shards do not."""
    total = 0
    for source, wanted in needs.items():
        spec = sources[source]
        own = spec.held_by(rank)
        seen: set[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]] = set()
        for _, dtype, block in wanted:
            region = (block.start, block.sizes, block.axes)
            if region in seen:
                continue
            seen.add(region)
            held = 0 if own is None else sum(b.numel for b in _part(block, spec, own, 0, 1))
            total += (block.numel - held) * dtype.itemsize
    return total


def check_coverage(layout: EngineLayout, sources: Mapping[str, ShardSpec]) -> None:
    """Every element of every engine tensor is written exactly once; else LayoutError."""
    writes: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for c in layout.copies:
        writes[c.destination].append((c.destination_offset, c.sizes, c.destination_strides))
    exempt = {reason.split(":")[0] for reason in layout.fallback.values()}
    for name, spec in layout.destinations.items():
        if name in exempt:
            continue
        dense = sorted(spec.stride) == sorted(contiguous_strides(spec.shape))
        span = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
        numel = int(np.prod(spec.shape, dtype=np.int64))
        if numel == 0:
            continue
        count = np.zeros(numel if dense else span, np.uint8)
        for offset, sizes, strides in writes[name]:
            _strided(count, offset, sizes, strides)[...] += 1
        if count.max(initial=0) > 1:
            raise LayoutError(f"engine tensor {name!r}: some elements would be written twice")
        for destination, offset, sizes, strides, _ in layout.constants:
            if destination == name:
                _strided(count, offset, sizes, strides)[...] = 1
        if not _strided(count, 0, spec.shape, spec.stride).all():
            left = int((_strided(count, 0, spec.shape, spec.stride) == 0).sum())
            raise LayoutError(
                f"engine tensor {name!r}: {left} of {numel} elements are written by no "
                "checkpoint tensor"
            )


def _strided(
    flat: np.ndarray, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(flat[offset:], sizes, strides)


def _digest(
    sources: Mapping[str, ShardSpec], layouts: Sequence[EngineLayout], bucket_bytes: int
) -> str:
    h = hashlib.sha256(repr((bucket_bytes, sorted(sources.items()))).encode())
    for layout in layouts:
        h.update(repr((layout.destinations, layout.copies, layout.fallback)).encode())
    return h.hexdigest()
