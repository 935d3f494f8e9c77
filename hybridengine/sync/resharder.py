"""Weight sync: agree on a plan once, then move the trained parameters into the engine every step.

The engine refuses to generate from the first byte of a sync until all ranks have finished it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridengine.run import load_plugin, plugins
from hybridengine.run.activity import machine_id
from hybridengine.run.failures import DeviceProgress
from hybridengine.run.messages import all_gather_values, broadcast_value, run_on_all_ranks
from hybridengine.sync.adapter import Adapter, adapters_of_factors
from hybridengine.sync.buckets import default_bucket_bytes
from hybridengine.sync.checks import check_fit
from hybridengine.sync.layout import EngineLayout, LayoutError
from hybridengine.sync.mover import Mover, Order
from hybridengine.sync.planner import ReshardPlan, build_plan
from hybridengine.sync.tables import PullBuilder
from hybridengine.sync.trainers import DeltaMode, Parameters, Trainers
from hybridengine.sync.transport import (
    AllToAll,
    Collectives,
    Pull,
    raise_if_any,
    share_memory,
)
from hybridengine.sync.verify import (
    Mismatch,
    checksum_error,
    find_mismatches,
    find_unstable,
    from_all_ranks,
    warn_of_nan,
)
from hybridengine.sync.weight_target import (
    EngineState,
    HasTarget,
    WeightTarget,
    engine_weights,
    operation,
    target_of,
)


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved on this rank: bytes from and to other ranks, including adapters.

    milliseconds: time from the call until the devices of all ranks had finished.
    delta: whether only what changed was moved.
    changed: the share of the model's elements whose bits changed, over all ranks; None where it was
      not determined.
    dense_bytes: received and sent by a dense sync.
    """

    version: int
    bytes_received: int
    bytes_sent: int
    milliseconds: float
    delta: bool = False
    changed: float | None = None
    dense_bytes: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of this sync, `reshard/...`; `changed` and `bytes_vs_dense` where known."""
        known = {} if self.changed is None else {"reshard/changed": self.changed}
        if self.dense_bytes:
            moved = self.bytes_received + self.bytes_sent
            known["reshard/bytes_vs_dense"] = moved / self.dense_bytes
        return known | {
            "reshard/bytes_received": self.bytes_received,
            "reshard/bytes_sent": self.bytes_sent,
            "reshard/ms": self.milliseconds,
            "reshard/delta": int(self.delta),
        }


class Deltas(Protocol):
    """What finds changes between two syncs; a plugin's (`hybridengine.deltas`).

    remembers: whether the next sync may move changes only.
    changed: the share of elements that changed before the last sync; None where it is not known.
    """

    @property
    def remembers(self) -> bool: ...
    @property
    def changed(self) -> float | None: ...
    def find(self, allowed: bool, base: int, version: int) -> Any:
        """Return what changed since the last call, None for a dense sync. Collective.

        allowed: whether the engines hold version `base` as the last sync left them.
        The result is an `Increment`. It has `num_bytes`, received to find it, and
        `state_of(engine, before)`, the `EngineState` of an engine after it has moved.
        """


_PARTIALLY_UPDATED = (
    "The engine's weights are partially updated: restart the failed ranks and sync again."
)
_PLAN_AGAIN = "since the reshard was planned: call connect() again, or make a new Resharder"


class Resharder:
    """Moves trained FSDP2 parameters into a rollout engine's weights, in place.

    parameters: function that returns checkpoint name → DTensor (FSDP2) or replicated tensor, on
      every rank. It is called at every sync, because `model.cpu().cuda()`, a cast or
      `load_state_dict(assign=True)` replaces the tensors of a model.
    engine: the rollout engine on this rank.
    bucket_bytes: staging memory (send + receive) of one bucket; two are in use at a time. None: by
      the memory that is free on the GPUs now, at most 1 GiB; 64 MiB on CPUs.
    adapters: function that returns parameter → LoRA adapter. With `merge`, adapters are merged when
      the parameter is packed, else the engine receives them in addition to its weights. All other
      parameters are then frozen.
    frozen: function that returns the names of parameters that are not trained. Frozen parameters
      travel again only if their bits change, here or in the engine.
    delta: whether a sync moves only the elements whose bits changed since the last one, where its
      changes are few and the engine still holds what that sync wrote. They are found by comparison
      with a copy of what was sent, 16 bits per element of the shards. auto: where weights travel;
      not where ranks of one machine read them from each other's memory.
    timeout_s: how long the other ranks may take in a collective of plan and syncs; a rank that
      stalls, or is stopped, is named then. None, and at most: the process groups' own timeouts.
      NCCL groups without a CPU backend keep theirs.

    Attributes:
        plan: who sends what to whom.
        engine_state: what the last sync has left in the engine; None where no later sync needs it.

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
        timeout_s: float | None = None,
        frozen: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self.engine = target_of(engine)
        self._trainers = trainers = Trainers(parameters, adapters, merge, delta, timeout_s, frozen)
        self.rank, self.world_size = trainers.rank, trainers.world_size
        self.trained, self.guard = trainers.model, trainers.guard
        doing = operation(self.guard, "planning the syncs")
        with doing, self.guard.collective("comparing models and engines"):
            trainers.compare()
            self._make_plan(bucket_bytes)
        self.engine_state: EngineState | None = None

    # Planning

    def _make_plan(self, bucket_bytes: int | None) -> None:
        """Plan with the other ranks and connect to them."""
        trainers, target = self._trainers, self.engine
        self._device = trainers.device
        self.progress = DeviceProgress(self.guard, self._device, limit_s=trainers.timeout_s)
        self._layout = target.layout.with_full_tensors(self.trained.factors)
        layouts = self._gather_layouts()

        def plan(size: int, nodes: list[int]) -> ReshardPlan:
            check_fit(
                trainers.specs, layouts, target.optional_parameters, target.config_differences
            )
            return build_plan(trainers.specs, layouts, size, nodes)

        self.plan = trainers.plan(plan, bucket_bytes, default_bucket_bytes(self._device))
        run_on_all_ranks(
            lambda: engine_weights(target, self._device, self.trained.factors), LayoutError
        )
        self.transport, self.mover = self._connect()
        self.deltas: Deltas | None = None
        wanted = trainers.delta == "on" or (trainers.delta == "auto" and plugins("deltas"))
        if wanted and not target.discards_weights:
            make = load_plugin("deltas", "changes", "reshard.delta")
            self.deltas = make(trainers, self.mover, local=isinstance(self.transport, Pull))
        frozen = any(spec.frozen for spec in trainers.specs.values())
        self._skips_frozen = frozen and not target.discards_weights

    def _gather_layouts(self) -> list[EngineLayout]:
        """Return the layout of every rank; equal layouts are broadcast once."""
        keys = all_gather_values((self.engine.tp_rank, self._layout.digest()), tuple[int, str])
        first: dict[int, int] = {}  # TP rank → the first rank with it
        for rank, (tp_rank, _) in enumerate(keys):
            if keys[other := first.setdefault(tp_rank, rank)] != keys[rank]:
                raise LayoutError(
                    f"the engines of ranks {other} and {rank} are both TP rank {tp_rank}, but "
                    "their weights are laid out differently. Build every engine from one model "
                    "with the same options."
                )
        layouts = {t: broadcast_value(self._layout, EngineLayout, r) for t, r in first.items()}
        return [layouts[tp_rank] for tp_rank, _ in keys]

    def _connect(self) -> tuple[Collectives, Mover]:
        """Return a pull if the ranks can map each other's memory, else an all-to-all."""
        make = partial(Mover, self.plan, self.rank, self._device, self.trained, self.engine)
        ends = self.guard, self.progress, self._device
        machines = all_gather_values(machine_id(), str)
        if len(set(machines)) == 1 and any(self.plan.bytes_sent):
            mover = make(PullBuilder)
            assert isinstance(mover.builder, PullBuilder)
            if memory := share_memory(mover.builder.memory_bytes, self._device):
                return Pull(*ends, memory), mover
        # An engine that sleeps needs the memory for its KV cache.
        keeps = self._device.type == "cuda" and not self.engine.discards_weights
        merges = bool(self.trained.merged)
        return AllToAll(*ends, self.plan.staging_bytes, merges, keeps_staging=keeps), make()

    # Sync

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
        base = self.engine.weight_version or 0
        to = base + 1 if version is None else version
        syncing = operation(self.guard, f"the sync to version {to}", _PARTIALLY_UPDATED)
        with syncing, torch.no_grad():
            version, intact = self._trainers.start(
                version, self._check, _PLAN_AGAIN, base + 1, self._skips_frozen
            )
            verify = verify or self._trainers.verify_requested
            before, self.engine_state = self.engine_state, None  # until this sync is complete
            increment = self.deltas.find(intact, base, version) if self.deltas else None
            remembers = self._skips_frozen or (self.deltas is not None and self.deltas.remembers)
            order = Order(intact, verify, remembers)
            transport = self.transport
            transport.begin()
            with self.engine.weight_update(version, self._finish_on_all_ranks):
                received, sent = self.mover.move(transport, order, self._weights, increment)
                if verify:
                    self.finish_on_device("before verifying")
                    self.verify(version)
                if self.trained.unmerged:
                    scales = {n: a.scale for n, a in self.trained.unmerged.items()}
                    adapters = adapters_of_factors(scales, self._weights)
                    self.engine.load_adapters(adapters, version)
                self.finish_on_device("before committing")
        if order.remembers and increment:
            self.engine_state = increment.state_of(self.engine, before)
        elif order.remembers:
            self.engine_state = EngineState.of(self.engine)
        elapsed = (time.perf_counter() - started) * 1e3
        received += increment.num_bytes if increment else 0
        changed = self.deltas.changed if self.deltas else None
        dense = self.mover.dense_bytes(order)
        return SyncReport(version, received, sent, elapsed, increment is not None, changed, dense)

    def finish_on_device(self, phase: str) -> None:
        """Return when this rank's device has done all that the sync has enqueued."""
        self.progress.mark(f"waiting for the device {phase}")
        self.progress.wait()

    def _finish_on_all_ranks(self, finish: Callable[[], None]) -> None:
        """Call `finish`; the weight version may change when no rank has raised."""
        problem: Exception | None = None
        try:
            finish()
        except Exception as error:
            problem = error
        raise_if_any(problem, self.guard, "committing")

    def _check(self, frozen_is_kept: bool) -> bool:
        """Return whether the engine holds what the last sync left there, frozen weights included.

        Sets `_weights`. Raises LayoutError if the engine, or the world, is not as planned.
        """
        if (place := (dist.get_rank(), dist.get_world_size())) != (self.rank, self.world_size):
            raise LayoutError(
                f"planned as rank {self.rank} of {self.world_size}, now rank {place[0]} of "
                f"{place[1]}: make a new Resharder for the new world"
            )
        self.engine.check_ready()
        self._weights = engine_weights(self.engine, self._device, self.trained.factors)
        state = self.engine_state if frozen_is_kept else None
        return state is not None and state.is_kept_by(self.engine)

    def verify(self, version: int) -> None:
        """Raise ReshardError on every rank if an engine tensor differs from its source."""
        with self.guard.collective("verifying"):
            own = find_mismatches(self.transport, self.mover, self._weights)
            mismatches = from_all_ranks(own, Mismatch)
            if self.plan.fallback:
                loaded = self.engine.layout.by_loader & self._weights.keys()
                tensors = {name: self._weights[name] for name in sorted(loaded)}
                reload = partial(self.mover.load_full, self.transport, skip_frozen=False)
                mismatches += find_unstable(self.rank, self._layout, tensors, reload)
            warn_of_nan(self.trained.shards)
        self.guard.activity.compared(version, mismatches)
        if mismatches:
            raise checksum_error(mismatches, f"rank {mismatches[0][0]}", "in all")
