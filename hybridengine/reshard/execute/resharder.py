"""Weight sync: agree on a plan once, then move the trained parameters into the engine every step.

The engine refuses to generate from the first byte of a sync until all ranks have finished it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridengine.reshard.delta.find import (
    DeltaMode,
    Found,
    ReadChanges,
    check_mode,
    covers,
    is_wanted,
)
from hybridengine.reshard.delta.message import CorruptDeltaError, Versions
from hybridengine.reshard.delta.sync import DeltaSync
from hybridengine.reshard.execute.context import RankContext
from hybridengine.reshard.execute.holders import unite_holders
from hybridengine.reshard.execute.memory import default_bucket_bytes
from hybridengine.reshard.execute.pull import make_pipeline
from hybridengine.reshard.execute.report import SyncReport
from hybridengine.reshard.execute.target import EngineState, engine_weights, write_constants
from hybridengine.reshard.execute.trained import Parameters, TrainedTensors
from hybridengine.reshard.execute.verify import find_mismatches, find_unstable, warn_of_nan
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.configuration import check_configuration, in_words
from hybridengine.reshard.plan.coverage import check_casts, check_sources
from hybridengine.reshard.plan.planner import ReshardPlan, build_plan
from hybridengine.reshard.plan.senders import ranks_per_node
from hybridengine.runtime.all_ranks import (
    all_gather_values,
    broadcast_value,
    host_device,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from hybridengine.runtime.device import DeviceProgress
from hybridengine.runtime.failures import CollectiveError, CollectiveGuard
from hybridengine.sharding.adapter import Adapter, adapters_of_factors
from hybridengine.sharding.checksums import bit_checksums
from hybridengine.sharding.geometry import Block
from hybridengine.sharding.layout import EngineLayout, LayoutError
from hybridengine.sharding.shards import ShardSpec

if TYPE_CHECKING:
    from hybridengine.sharding.weight_target import WeightTarget


_NEXT = -1  # in place of a version: the next one


class ReshardError(RuntimeError):
    """A sync did not complete."""


class RankFailedError(ReshardError, CollectiveError):
    """Another rank was killed, failed or stalled during a sync; the message names it."""


class PlanOutdatedError(LayoutError):
    """The trained parameters differ from those the reshard was planned for: plan it again."""


class Resharder:
    """Moves trained FSDP2 parameters into a rollout engine's weights, in place.

    parameters: function that returns checkpoint name → DTensor (FSDP2) or replicated tensor, on
      every rank. It is called at every sync, because `model.cpu().cuda()`, a cast or
      `load_state_dict(assign=True)` replaces the tensors of a model.
    engine: the rollout engine on this rank.
    bucket_bytes: staging memory (send + receive) of one bucket; two are in use at a time. None:
      by the memory that is free on the GPUs now, at most 1 GiB; 64 MiB on CPUs.
    adapters: function that returns parameter → LoRA adapter. With `merge`, adapters are merged when
      the parameter is packed, else the engine receives them in addition to its weights. All other
      parameters are frozen: they travel again only if their bits change, here or in the engine.
    delta: whether a sync moves only the elements whose bits changed since the last one, where its
      changes are few and the engine still holds what that sync wrote. on: also where finding them
      takes a comparison with a copy of what was sent, 16 bits per element of the shards. auto:
      with `changes`, or across nodes.
    changes: function that returns, for the parameters that the optimizer keeps track of, what
      changed since its last call; None where that is not known. A write to these parameters by
      anything else, or a second reader of the changes, makes the next sync move everything.

    The plan is computed once, verified to be equal on all ranks by its digest, and reused by every
    `sync()`. Raises LayoutError on every rank if any rank detects a problem.
    """

    def __init__(
        self,
        parameters: Callable[[], Parameters],
        engine: WeightTarget,
        bucket_bytes: int | None = None,
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        merge: bool = True,
        delta: DeltaMode = "auto",
        changes: ReadChanges | None = None,
    ) -> None:
        check_mode(delta)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.engine = engine
        self._trained = TrainedTensors(parameters, adapters, merge)
        self._guard = CollectiveGuard(self.rank, self.world_size)
        specs = run_on_all_ranks(partial(self._trained.read_specs, self.world_size), LayoutError)
        specs = unite_holders(specs)
        shards = self._trained.shards.values()
        self._device = next((t.device for t in shards), torch.device("cpu"))
        self._progress = DeviceProgress(self._guard, self._device)
        defaults = all_gather_values(default_bucket_bytes(self._device), int)
        size = min(defaults) if bucket_bytes is None else bucket_bytes
        self._layout = engine.layout.with_full_tensors(self._trained.factors)
        layouts = self._gather_layouts()
        nodes = all_gather_values(self.rank // ranks_per_node(self.world_size), int)
        self.plan: ReshardPlan = run_on_all_ranks(
            lambda: self._plan(specs, layouts, size, nodes), LayoutError
        )
        described = (self.plan.digest, delta, changes is None)
        digests = all_gather_values(described, tuple[str, str, bool])
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise LayoutError(
                f"ranks {odd} made another reshard plan than rank 0: their model, engine or "
                "bucket size differs. Start every rank with the same configuration."
            )
        self._planned = self._trained.placements
        run_on_all_ranks(self._engine_weights, LayoutError)
        context = RankContext(
            self.plan, self.rank, self._trained, self._device, self._guard, self._progress
        )
        self._pipeline = make_pipeline(context)
        self._frozen: list[int] = []  # checksums of the frozen parameters
        self._engine_state: EngineState | None = None  # after the last sync; None: write everything
        by_default = changes is not None or len(set(nodes)) > 1
        wanted = is_wanted(delta, by_default, self.plan)
        self._delta: DeltaSync | None = None
        if wanted and not self._trained.unmerged and not engine.discards_weights:
            self._delta = DeltaSync(context, delta, changes)
        frozen = any(spec.frozen for spec in specs.values())
        self._writes_parts = (frozen or self._delta is not None) and not engine.discards_weights

    # Planning

    def _gather_layouts(self) -> list[EngineLayout]:
        """Return the layout of every rank; equal layouts are broadcast once."""
        own = self.engine.tp_rank, self._layout.digest()
        keys = all_gather_values(own, tuple[int, str])
        layouts: dict[tuple, EngineLayout] = {}
        first: dict[int, int] = {}  # TP rank → the first rank with it
        for rank, key in enumerate(keys):
            if key in layouts:
                continue
            layouts[key] = broadcast_value(self._layout, EngineLayout, rank)
            if (other := first.setdefault(key[0], rank)) != rank:
                raise LayoutError(
                    f"the engines of ranks {other} and {rank} are both TP rank {key[0]}, but "
                    "their weights are laid out differently. Build every engine from one model "
                    "with the same options."
                )
        return [layouts[key] for key in keys]

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
            check_sources(shapes, distinct, self.engine.optional_parameters)
        except LayoutError as error:
            raise LayoutError(f"{error}{in_words(self.engine.config_differences)}") from None
        check_configuration(self.engine.config_differences)
        plan = build_plan(specs, layouts, bucket_bytes, nodes)
        check_casts(plan.buckets)
        return plan

    # Sync

    @property
    def _next_version(self) -> int:
        return (self.engine.weight_version or 0) + 1

    @contextmanager
    def _operation(self, version: int | None) -> Iterator[None]:
        """The collectives of one sync. RankFailedError where one fails because of another rank."""
        to = self._next_version if version is None else version
        try:
            with self._guard.operation(f"the sync to version {to}"):
                yield
        except CollectiveError as error:
            raise RankFailedError(
                f"{error} The engine's weights are partially updated: restart the failed ranks and "
                "sync again."
            ) from error

    def sync(self, version: int | None = None, *, verify: bool = False) -> SyncReport:
        """Write the current parameters into the engine and set its weight version.

        Collective: every rank calls it. On return every rank's engine generates from `version`.
        version: default is the last version of any rank plus one.
        verify: compare checksums of all slices, shards against engine weights, afterwards.

        Raises LayoutError on every rank, before anything moves, if the engine differs from the plan
        or cannot take weights now (running requests, sleep); PlanOutdatedError if the parameters
        differ from the plan; ReshardError on every rank if a checksum differs; RankFailedError if
        another rank is killed, fails, or stalls for the process group's timeout. After an error
        during the transfer the engine refuses to generate until the next complete sync.
        """
        started = time.perf_counter()
        with self._operation(version), torch.no_grad():
            version, intact = self._start(version)
            self._engine_state = None  # until this sync is complete
            found = self._delta.finder.find(intact) if self._delta else None
            with self.engine.weight_update(version, self._finish_on_all_ranks):
                received, sent = self._move(version, intact, found)
                self._load_fallback(intact)
                if verify:
                    self._finish_on_device("before verifying")
                    self._verify()
                if self._trained.unmerged:
                    adapters = adapters_of_factors(self._trained.unmerged, self._weights)
                    self.engine.load_adapters(adapters, version)
                self._finish_on_device("before committing")
        if self._writes_parts:
            self._engine_state = EngineState.of(self.engine)
        changed = self._delta.finder.changed if self._delta else None
        densely = self._pipeline.bytes_of(lambda bucket: not (bucket.frozen and intact))
        elapsed = (time.perf_counter() - started) * 1e3
        is_delta = found is not None
        return SyncReport(version, received, sent, elapsed, is_delta, changed, sum(densely))

    def _move(self, version: int, skip_frozen: bool, found: Found | None) -> tuple[int, int]:
        """Write the trained parameters, or what changed of them, into the engine.

        Return (bytes received, bytes sent).
        """

        def moves(bucket: Bucket) -> bool:
            if found is not None and covers(bucket):
                return False
            return not (bucket.frozen and skip_frozen)

        if found is None:
            write_constants(self.engine.layout, self._weights)
            for_scales = self._pipeline.update_scales(self._weights, moves)
            received, sent = self._pipeline.run(self._weights, moves)
            return for_scales[0] + received, for_scales[1] + sent
        assert self._delta is not None
        by_delta = (0, 0)
        problem: CorruptDeltaError | None = None
        try:
            versions = Versions(self.engine.weight_version or 0, version)
            by_delta = self._delta.apply(found, self._weights, versions)
        except CorruptDeltaError as error:
            problem = error
        self._raise_on_all_ranks(problem, "checking the delta")
        densely = self._pipeline.run(self._weights, moves)
        return by_delta[0] + densely[0], by_delta[1] + densely[1]

    def _finish_on_device(self, phase: str) -> None:
        """Return when this rank's device has done all that the sync has enqueued."""
        self._progress.mark(f"waiting for the device {phase}")
        self._progress.wait()

    def _finish_on_all_ranks(self, finish: Callable[[], None]) -> None:
        """Call `finish`; the weight version may change when no rank has raised."""
        problem: Exception | None = None
        try:
            finish()
        except Exception as error:
            problem = error
        self._raise_on_all_ranks(problem, "committing")

    def _raise_on_all_ranks(self, problem: Exception | None, phase: str) -> None:
        """Raise ReshardError on every rank if any rank has a problem."""
        failed = torch.tensor(int(problem is not None), device=host_device())
        with self._guard.collective(phase):
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            if failed.item():
                raise_on_all_ranks(problem, ReshardError)

    def _start(self, version: int | None) -> tuple[int, bool]:
        """Check model, engine and world; continue only if no rank has a problem.

        Return (version of this sync; whether all engines are kept, so that it may write a part).
        """
        changed: str | None = None
        problem: Exception | None = None
        stale = True
        try:
            changed = self._check_against_plan()
            if not changed:
                stale = not self._engine_is_kept()
        except Exception as error:
            problem = error
        given = _NEXT if version is None else version
        problems = problem is not None, changed is not None
        state = [*problems, stale, given, -given, self._next_version]
        flags = torch.tensor(state, device=host_device())
        with self._guard.collective("agreeing to start"):
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            failed, outdated, stale, highest, lowest, next_version = flags.tolist()
            if failed or outdated:
                raise_on_all_ranks(
                    problem or changed, PlanOutdatedError if outdated else LayoutError
                )
        if highest != -lowest:
            raise ReshardError(
                f"rank {self.rank} syncs to version {version}, other ranks to versions between "
                f"{-lowest} and {highest}: every rank must call sync() with the same version"
            )
        return next_version if version is None else version, not stale

    def _engine_is_kept(self) -> bool:
        """Return whether the engine holds what the last sync left there, frozen weights included.

        Sets `_frozen`.
        """
        frozen = [name for name, spec in self.plan.sources.items() if spec.frozen]
        checksums = bit_checksums([self._trained.shards[name] for name in frozen])
        if checksums != self._frozen:
            self._frozen, self._engine_state = checksums, None
        return self._engine_state is not None and self._engine_state.is_kept_by(self.engine)

    def _check_against_plan(self) -> str | None:
        """Return how the parameters differ from the plan. LayoutError if the engine is not ready.

        Sets `_weights`.
        """
        if (place := (dist.get_rank(), dist.get_world_size())) != (self.rank, self.world_size):
            raise LayoutError(
                f"planned as rank {self.rank} of {self.world_size}, now rank {place[0]} of "
                f"{place[1]}: make a new Resharder for the new world"
            )
        self.engine.check_ready()
        self._trained.read()
        if changed := self._trained.describe_change(self._planned):
            return (
                f"{changed} since the reshard was planned: call connect() again, or make a new "
                "Resharder"
            )
        self._weights = self._engine_weights()
        return None

    def _engine_weights(self) -> dict[str, torch.Tensor]:
        """Return the engine's tensors, and new memory for the factors of unmerged adapters."""
        return engine_weights(self.engine, self._device) | {
            name: torch.empty(t.shape, dtype=t.dtype, device=self._device)
            for name, t in self._trained.factors.items()
        }

    def _load_fallback(self, skip_frozen: bool) -> None:
        """Gather the parameters that are no pure copies, one at a time, for the engine's loader.

        They keep their dtype, so that the loader computes from the master weights.
        """
        sources = self.plan.sources
        names = [n for n in self.plan.fallback if not (sources[n].frozen and skip_frozen)]
        if names:
            self.engine.load_full((name, self._unsharded(name)) for name in names)

    def _unsharded(self, name: str) -> torch.Tensor:
        with self._guard.collective(f"gathering {name!r} in full"):
            return self._trained.unsharded(name)

    def _verify(self) -> None:
        """Raise ReshardError on every rank if an engine tensor differs from its source."""
        with self._guard.collective("gathering adapters to verify"):
            adapters = {name: adapter.full() for name, adapter in self._trained.merged.items()}
        read_shard = partial(self._pipeline.expected, adapters)

        def read_engine(name: str, block: Block) -> torch.Tensor:
            weight = self._weights[name]
            offset = weight.storage_offset() + block.offset
            return weight.as_strided(block.sizes, block.strides, offset)

        with self._guard.collective("verifying"):
            mismatches = find_mismatches(self.plan, self.rank, read_shard, read_engine)
            if self.plan.fallback:
                loaded = self.engine.layout.by_loader & self._weights.keys()
                tensors = {name: self._weights[name] for name in sorted(loaded)}
                reload = partial(self._load_fallback, skip_frozen=False)
                mismatches += find_unstable(self.rank, self._layout, tensors, reload)
            warn_of_nan(self._trained.shards)
        if mismatches:
            rank, destination, source = mismatches[0]
            raise ReshardError(
                f"the checksum of engine tensor {destination!r} on rank {rank} differs from its "
                f"source {source!r} ({len(mismatches)} slices differ in all): data was corrupted "
                "in transfer, or something else wrote to the engine. Sync again."
            )
