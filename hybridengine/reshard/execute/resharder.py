"""Executes a reshard plan: pack → all-to-all-v → unpack, straight into the live engine weights.

Two buckets are in flight: while bucket k travels, its local slices are copied, bucket k-1 is
unpacked and bucket k+1 packed. The engine refuses to generate from the first byte until every rank
is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybridengine.reshard.execute.adapters import with_factors, with_whole
from hybridengine.reshard.execute.exchange import Exchange, Slab, TableMaker
from hybridengine.reshard.execute.failures import (
    FailureBoard,
    PlanOutdatedError,
    RankLostError,
    ReshardError,
    agree,
    agreed,
    attempt,
)
from hybridengine.reshard.execute.trained import Parameters, TrainedTensors
from hybridengine.reshard.execute.verify import find_mismatches, find_unstable, warn_of_nan
from hybridengine.reshard.plan.coverage import check_sources
from hybridengine.reshard.plan.planner import Piece, ReshardPlan, build_plan
from hybridengine.reshard.plan.routes import ranks_per_node
from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.checksums import sums_of_bits
from hybridengine.sharding.layout import EngineLayout, LayoutError, TensorSpec
from hybridengine.sharding.shards import ShardSpec

if TYPE_CHECKING:
    from hybridengine.sharding.weight_target import WeightTarget

__all__ = ["PlanOutdatedError", "RankLostError", "ReshardError", "Resharder", "SyncReport"]


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved on this rank. Bytes are counted at the collective, adapters included."""

    version: int
    bytes_received: int
    bytes_sent: int
    milliseconds: float


@dataclass
class _InFlight:
    """A bucket on its way in its staging buffer."""

    exchange: Exchange
    buffer: torch.Tensor
    inbox: torch.Tensor
    work: dist.Work
    phase: str


