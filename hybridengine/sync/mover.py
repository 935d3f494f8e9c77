"""One transfer of a sync: what a rank reads of its source moves into the engines' tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from hybridengine.sync.buckets import Bucket
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import Box
from hybridengine.sync.tables import Exchange, ExchangeBuilder, Weights, encoding_of
from hybridengine.sync.trainers import TrainedTensors
from hybridengine.sync.transport import Transport, run_transfers
from hybridengine.sync.weight_target import WeightTarget, write_constants


class Order(NamedTuple):
    """Which part of the weights a transfer moves.

    skip_frozen: whether frozen parameters that the engines already have are left out.
    verify: whether checksums are compared afterwards.
    remembers: whether a later one may leave out what has not changed, so that engines keep
      checksums of what they have.
    """

    skip_frozen: bool
    verify: bool
    remembers: bool


class Increment(Protocol):
    """What moves in place of some buckets; a plugin's (`hybridengine.deltas`)."""

    def covers(self, bucket: Bucket) -> bool:
        """Return whether it replaces the bucket."""

    def move(self, transport: Transport, weights: Weights) -> None:
        """Write what changed into the engines' weights. Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        """


class Mover:
    """One rank's part in the transfers of a plan.

    rank: the number of this rank in the plan.
    source: the trained tensors of this rank; None on a rank that only holds an engine.
    engine: the engine of this rank; None on a rank that only trains.
    builder: the table builder of the transport.

    Attributes:
        exchanges: the tables of each bucket, built once.
        encoding: of quantized tensors.
    """

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
        self.device, self._engine = device, engine
        strides = {n: p.local_stride for n, p in source.placements.items()} if source else {}
        self.encoding = encoding_of(plan, rank, device)
        self.builder = builder(plan, rank, strides, device, self.encoding)
        self.exchanges = [self.builder.build(bucket) for bucket in plan.buckets]
        self._bytes_gathered = 0  # to merge adapters, in the last transfer

    def move(
        self,
        transport: Transport,
        order: Order,
        weights: Weights,
        increment: Increment | None = None,
    ) -> tuple[int, int]:
        """Move everything; return (bytes received, bytes sent). Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        increment: what moves in place of the buckets that it covers.
        """
        moving = self._moving(order)
        if increment is not None:
            moving = [e for e in moving if not increment.covers(e.bucket)]
        elif self._engine is not None and not order.skip_frozen:
            write_constants(self._engine.layout, weights)
        self.move_buckets(transport, weights, moving)
        if increment is not None:
            increment.move(transport, weights)
        self.load_full(transport, order.skip_frozen)
        transport.end()
        return transport.bytes_received + self._bytes_gathered, transport.bytes_sent

    def _moving(self, order: Order) -> list[Exchange]:
        return [e for e in self.exchanges if not (e.bucket.frozen and order.skip_frozen)]

    def dense_bytes(self, order: Order) -> int:
        """Return the bytes to receive and send without an increment, without adapters."""
        return sum(sum(e.bytes_received) + sum(e.bytes_sent) for e in self._moving(order))

    def move_buckets(
        self, transport: Transport, weights: Weights, moving: Sequence[Exchange]
    ) -> None:
        """Move buckets into the engines' weights. Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        """
        self._bytes_gathered = 0
        read = partial(self._sources, transport) if self.source else None
        self.encoding.prepare(transport, weights, moving, read)
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
        destinations = [weights[name] for name in exchange.destinations]
        dtype = exchange.bucket.engine_dtype

        def pack(buffer: torch.Tensor) -> None:
            exchange.pack.copy(sources, [buffer.view(dtype), *destinations])

        pending = transport.post_bucket(where, exchange, pack)
        sources.clear()  # merged weights are not needed any longer
        yield
        arrived = pending.wait()
        guard.phase = f"unpacking {where}"
        if destinations:
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

    def load_full(self, transport: Transport, skip_frozen: bool) -> None:
        """Gather the parameters that are no pure copies, one at a time, for the engines' loaders.

        They keep their dtype, so that a loader computes from the master weights. It gets all of
        them or none: one tensor of the engine, or of the checkpoint, may be made of several.
        """
        names = self.plan.fallback
        if not names or (skip_frozen and all(self.plan.sources[name].frozen for name in names)):
            return
        fulls = self._fulls(transport)
        if self._engine is not None:
            self._engine.load_full(fulls)
        for _ in fulls:  # on a rank that only trains
            pass

    def _fulls(self, transport: Transport) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.plan.fallback:
            gather = partial(self._unsharded, transport, name)
            full = transport.move_full(name, self.plan.sources[name], gather)
            if full is not None:
                yield name, full

    def _unsharded(self, transport: Transport, name: str) -> torch.Tensor:
        assert self.source is not None
        with transport.guard.collective(f"gathering {name!r} in full"):
            return self.source.unsharded(name)
