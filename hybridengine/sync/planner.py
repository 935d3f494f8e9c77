"""The plan of a weight sync: which rank sends which slice of which parameter to which rank.

The plan is a pure function of shard placements, engine layouts, nodes and bucket size. Every rank
computes the same plan without communication; no tensor value is read. Volumes are computed once per
source class, slices only for the rank that asks for its own.

The lower bound of a rank (HybridFlow, arXiv 2409.19256, table 2) is the size of its tensor-parallel
slice minus the part of it that the rank already holds.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from hybridengine.kernels.block_quantize import QUANTIZED_DTYPE
from hybridengine.sync.blocks import Block
from hybridengine.sync.buckets import Bucket, ChunkTable, Source, fill_buckets
from hybridengine.sync.checks import check_coverage
from hybridengine.sync.layout import EngineLayout, LayoutError
from hybridengine.sync.senders import Senders, Topology
from hybridengine.sync.shards import ShardSpec
from hybridengine.sync.source_class import SliceCopy, SourceClass


@dataclass
class ReshardPlan:
    """All buckets of a weight sync; the same on every rank.

    sources: parameter → its placement on the training ranks.
    source_classes: (parameter, engine dtype) → its class.
    layouts: the distinct engine layouts.
    layout_of: rank → number of its engine layout.
    sent_once: the sources that a sync may leave out once an engine has them: those of frozen
      parameters, unless a trained one is part of the same quantized engine tensor.
    bytes_received, bytes_sent: how much each rank receives and sends.
    bytes_crossing: for each rank, the part of bytes_received that comes from other nodes.
    bytes_needed: for each rank, the size of its engine tensors.
    lower_bound: for each rank, the source elements that it needs and does not hold, counted once.
    staging_bytes: most bytes (send + receive) of a bucket on any rank.
    fallback: parameter → the reason why it is gathered in full.
    digest: a hash of all inputs of the plan.
    """

    world_size: int
    sources: Mapping[str, ShardSpec]
    source_classes: Mapping[Source, SourceClass]
    layouts: Sequence[EngineLayout]
    layout_of: Sequence[int]
    sent_once: frozenset[Source]
    buckets: list[Bucket]
    bytes_received: list[int]
    bytes_sent: list[int]
    bytes_crossing: list[int]
    bytes_needed: list[int]
    lower_bound: list[int]
    staging_bytes: int
    fallback: dict[str, str]
    digest: str
    _destinations: Mapping[Source, list[list[str]]]  # per layout, one name per copy of the class

    def destinations(self, name: str, dtype: torch.dtype, rank: int) -> list[str]:
        """Return the engine tensors of `rank` of one dtype that parameter `name` is copied to.

        The indices are those of `SliceCopy.writes`.
        """
        return self._destinations[name, dtype][self.layout_of[rank]]

    def arrivals(self, bucket: Bucket, rank: int) -> Iterator[tuple[str, SliceCopy]]:
        """Yield (parameter, slice) of all that `rank` receives in a bucket, or keeps.

        The slices from one sender come in the order in which the sender lists them.
        """
        for name, chunk in bucket.chunks:
            source_class = self.source_classes[name, bucket.engine_dtype]
            yield from ((name, slice_copy) for slice_copy in source_class.incoming(chunk, rank))

    def departures(self, bucket: Bucket, rank: int) -> Iterator[tuple[str, SliceCopy]]:
        """Yield (parameter, slice) of all that `rank` sends to others in a bucket."""
        for name, chunk in bucket.chunks:
            source_class = self.source_classes[name, bucket.engine_dtype]
            yield from ((name, slice_copy) for slice_copy in source_class.outgoing(chunk, rank))


def build_plan(
    sources: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    bucket_bytes: int = 64 << 20,
    nodes: Sequence[int] | None = None,
) -> ReshardPlan:
    """Plan the sync of trained parameters into engine layouts.

    sources: parameter → placement on the training ranks.
    layouts: one engine layout per rank (ranks with the same TP rank may share the object).
    bucket_bytes: upper bound of the staging memory (send + receive) of one all-to-all on any rank.
    nodes: the node of each rank, any numbers; None for a single node.
    A shard with several holders is sent by one in the receiver's node if there is one.

    Raises LayoutError if a layout names an unknown source, if an engine element is written by no
    source or by two, or if a bucket cannot hold one row of a source.
    """
    return Planner(layouts, bucket_bytes, nodes).plan(sources)


class Planner:
    """Plans for the same engine layouts and several placements of the parameters.

    The arguments are those of `build_plan`. Results that placements have in common are reused.
    """

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
        self._topology = Topology(self._layout_of, self._nodes)
        self._senders_of = cache(partial(Senders, topology=self._topology))
        self._classes: dict[tuple, SourceClass] = {}  # by all that is equal in a class
        self._chunk_tables: dict[tuple[SourceClass, int], ChunkTable] = {}

    def plan(self, sources: Mapping[str, ShardSpec]) -> ReshardPlan:
        """Plan as `build_plan`, which raises the same errors."""
        world_size = len(self._layout_of)
        fallback = {n: why for layout in self._layouts for n, why in layout.fallback.items()}
        classes, destinations = self._classify(sources)
        moving = {source: cls for source, cls in classes.items() if source[0] not in fallback}
        sent_once = _sent_once(sources, destinations)
        buckets, moved, staging_bytes = fill_buckets(
            moving, self._bucket_bytes, world_size, self._chunk_tables, sent_once
        )
        needed, lower_bound = np.zeros((2, world_size), np.int64)
        for (_, dtype), source_class in classes.items():
            needed += source_class.num_written[self._layout_of] * dtype.itemsize
            lower_bound += source_class.num_missing * dtype.itemsize
        return ReshardPlan(
            world_size=world_size,
            sources=sources,
            source_classes=classes,
            layouts=self._layouts,
            layout_of=self._layout_of,
            sent_once=sent_once,
            buckets=buckets,
            bytes_received=moved[:2].sum(0).tolist(),
            bytes_sent=moved[2:].sum(0).tolist(),
            bytes_crossing=moved[1].tolist(),
            bytes_needed=needed.tolist(),
            lower_bound=lower_bound.tolist(),
            staging_bytes=staging_bytes,
            fallback=fallback,
            digest=self._digest(sources),
            _destinations=destinations,
        )

    def _classify(
        self, sources: Mapping[str, ShardSpec]
    ) -> tuple[dict[Source, SourceClass], dict[Source, list[list[str]]]]:
        """Return the class of each source, and per layout the engine tensors it is copied to."""
        copies = self._copies_by_source(sources)
        position = {name: i for i, name in enumerate(sources)}
        ordered = sorted(copies, key=lambda source: (position[source[0]], str(source[1])))
        # By id: holders has an entry per rank, compare it once.
        holders = {id(spec.holders): spec.holders for spec in sources.values()}
        senders = {i: self._senders_of(h) for i, h in holders.items()}
        classes: dict[Source, SourceClass] = {}
        for name, dtype in ordered:
            spec = sources[name]
            sent_by = senders[id(spec.holders)]
            blocks = [tuple(block for _, block in group) for group in copies[name, dtype]]
            treatment = (spec.shape, spec.dtype, spec.splits, spec.merged, dtype)
            key = (sent_by, *treatment, *blocks)
            if key not in self._classes:
                self._classes[key] = SourceClass(spec, sent_by, blocks)
            classes[name, dtype] = self._classes[key]
        destinations = {s: [[name for name, _ in group] for group in copies[s]] for s in ordered}
        return classes, destinations

    def _copies_by_source(
        self, sources: Mapping[str, ShardSpec]
    ) -> dict[Source, list[list[tuple[str, Block]]]]:
        """Return per source and layout all (engine tensor, block). Raises LayoutError."""
        copies: dict[Source, list[list[tuple[str, Block]]]]
        copies = defaultdict(lambda: [[] for _ in self._layouts])
        for i, layout in enumerate(self._layouts):
            for copy in layout.copies:
                spec = sources.get(copy.source)
                if spec is None:
                    raise LayoutError(
                        f"the engine expects the checkpoint tensor {copy.source!r}, which the "
                        f"trained model does not have (it has {len(sources)}, e.g. "
                        f"{next(iter(sources), None)!r}). Build both from the same model."
                    )
                dtype = layout.destinations[copy.destination].dtype
                if spec.dtype != dtype and not spec.dtype.is_floating_point:
                    raise LayoutError(
                        f"parameter {copy.source!r} is {spec.dtype}, which cannot be cast to the "
                        f"engine's {dtype}: a quantized model cannot be synced. Train in a "
                        "floating-point dtype."
                    )
                copies[copy.source, dtype][i].append((copy.destination, copy.block(spec.shape)))
        return copies

    def _digest(self, sources: Mapping[str, ShardSpec]) -> str:
        """Hash all that the plan is made from; equal on all ranks."""
        holders = {id(spec.holders): spec.holders for spec in sources.values()}
        hashed = {i: hashlib.sha256(repr(h).encode()).hexdigest() for i, h in holders.items()}
        placed = [
            (name, s.shape, s.dtype, s.splits, hashed[id(s.holders)], s.frozen, s.merged)
            for name, s in sources.items()
        ]
        layouts = [layout.digest() for layout in self._layouts]
        described = (self._bucket_bytes, self._layout_of, self._nodes, placed, layouts)
        return hashlib.sha256(repr(described).encode()).hexdigest()


def _sent_once(
    sources: Mapping[str, ShardSpec], destinations: Mapping[Source, list[list[str]]]
) -> frozenset[Source]:
    """Return `ReshardPlan.sent_once`.

    A block of a quantized tensor has one scale: if it changes, all values of the block do.
    """
    once = {source for source in destinations if sources[source[0]].frozen}
    written = {
        source: {(i, tensor) for i, tensors in enumerate(by_layout) for tensor in tensors}
        for source, by_layout in destinations.items()
        if source[1] == QUANTIZED_DTYPE
    }
    while True:
        again = set().union(*(written[source] for source in written.keys() - once))
        moved = {source for source in written.keys() & once if written[source] & again}
        if not moved:
            return frozenset(once)
        once -= moved