class Resharder:
    """Moves trained FSDP2 parameters into a rollout engine's weights, in place.

    parameters: function that returns checkpoint name → DTensor (FSDP2) or replicated tensor, on
      every rank. It is called at every sync, because `model.cpu().cuda()`, a cast or
      `load_state_dict(assign=True)` replaces the tensors of a model.
    engine: the rollout engine on this rank.
    bucket_bytes: staging memory (send + receive) of one all-to-all; two are alive at a time.
    adapters: function that returns parameter → its adapter, merged as the parameter is packed, or
      with `merge` off given to the engine beside it. All others are frozen: they travel again only
      if their bits change.

    The plan is made once, agreed by digest across ranks, and reused by every `sync()`.
    Raises LayoutError on every rank for what any rank finds wrong.
    """

    def __init__(
        self,
        parameters: Callable[[], Parameters],
        engine: WeightTarget,
        bucket_bytes: int = 64 << 20,
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        merge: bool = True,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.engine = engine
        self._trained = TrainedTensors(parameters, adapters, merge)
        self._board = FailureBoard(self.rank, self.world_size)
        specs = agreed(self._read_specs)
        shards = self._trained.shards.values()
        self._device = next((t.device for t in shards), torch.device("cpu"))
        self._layout = with_factors(engine.layout, self._trained.factors)
        layouts = self._gather_layouts()
        nodes = self._everyones(self.rank // ranks_per_node(self.world_size))
        self.plan: ReshardPlan = agreed(lambda: self._plan(specs, layouts, bucket_bytes, nodes))
        digests = self._everyones(self.plan.digest)
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise LayoutError(
                f"ranks {odd} made another reshard plan than rank 0: their model, engine or "
                "bucket size differs. Start every rank with the same configuration."
            )
        self._planned = self._trained.placements
        agreed(self._live_weights)
        strides = {name: placement.local_stride for name, placement in self._planned.items()}
        maker = TableMaker(self.plan, self.rank, strides, self._device)
        self._exchanges = [maker.exchange(bucket) for bucket in self.plan.buckets]
        ends = (e.halves(self.plan.staging_bytes)[2] for e in self._exchanges)
        self._largest = max(ends, default=0)
        self._settled: list[int] | None = None  # the frozen bits that are in the engine

    def _everyones(self, value: Any) -> list:
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def _read_specs(self) -> dict[str, ShardSpec]:
        self._trained.read()
        return self._trained.specs(self.world_size)

    def _gather_layouts(self) -> list[EngineLayout]:
        """The layout of every rank; each is sent once, by the first rank that has it."""
        seats = self._everyones((self.engine.tp_rank, self._layout.digest()))
        layouts: dict[tuple, EngineLayout] = {}
        first: dict[int, int] = {}  # TP rank → the first rank that has it
        for rank, seat in enumerate(seats):
            if seat in layouts:
                continue
            box: list = [self._layout if rank == self.rank else None]
            dist.broadcast_object_list(box, rank)
            layouts[seat] = box[0]
            if (other := first.setdefault(seat[0], rank)) != rank:
                raise LayoutError(
                    f"the engines of ranks {other} and {rank} are both TP rank {seat[0]}, but "
                    "their weights are laid out differently. Build every engine from one model "
                    "with the same options."
                )
        return [layouts[seat] for seat in seats]

    def _plan(
        self,
        specs: dict[str, ShardSpec],
        layouts: list[EngineLayout],
        bucket_bytes: int,
        nodes: list[int],
    ) -> ReshardPlan:
        try:
            distinct = list({id(layout): layout for layout in layouts}.values())
            shapes = {name: spec.shape for name, spec in specs.items()}
            check_sources(shapes, distinct, self.engine.unused)
        except LayoutError as error:
            raise LayoutError(f"{error}{self.engine.differences}") from None
        plan = build_plan(specs, layouts, bucket_bytes, nodes)
        for bucket in plan.buckets:
            source, engine = bucket.source_dtype, bucket.engine_dtype
            if source != engine and not source.is_floating_point:
                raise LayoutError(
                    f"parameter {bucket.units[0].source!r} is {source}, which is no number that "
                    f"the engine's {engine} can take as it is: a quantized model cannot be synced; "
                    "train in a floating-point dtype"
                )
        return plan

    def _live_weights(self) -> dict[str, torch.Tensor]:
        """The engine's tensors, and room for whole adapters beside them."""
        weights = self.engine.weights()
        for name, spec in self.engine.layout.destinations.items():
            live = weights.get(name)
            if live is None or TensorSpec.of(live) != spec:
                found = "nothing" if live is None else str(TensorSpec.of(live))
                raise LayoutError(
                    f"engine tensor {name!r} was recorded as {spec} but is {found}; the engine "
                    "changed it after loading: it cannot be written in place"
                )
        return weights | {
            name: torch.empty(t.shape, dtype=t.dtype, device=self._device)
            for name, t in self._trained.factors.items()
        }

    def sync(self, version: int | None = None, *, verify: bool = False) -> SyncReport:
        """Write the current parameters into the engine and set its weight version.

        Collective: every rank calls it. On return every rank's engine generates from `version`.
        verify: afterwards compare checksums of every slice, shards against engine weights.

        Raises LayoutError on every rank, before anything moves, when the engine is not what was
        planned for or cannot take weights now (it runs requests, it sleeps), PlanOutdatedError when
        the parameters are not; ReshardError on every rank when a checksum differs;
        RankLostError when another rank dies, fails or hangs for the process group's timeout. After
        an error in the middle the engine refuses to generate until the next whole sync.
        """
        started = time.perf_counter()
        if version is None:
            version = (self.engine.weight_version or 0) + 1
        with self._board.attempt(f"the sync to version {version}"), torch.no_grad():
            settled, frozen = self._start(version)
            with self.engine.weight_update(version):
                self._settled = None
                self._write_constants()  # copies go over them
                received, sent = self._move(
                    [e for e in self._exchanges if not (e.once and settled)]
                )
                self._gather_fallback(settled)
                if verify:
                    self._verify()
                if self._trained.unmerged:
                    adapters = with_whole(self._trained.unmerged, self._weights)
                    self.engine.load_adapters(adapters, version)
                with self._board.meeting("committing"):
                    dist.barrier()  # the version moves only when all ranks are in
                self._settled = frozen
        elapsed = (time.perf_counter() - started) * 1e3
        return SyncReport(version, received, sent, elapsed)

    def _frozen_bits(self) -> list[int]:
        frozen = [name for name, spec in self.plan.sources.items() if spec.frozen]
        return sums_of_bits([self._trained.shards[name] for name in frozen])

    def _start(self, version: int) -> tuple[bool, list[int]]:
        """Look at model, engine and world again; every rank goes on only if all of them may.

        (Whether every engine has the parameters that do not change, the bits of these.)
        """
        changed, problem = attempt(self._look_again)
        frozen = [] if changed or problem else self._frozen_bits()
        lost = self.engine.weight_version is None or frozen != self._settled
        state = [problem is not None, changed is not None, version, -version, lost]
        word = torch.tensor(state, device=self._device)
        with self._board.meeting("agreeing to start"):
            dist.all_reduce(word, dist.ReduceOp.MAX)
            failed, outdated, highest, lowest, lost = word.tolist()
            if failed or outdated:
                agree(problem or changed, PlanOutdatedError if outdated else LayoutError)
        if highest != -lowest:
            raise ReshardError(
                f"rank {self.rank} syncs to version {version}, other ranks to versions between "
                f"{-lowest} and {highest}: every rank must call sync() with the same version"
            )
        return not lost, frozen

    def _look_again(self) -> str | None:
        """How the parameters differ from the plan. LayoutError for an engine that is not ready."""
        if (place := (dist.get_rank(), dist.get_world_size())) != (self.rank, self.world_size):
            raise LayoutError(
                f"planned as rank {self.rank} of {self.world_size}, now rank {place[0]} of "
                f"{place[1]}: make a new Resharder for the new world"
            )
        self.engine.check_ready()
        self._trained.read()
        if changed := self._trained.find_change(self._planned):
            return (
                f"{changed} since the reshard was planned: call connect() again, or make a new "
                "Resharder"
            )
        self._weights = self._live_weights()
        return None

    def _write_constants(self) -> None:
        for name, offset, sizes, strides, value in self.engine.layout.constants:
            weight = self._weights[name]
            weight.as_strided(sizes, strides, weight.storage_offset() + offset).fill_(value)

    def _move(self, exchanges: list[Exchange]) -> tuple[int, int]:
        received = sent = self._gathered = 0
        self._spare: list[torch.Tensor] = []
        last: _InFlight | None = None
        for i, exchange in enumerate(exchanges, 1):
            where = f"bucket {i} of {len(exchanges)}"
            self._board.phase = f"packing {where}"
            sources = [self._source(slab) for slab in exchange.slabs]
            buffer, outbox, inbox = self._stage(exchange)
            exchange.pack.copy(sources, [outbox])
            phase = f"exchanging {where}"
            with self._board.meeting(phase):
                work = _all_to_all(inbox, outbox, exchange)
            received += inbox.nbytes
            sent += outbox.nbytes
            self._board.phase = f"copying the local part of {where}"
            exchange.local.copy(sources, self._targets(exchange))
            del sources, outbox
            if last is not None:
                self._arrive(last)
            last = _InFlight(exchange, buffer, inbox, work, phase)
        if last is not None:
            self._arrive(last)
        while self._spare:
            self._spare.pop().untyped_storage().resize_(0)  # gloo's threads may hold it longer
        return received + self._gathered, sent

    def _source(self, slab: Slab) -> torch.Tensor:
        """What a bucket packs from: this rank's shard, or what an adapter makes of a part of it."""
        trained, spec = self._trained, self.plan.sources[slab.name]
        if slab.name not in trained.merged:
            return trained.shards[slab.name]
        with self._board.meeting(f"gathering the adapter of {slab.name!r}"):
            self._gathered += trained.bytes_gathered(slab.name, spec)
            return trained.merge(slab.name, spec, self.rank, slab.low, slab.high)

    def _stage(self, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(buffer, its outbox, its inbox). Two buffers serve all buckets: fresh memory is slow.

        Not so with adapters: what is merged takes its part of a bucket, so each gets its own size.
        """
        out, start, stop = exchange.halves(self.plan.staging_bytes)
        if self._spare:
            buffer = self._spare.pop()
        else:
            size = stop if self._trained.merged else self._largest
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        dtype = exchange.engine_dtype
        return buffer, buffer[:out].view(dtype), buffer[start:stop].view(dtype)

    def _targets(self, exchange: Exchange) -> list[torch.Tensor]:
        return [self._weights[name] for name in exchange.destinations]

    def _arrive(self, sent: _InFlight) -> None:
        with self._board.meeting(sent.phase):
            sent.work.wait()
        self._board.phase = sent.phase.replace("exchanging", "unpacking")
        sent.exchange.unpack.copy([sent.inbox], self._targets(sent.exchange))
        if self._trained.merged:
            sent.buffer.untyped_storage().resize_(0)
        else:
            self._spare.append(sent.buffer)

    def _gather_fallback(self, settled: bool) -> None:
        """Gather the few parameters that are no pure copy, one at a time, for the engine's loader.

        They keep their dtype: what the loader computes, it computes from the masters.
        """
        sources = self.plan.sources
        names = [n for n in self.plan.fallback if not (sources[n].frozen and settled)]
        if names:
            self.engine.load_whole((name, self._unsharded(name)) for name in names)

    def _unsharded(self, name: str) -> torch.Tensor:
        with self._board.meeting(f"gathering {name!r} whole"):
            return self._trained.unsharded(name)

    def _verify(self) -> None:
        """Raise ReshardError on every rank where an engine tensor is not what it was made of."""
        trained, sources = self._trained, self.plan.sources
        with self._board.meeting("gathering adapters to verify"):
            adapters = {name: adapter.gathered() for name, adapter in trained.merged.items()}

        def of_shard(piece: Piece) -> torch.Tensor:
            name = piece.source
            spec, adapter = sources[name], adapters.get(name)
            return trained.slice(name, spec, piece.shard, piece.block, adapter)

        def of_engine(piece: Piece) -> torch.Tensor:
            weight, block = self._weights[piece.destination], piece.block
            offset = weight.storage_offset() + block.offset
            return weight.as_strided(block.sizes, block.strides, offset)

        with self._board.meeting("verifying"):
            wrong = find_mismatches(self.plan, self.rank, of_shard, of_engine)
            if self.plan.fallback:
                loaded = self.engine.layout.by_loader & self._weights.keys()
                tensors = {name: self._weights[name] for name in sorted(loaded)}
                reload = partial(self._gather_fallback, settled=False)
                wrong += find_unstable(self.rank, self._layout, tensors, reload)
            warn_of_nan(trained.shards)
        if wrong:
            rank, destination, source = wrong[0]
            raise ReshardError(
                f"the checksum of engine tensor {destination!r} on rank {rank} differs from its "
                f"source {source!r} ({len(wrong)} slices differ in all): bytes were damaged on the "
                "way, or something else wrote to the engine. Sync again."
            )


def _all_to_all(inbox: torch.Tensor, outbox: torch.Tensor, exchange: Exchange) -> dist.Work:
    size = exchange.engine_dtype.itemsize
    return dist.all_to_all_single(
        inbox.view(torch.uint8),
        outbox.view(torch.uint8),
        [n * size for n in exchange.receive_counts],
        [n * size for n in exchange.send_counts],
        async_op=True,
    )
