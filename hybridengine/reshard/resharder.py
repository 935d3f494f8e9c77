"""Weight sync: agree on a plan once, then move the trained parameters into the engine every step.

The engine refuses to generate from the first byte of a sync until all ranks have finished it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from hybridengine.reshard.commit.records import Order
from hybridengine.reshard.errors import PlanOutdatedError, ReshardError, operation
from hybridengine.reshard.memory import default_bucket_bytes
from hybridengine.reshard.move import Mover
from hybridengine.reshard.payload.delta import group_size
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.plan.senders import ranks_per_node
from hybridengine.reshard.planning import plan_sync
from hybridengine.reshard.report import SyncReport
from hybridengine.reshard.source.changes import (
    ChangeFinder,
    DeltaMode,
    ReadChanges,
    check_mode,
    is_wanted,
)
from hybridengine.reshard.source.holders import unite_holders
from hybridengine.reshard.source.rates import delta_pays, measure
from hybridengine.reshard.source.trained import Parameters, TrainedTensors
from hybridengine.reshard.target import EngineState, engine_weights
from hybridengine.reshard.transport.in_world import AllToAll, Pull, pull_bytes
from hybridengine.reshard.transport.shared_memory import share_memory
from hybridengine.reshard.verify import Mismatch, find_unstable, from_all_ranks, warn_of_nan
from hybridengine.runtime.all_ranks import (
    all_gather_values,
    broadcast_value,
    host_device,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from hybridengine.runtime.device import DeviceProgress
from hybridengine.runtime.failures import CollectiveGuard, machine_id
from hybridengine.sharding.adapter import Adapter, adapters_of_factors
from hybridengine.sharding.checksums import bit_checksums
from hybridengine.sharding.layout import EngineLayout, LayoutError
from hybridengine.sharding.shards import ShardSpec
from hybridengine.sharding.weight_target import HasTarget, WeightTarget, target_of

_NEXT = -1  # in place of a version: the next one
_AFTER_FAILURE = (
    "The engine's weights are partially updated: restart the failed ranks and sync again."
)


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
      across nodes, or with `changes`, on GPUs if the measured rates of link and memory are such
      that it takes less time.
    changes: function that returns, for the parameters that the optimizer keeps track of, what
      changed since its last call; None where that is not known. A write to these parameters by
      anything else, or a second reader of the changes, makes the next sync move everything.
    timeout_s: how long the other ranks may take in a collective of plan and syncs; a rank that
      stalls, or is stopped, is named then. None, and at most: the process groups' own timeouts.
      NCCL groups without a CPU backend keep theirs.

    The plan is computed once, verified to be equal on all ranks by its digest, and reused by every
    `sync()`. Raises LayoutError on every rank if any rank detects a problem.
    """

    def __init__(
        self,
        parameters: Callable[[], Parameters],
        engine: WeightTarget | HasTarget,
        bucket_bytes: int | None = None,
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        merge: bool = True,
        delta: DeltaMode = "auto",
        changes: ReadChanges | None = None,
        timeout_s: float | None = None,
    ) -> None:
        check_mode(delta)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.engine: WeightTarget = target_of(engine)
        self._trained = TrainedTensors(parameters, adapters, merge)
        self._guard = CollectiveGuard(
            self.rank, self.world_size, timeout_s=timeout_s, groups=self._trained.groups
        )
        comparing = self._guard.collective("comparing models and engines")
        with operation(self._guard, "planning the syncs"), comparing:
            self._make_plan(bucket_bytes, delta, changes, timeout_s)

    # Planning

    def _make_plan(
        self, bucket_bytes: int | None, delta: DeltaMode, changes: ReadChanges | None,
        timeout_s: float | None,
    ) -> None:  # fmt: skip
        """Plan with the other ranks and connect to them."""
        specs = run_on_all_ranks(partial(self._trained.read_specs, self.world_size), LayoutError)
        specs = unite_holders(specs)
        shards = self._trained.shards.values()
        self._device = next((t.device for t in shards), torch.device("cpu"))
        self._progress = DeviceProgress(self._guard, self._device, limit_s=timeout_s)
        defaults = all_gather_values(default_bucket_bytes(self._device), int)
        size = min(defaults) if bucket_bytes is None else bucket_bytes
        target = self.engine
        self._layout = target.layout.with_full_tensors(self._trained.factors)
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
        self._transport, self._mover = self._connect()
        # Checksums of the frozen parameters at the last sync, None if it did not compute them.
        self._frozen: list[int] | None = None
        self._engine_state: EngineState | None = None  # after the last sync; None: write everything
        by_default = delta == "auto" and (
            len(set(nodes)) > 1 or (changes is not None and self._delta_pays())
        )
        wanted = is_wanted(delta, by_default, self.plan)
        self._finder: ChangeFinder | None = None
        if wanted and not self._trained.unmerged and not target.discards_weights:
            self._finder = ChangeFinder(
                self.plan, self.rank, self._trained, self._guard, delta, changes
            )
        frozen = any(spec.frozen for spec in specs.values())
        self._writes_parts = (frozen or self._finder is not None) and not target.discards_weights

    def _delta_pays(self) -> bool:
        """Return whether a delta can take less time than a dense sync on this machine."""
        if self._device.type == "cpu" or self.engine.discards_weights:
            return True
        shard_bytes = sum(shard.nbytes for shard in self._trained.shards.values())
        sizes = self.plan.bytes_received, all_gather_values(shard_bytes, int)
        return delta_pays(*sizes, self.plan.bytes_needed, measure(self._device))

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
        optional, differences = self.engine.optional_parameters, self.engine.config_differences
        return plan_sync(specs, layouts, bucket_bytes, nodes, optional, differences)

    def _connect(self) -> tuple[AllToAll, Mover]:
        """Return a pull if the ranks can map each other's memory, else an all-to-all."""
        make = partial(Mover, self.plan, self.rank, self._device, self._trained, self.engine)
        merges = bool(self._trained.merged)
        ends = self._guard, self._progress, self._device, self.plan.staging_bytes, merges
        machines = all_gather_values(machine_id(), str)
        if len(set(machines)) == 1 and any(self.plan.bytes_sent):
            mover = make(Pull.builder)
            assert isinstance(mover.builder, Pull.builder)
            if memory := share_memory(pull_bytes(mover.builder), self._device):
                return Pull(*ends, memory), mover
        # An engine that sleeps needs the memory for its KV cache.
        keeps = self._device.type == "cuda" and not self.engine.discards_weights
        return AllToAll(*ends, keeps_staging=keeps), make(AllToAll.builder)

    # Sync

    @property
    def reads_changes(self) -> bool:
        """Whether syncs look for what changed, and call `changes`."""
        return self._finder is not None

    @property
    def _next_version(self) -> int:
        return (self.engine.weight_version or 0) + 1

    def sync(self, version: int | None = None, *, verify: bool = False) -> SyncReport:
        """Write the current parameters into the engine and set its weight version.

        Collective: every rank calls it. On return every rank's engine generates from `version`.
        version: default is the last version of any rank plus one.
        verify: compare checksums of all slices, shards against engine weights, afterwards.

        Raises LayoutError on every rank, before anything moves, if the engine differs from the plan
        or cannot take weights now (running requests, sleep); PlanOutdatedError if the parameters
        differ from the plan; ReshardError on every rank if a checksum differs; RankFailedError if
        another rank is killed, fails, or stalls for `timeout_s`. After an error during the
        transfer the engine refuses to generate until the next complete sync.
        """
        started = time.perf_counter()
        to = self._next_version if version is None else version
        name = f"the sync to version {to}"
        with operation(self._guard, name, _AFTER_FAILURE), torch.no_grad():
            version, intact = self._start(version)
            self._engine_state = None  # until this sync is complete
            found = self._finder.find(intact) if self._finder else None
            order = Order(intact, verify)
            if found is not None:
                order = Order(
                    intact, verify, self.engine.weight_version or 0, group_size(found.share)
                )
            transport = self._transport
            transport.begin()
            with self.engine.weight_update(version, self._finish_on_all_ranks):
                received, sent = self._mover.move(transport, order, version, self._weights, found)
                if verify:
                    self._finish_on_device("before verifying")
                    self._verify()
                if self._trained.unmerged:
                    adapters = adapters_of_factors(self._trained.unmerged, self._weights)
                    self.engine.load_adapters(adapters, version)
                self._finish_on_device("before committing")
        if self._writes_parts:
            self._engine_state = EngineState.of(self.engine)
            if self._frozen is None:
                self._frozen = self._frozen_checksums()
        elapsed = (time.perf_counter() - started) * 1e3
        changed = self._finder.changed if self._finder else None
        densely = self._mover.dense.bytes_of(order.moves_densely)
        received += found.num_bytes if found else 0
        return SyncReport(version, received, sent, elapsed, found is not None, changed, densely)

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

        Sets `_frozen`. No shard is read where the engine has lost what it held.
        """
        state, frozen, self._frozen = self._engine_state, self._frozen, None
        if state is None or not state.is_kept_by(self.engine):
            return False
        self._frozen = self._frozen_checksums()
        return self._frozen == frozen

    def _frozen_checksums(self) -> list[int]:
        frozen = [name for name, spec in self.plan.sources.items() if spec.frozen]
        return bit_checksums([self._trained.shards[name] for name in frozen])

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

    def _verify(self) -> None:
        """Raise ReshardError on every rank if an engine tensor differs from its source."""
        with self._guard.collective("verifying"):
            own = self._mover.find_mismatches(self._transport, self._weights)
            mismatches = from_all_ranks(own, Mismatch)
            if self.plan.fallback:
                loaded = self.engine.layout.by_loader & self._weights.keys()
                tensors = {name: self._weights[name] for name in sorted(loaded)}
                reload = partial(self._mover.load_full, self._transport, skip_frozen=False)
                mismatches += find_unstable(self.rank, self._layout, tensors, reload)
            warn_of_nan(self._trained.shards)
        if mismatches:
            rank, destination, source = mismatches[0]
            raise ReshardError(
                f"the checksum of engine tensor {destination!r} on rank {rank} differs from its "
                f"source {source!r} ({len(mismatches)} slices differ in all): data was corrupted "
                "in transfer, or something else wrote to the engine. Sync again."
            )
