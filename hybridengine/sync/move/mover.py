"""One transfer of a sync: what a rank reads of its source moves into the engines' tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial

import torch

from hybridengine.remote.sync.records import Order
from hybridengine.sync.delta.changes import Found
from hybridengine.sync.delta.delta import Delta
from hybridengine.sync.geometry import contiguous_strides
from hybridengine.sync.move.dense import Dense
from hybridengine.sync.move.message import Versions
from hybridengine.sync.move.tables import ExchangeBuilder
from hybridengine.sync.move.transport import Transport
from hybridengine.sync.plan.planner import ReshardPlan
from hybridengine.sync.target import write_constants
from hybridengine.sync.trained import TrainedTensors
from hybridengine.sync.weight_target import WeightTarget


class Mover:
    """One rank's part in the transfers of a plan.

    rank: the number of this rank in the plan.
    source: the trained tensors of this rank; None on a rank that only holds an engine.
    engine: the engine of this rank; None on a rank that only trains.
    builder: the table builder of the transport.
    checksum_growth: engine tensor → by how much a delta made its `bit_checksum` grow in the last
      transfer; None for a dense transfer, and where it is not known.
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
        self.plan, self._rank, self._device = plan, rank, device
        self._source, self._engine = source, engine
        self._placements = source.placements if source else {}
        strides = {n: p.local_stride for n, p in self._placements.items()}
        self.builder = builder(plan, rank, strides, device)
        self.dense = Dense(self.builder, source)

    @cached_property
    def _delta(self) -> Delta:
        strides = {n: contiguous_strides(p.local_shape) for n, p in self._placements.items()}
        return Delta(ExchangeBuilder(self.plan, self._rank, strides, self._device))

    def move(
        self,
        transport: Transport,
        order: Order,
        version: int,
        weights: Mapping[str, torch.Tensor],
        found: Found | None,
    ) -> tuple[int, int]:
        """Move everything; return (bytes received, bytes sent). Collective.

        weights: the tensors of this rank's engine; {} if it has no engine.
        found: the changes that were found in this rank's shards.
        """
        self.checksum_growth = None
        if self._engine is not None and order.base is None and not order.skip_frozen:
            write_constants(self._engine.layout, weights)
        self.dense.run(transport, weights, order.moves)
        if order.base is not None:
            versions = Versions(order.base, version)
            changes = found and found.changes
            self.checksum_growth = self._delta.run(
                transport, weights, changes, versions, order.group_size
            )
        self.load_full(transport, order.skip_frozen)
        transport.end()
        return transport.bytes_received + self.dense.bytes_gathered, transport.bytes_sent

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
        assert self._source is not None
        with transport.guard.collective(f"gathering {name!r} in full"):
            return self._source.unsharded(name)
