"""One transfer of a sync: what a rank reads of its source moves into the engines' tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch

from hybridengine.run.failures import CollectiveGuard
from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.changes import Found, covers
from hybridengine.sync.delta import Delta, Versions
from hybridengine.sync.fp8 import BlockScales
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import Box
from hybridengine.sync.tables import Exchange, ExchangeBuilder
from hybridengine.sync.trainers import TrainedTensors
from hybridengine.sync.transport import Transport, run_transfers
from hybridengine.sync.weight_target import WeightTarget, write_constants


class Order(NamedTuple):
    """Which part of the weights a transfer moves.

    skip_frozen: whether frozen parameters that the engines already have are left out.
    verify: whether checksums are compared afterwards.
    remembers: whether a later one may leave out what has not changed, so that engines keep
      checksums of what they have.
    base: version of the weights that a delta is made from; None: everything is sent.
    group_size: elements in a group of the delta.
    """

    skip_frozen: bool
    verify: bool
    remembers: bool
    base: int | None = None
    group_size: int = 0

    def moves(self, bucket: Bucket) -> bool:
        """Return whether the bucket is sent as a whole."""
        return self.moves_densely(bucket) and not (self.base is not None and covers(bucket))

    def moves_densely(self, bucket: Bucket) -> bool:
        """Return whether the bucket would be sent without a delta."""
        return not (bucket.frozen and self.skip_frozen)


Moves = Callable[[Bucket], bool]
Weights = Mapping[str, torch.Tensor]


def _pack(exchange: Exchange, sources: Sequence[torch.Tensor], outgoing: torch.Tensor) -> None:
    exchange.pack.copy(sources, [outgoing])


class Mover:
    """One rank's part in the transfers of a plan.

    rank: the number of this rank in the plan.
    source: the trained tensors of this rank; None on a rank that only holds an engine.
    engine: the engine of this rank; None on a rank that only trains.
    builder: the table builder of the transport.

    Attributes:
        exchanges: the tables of each bucket, built once.
        scales: the scales of quantized tensors.
        checksum_growth: engine tensor → by how much a delta made its `bit_checksum` grow in the
            last transfer; None for a dense transfer, and where it is not known.
    """

    checksum_growth: Mapping[str, int] | None = None

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        device: torch.device,
        source: TrainedTensors | None,
        engine: WeightTarget | None,
        builder: type[ExchangeBuilder] = ExchangeBuilder,
    ) -> None:
        self.plan, self.rank, self.source = plan, rank, source
        self._device, self._engine = device, engine
        self._placements = source.placements if source else {}
        strides = {n: p.local_stride for n, p in self._placements.items()}
        self.scales = BlockScales(plan, device)
        self.builder = builder(plan, rank, strides, device, self.scales)
        self.exchanges = [self.builder.build(bucket) for bucket in plan.buckets]
        self._bytes_gathered = 0  # to merge adapters, in the last transfer

    @cached_property
    def _delta(self) -> Delta:
        strides = {n: contiguous_strides(p.local_shape) for n, p in self._placements.items()}
        return Delta(ExchangeBuilder(self.plan, self.rank, strides, self._device))

    def move(
        self,
        transport: Transport,
        order: Order,
        version: int,
        weights: Weights,
        found: Found | None,
    ) -> tuple[int, int]:
        """Move everything; return (bytes received, bytes sent). Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        found: the changes that were found in this rank's shards.
        """
        self.checksum_growth = None
        if self._engine is not None and order.base is None and not order.skip_frozen:
            write_constants(self._engine.layout, weights)
        self.move_buckets(transport, weights, order.moves)
        if order.base is not None:
            versions = Versions(order.base, version)
            changes = found and found.changes
            self.checksum_growth = self._delta.run(
                transport, weights, changes, versions, order.group_size
            )
        self.load_full(transport, order.skip_frozen)
        transport.end()
        return transport.bytes_received + self._bytes_gathered, transport.bytes_sent

    def bytes_of(self, moves: Moves) -> int:
        """Return the bytes that these buckets take to receive and send, without adapters."""
        moving = [e for e in self.exchanges if moves(e.bucket)]
        return sum(sum(e.bytes_received) + sum(e.bytes_sent) for e in moving)

    def move_buckets(self, transport: Transport, weights: Weights, moves: Moves) -> None:
        """Move buckets into the engines' weights. Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        moves: which buckets; those that are not frozen move together.
        """
        self._bytes_gathered = 0
        moving = [e for e in self.exchanges if moves(e.bucket)]
        if any(e.bucket.quantized for e in moving):
            self._update_scales(transport, weights, moving)
        run_transfers(
            (
                self._transfer(transport, exchange, f"bucket {i} of {len(moving)}", weights)
                for i, exchange in enumerate(moving, 1)
            ),
            transport.overlaps,
        )

    def _transfer(
        self, transport: Transport, exchange: Exchange, where: str, weights: Weights
    ) -> Iterator[None]:
        """Start to move a bucket, yield, then wait for it and unpack."""
        guard = transport.guard
        guard.phase = f"packing {where}"
        sources = self._sources(transport, exchange)
        pending = transport.post_bucket(where, exchange, partial(_pack, exchange, sources))
        guard.phase = f"copying the local part of {where}"
        destinations = [weights[name] for name in exchange.destinations]
        exchange.local.copy(sources, destinations)
        del sources
        yield
        arrived = pending.wait()
        guard.phase = f"unpacking {where}"
        if destinations:
            dtype = exchange.bucket.engine_dtype
            exchange.unpack.copy([part.view(dtype) for part in arrived], destinations)
        pending.release()

    def _sources(self, transport: Transport, exchange: Exchange) -> list[torch.Tensor]:
        """Return the tensors to pack from: this rank's shards, or boxes of them, merged."""
        if self.source is None:
            return []
        return [self._read(transport, name, box) for name, box in exchange.sources]

    def _read(self, transport: Transport, name: str, box: Box) -> torch.Tensor:
        source, spec = self.source, self.plan.sources[name]
        assert source is not None
        if name not in source.merged:
            return source.shards[name]
        merged, num_bytes = source.merge(name, spec, self.rank, box, transport.guard)
        self._bytes_gathered += num_bytes
        return merged

    def _update_scales(
        self, transport: Transport, weights: Weights, moving: list[Exchange]
    ) -> None:
        """Compute the scales of quantized tensors; write those of the engine."""
        scales, guard = self.scales, transport.guard
        if self.source is not None:
            guard.phase = "finding the scales of quantized weights"
            scales.begin(len(moving) < len(self.exchanges))
            for exchange in moving:
                if exchange.measured is not None:
                    scales.measure(exchange.measured, self._sources(transport, exchange))
            assert isinstance(guard, CollectiveGuard)  # of a trainer
            with guard.collective("combining the scales of quantized weights"):
                scales.combine(guard)
            transport.bytes_received += scales.bytes_reduced
            transport.bytes_sent += scales.bytes_reduced
        scales.deliver(transport, self.rank)
        if weights:
            scales.write(self.rank, weights)

    def load_full(self, transport: Transport, skip_frozen: bool) -> None:
        """Gather the parameters that are no pure copies, one at a time, for the engines' loaders.

        They keep their dtype, so that a loader computes from the master weights. It gets all of
        them or none: one tensor of the engine, or of the checkpoint, may be made of several.
        """
        names = list(self.plan.fallback)
        if skip_frozen and all(self.plan.sources[name].frozen for name in names):
            names = []
        fulls = self._fulls(transport, names)
        if names and self._engine is not None:
            self._engine.load_full(fulls)
        for _ in fulls:  # on a rank that only trains
            pass

    def _fulls(self, transport: Transport, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            gather = partial(self._unsharded, transport, name)
            full = transport.move_full(name, self.plan.sources[name], gather)
            if full is not None:
                yield name, full

    def _unsharded(self, transport: Transport, name: str) -> torch.Tensor:
        assert self.source is not None
        with transport.guard.collective(f"gathering {name!r} in full"):
            return self.source.unsharded(name)
