"""All elements of buckets, cast or quantized as they are packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from hybridengine.run.failures import CollectiveGuard
from hybridengine.sync.move.tables import Exchange, ExchangeBuilder
from hybridengine.sync.move.transport import Transport, run_transfers
from hybridengine.sync.plan.buckets import Bucket
from hybridengine.sync.shards import Box
from hybridengine.sync.trained import TrainedTensors

Moves = Callable[[Bucket], bool]
Weights = Mapping[str, torch.Tensor]


def _pack(exchange: Exchange, sources: Sequence[torch.Tensor], outgoing: torch.Tensor) -> None:
    exchange.pack.copy(sources, [outgoing])


class Dense:
    """The exchanges of one rank.

    Attributes:
        plan, rank: those of `builder`.
        source: the tensors that this rank reads; None on a rank that only holds an engine.
        exchanges: one per bucket, built once.
        scales: the scales of quantized tensors.
        bytes_gathered: the bytes received to merge adapters in the last `run`.
    """

    def __init__(self, builder: ExchangeBuilder, source: TrainedTensors | None) -> None:
        self.plan, self.rank, self.source = builder.plan, builder.rank, source
        self.scales = builder.scales
        self.exchanges = [builder.build(bucket) for bucket in builder.plan.buckets]
        self.bytes_gathered = 0

    def bytes_of(self, moves: Moves) -> int:
        """Return the bytes that `run` would receive and send, without those of adapters."""
        moving = [e for e in self.exchanges if moves(e.bucket)]
        return sum(sum(e.bytes_received) + sum(e.bytes_sent) for e in moving)

    def run(self, transport: Transport, weights: Weights, moves: Moves) -> None:
        """Move buckets into the engines' weights. Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        moves: which buckets; those that are not frozen move together.
        """
        self.bytes_gathered = 0
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
        self.bytes_gathered += num_bytes
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
        self._deliver_scales(transport)
        if weights:
            scales.write(self.rank, weights)

    def _deliver_scales(self, transport: Transport) -> None:
        """Send the scales to ranks that hold an engine only, an equal part from each trainer."""
        if not (receivers := transport.receivers):
            return
        of_rank, rank = self.scales.of_rank, self.rank
        where, trainers = "the scales of quantized weights", [*range(receivers.start)]
        if rank in receivers:
            scales = of_rank(rank)
            received = [part.nbytes for part in scales.tensor_split(len(trainers))]
            arrived = transport.post(where, None, (), received).wait()
            scales.copy_(torch.cat(arrived).view(scales.dtype))
            return
        parts = [of_rank(r).tensor_split(len(trainers))[rank] for r in receivers]
        sent = [0] * len(trainers) + [part.nbytes for part in parts]
        transport.post(where, torch.cat(parts).view(torch.uint8), sent, ()).wait()
