"""The trainers' side of a weight sync to engines in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybridengine.remote.messages import from_rank0
from hybridengine.remote.sync.between_worlds import TrainersEnd, open_link
from hybridengine.remote.sync.changes import ChangeFinder, Found, find_changes, group_size
from hybridengine.remote.sync.coordinator import Absent, Coordinator, EngineStatus
from hybridengine.remote.sync.delta import DeltaTables, Increment, Versions
from hybridengine.remote.sync.link import Link, LinkError, feeders_of
from hybridengine.remote.sync.records import (
    EngineInfo,
    Generations,
    PlanInputs,
    SyncStore,
    Transfer,
    device_id,
    make_plan,
)
from hybridengine.run.activity import machine_of, stopped_ranks, this_process
from hybridengine.run.failures import CollectiveError, DeviceProgress, one_line
from hybridengine.run.messages import all_gather_values, raise_on_all_ranks
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.buckets import default_bucket_bytes
from hybridengine.sync.checks import config_differences
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.mover import Mover, Order
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.trainers import DeltaMode, Parameters, Trainers
from hybridengine.sync.verify import find_mismatches, warn_of_nan
from hybridengine.sync.weight_target import ReshardError, operation

T = TypeVar("T")
_MAKE_AGAIN = "since the sender was made: make a new WeightSender"


class Delta(NamedTuple):
    """What changed on this trainer since version `base`.

    generation: that of the parameters of engines at this version (`Generations.trained`).
    """

    base: int
    generation: int
    found: Found


class WeightSender:
    """Sends trained FSDP2 parameters to engines in other processes; make one on every trainer rank.

    parameters, adapters, merge, delta, frozen: see `Resharder`. Each engine that has what the last
      sync sent receives a delta.
    config: that of the trained model (`model.config.to_dict()`). An engine that would compute
      another function of equal weights is refused. {}: configs are not compared.
    store: a `torch.distributed` store that all trainers and engines reach (`TCPStore`).
    num_engines: how many engines there are, numbered from 0. An engine is the world of one or more
      processes that hold a `WeightReceiver` with that index.
    bucket_bytes: staging memory of one bucket; two are in use at a time. None: 64 MiB on CPUs, on
      GPUs by the free memory, at most 1 GiB; the least of all ranks.
    timeout_s: how long an engine may take to come to a sync, and a rank to answer. A trainer rank
      that stalls is named after `timeout_s`, or after up to 3.25 times while rank 0 waits for
      engines. The timeout of the trainers' process group should be longer; under NCCL without a CPU
      backend it is the only one.

    Needs the trainers' default process group. A new WeightSender on the same store takes the place
    of an earlier one.
    """

    def __init__(
        self,
        parameters: Callable[[], Parameters],
        store: dist.Store,
        *,
        num_engines: int,
        bucket_bytes: int | None = None,
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        merge: bool = True,
        delta: DeltaMode = "auto",
        config: Mapping[str, Any] = MappingProxyType({}),
        timeout_s: float = 300.0,
        frozen: Callable[[], Set[str]] = frozenset,
    ) -> None:
        if num_engines < 1:
            raise ValueError(f"num_engines: got {num_engines}, expected at least 1")
        self._trainers = trainers = Trainers(parameters, adapters, merge, delta, timeout_s, frozen)
        self.rank, self.world_size = trainers.rank, trainers.world_size
        self._trained, self._guard = trainers.model, trainers.guard
        self._store, self._config, self._timeout_s = SyncStore(store), config, timeout_s
        self._bucket_bytes = bucket_bytes
        making = operation(self._guard, "making the sender")
        with making, self._guard.collective("comparing trainers"):
            trainers.compare()
            self._device = trainers.device
            self._processes = all_gather_values(this_process(), str)
            self._devices = all_gather_values(device_id(self._device), str)
        self._guard.activity.join(self._store.world())
        self._coordinator: Coordinator | None = None
        if self.rank == 0:
            self._coordinator = Coordinator(
                self._store, num_engines, self._processes, timeout_s, self._guard.activity
            )
        self._engines = {index: EngineStatus() for index in range(num_engines)}
        self._layouts: dict[int, str] = {}
        self.link: Link | None = None
        self._linked_to: list[EngineInfo] = []
        self._group_number = 0
        self._finder: ChangeFinder | None = None
        self._finds: tuple[int, bool | None] | None = None  # plan, whether all engines are near
        self._sent = Generations(0, 0)
        self._base: int | None = None  # version of the engines that have it

    @property
    def engines(self) -> Mapping[int, EngineStatus]:
        """Status of every engine as of the last sync."""
        return self._engines

    def ended(self, engine: int) -> str:
        """Return which ranks of an engine, where it has joined, have ended; "" for none.

        Known on rank 0, of processes on its machine.
        """
        return self._coordinator.ended(engine) if self._coordinator else ""

    # Sync

    def sync(
        self, version: int, *, verify: bool = False, absent: Absent | None = None
    ) -> SyncReport:
        """Send the current parameters to every live engine; returns when these have committed.

        Collective over the trainers. An engine that has `version` already takes no part: a second
        sync to the same version reaches those that were dropped and are back.
        verify: engines compare checksums of all slices before they commit.
        absent: for a caller that makes each engine take part by a call of its own: returns why the
          call of an engine has failed, None while it has not. Such an engine is dropped at once,
          and one that was dropped before is invited again. Used on rank 0.

        Raises PlanOutdatedError if the parameters differ from those the sender was made for;
        RankFailedError if a trainer rank is lost; ReshardError if no engine is left. An engine that
        is late, fails or ends is dropped with a warning on rank 0, and the others are synced.
        """
        started = time.perf_counter()
        received = sent = dense_bytes = 0
        delta: Delta | None = None
        is_delta, changed = False, None
        with self._operation(version), torch.no_grad():
            _, is_kept = self._trainers.start(version, lambda frozen: frozen, _MAKE_AGAIN)
            self._sent = self._sent._replace(frozen=self._sent.frozen + (not is_kept))
            infos = self._on_rank0(
                lambda c: c.open(version, absent),
                "waiting for engines",
                list[EngineInfo],
                wait_s=self._timeout_s,
            )
            if infos:
                infos, is_delta = self._plan_for(infos), True
                delta = self._find()
                received = delta.found.num_bytes if delta else 0
                changed = self._finder.changed if self._finder else None
            while infos:
                verify = verify or self._trainers.verify_requested
                some, transfer = self._begin(infos, verify, delta)
                moved = self._transfer_on_all_ranks(some, transfer, version, delta)
                received, sent = received + moved[0], sent + moved[1]
                is_delta &= transfer.delta is not None
                dense_bytes = self._mover.dense_bytes(transfer.order)
                infos = self._settle(some) + [info for info in infos if info not in some]
                self._base = version
            self._engines = self._on_rank0(Coordinator.close, "ending", dict[int, EngineStatus])
        elapsed = (time.perf_counter() - started) * 1e3
        return SyncReport(version, received, sent, elapsed, is_delta, changed, dense_bytes)

    @contextmanager
    def _operation(self, version: int) -> Iterator[None]:
        """Tell the engines where a sync fails; RankFailedError where a trainer is lost."""
        try:
            with operation(self._guard, f"the sync to version {version}"):
                yield
        except BaseException as error:
            self._close_link()
            if self._coordinator is not None:
                with suppress(ReshardError):  # the store is gone
                    self._coordinator.close(f"the trainers gave up the sync: {one_line(error)}")
            raise

    def _find(self) -> Delta | None:
        """Return what changed since the last sync, None if everything has to be sent."""
        base, self._base = self._base, None  # until the sync has finished
        generation = self._sent.trained
        found = self._finder.find(base is not None) if self._finder else None
        if found is None or found.share:
            self._sent = self._sent._replace(trained=generation + 1)
        if found is None or base is None:
            return None
        return Delta(base, generation, found)

    @property
    def _remembers(self) -> bool:
        """Whether the next sync may leave out what has not changed."""
        frozen = any(spec.frozen for spec in self._trainers.specs.values())
        return frozen or (self._finder is not None and not self._finder.is_paused)

    def _begin(
        self, infos: list[EngineInfo], verify: bool, delta: Delta | None
    ) -> tuple[list[EngineInfo], Transfer]:
        """Start a transfer: a delta to the engines that can take it, then one to all others."""

        def begin(coordinator: Coordinator) -> tuple[list[EngineInfo], Transfer]:
            able: list[EngineInfo] = []
            if delta:
                able = coordinator.take_delta(infos, delta.base, delta.generation)
            some = able or infos
            groups = self._group_number
            if self._linked_to != some:
                groups = self._store.next_number("groups")
            members = sorted(m for info in some for m in info.members())
            has_frozen = coordinator.has_frozen(some, self._sent.frozen)
            order = Order(has_frozen, verify, self._remembers)
            update = (delta.base, group_size(delta.found.share)) if delta and able else None
            by_member = feeders_of(self._processes, self._devices, some)
            feeders = [by_member[member] for member in members] if by_member else None
            plan = self._plan_number, self.plan.digest
            transfer = Transfer(groups, members, feeders, *plan, order, update)
            coordinator.begin(transfer)
            return some, transfer

        return self._on_rank0(begin, "starting the transfer", tuple[list[EngineInfo], Transfer])

    def _transfer_on_all_ranks(
        self, infos: list[EngineInfo], transfer: Transfer, version: int, delta: Delta | None
    ) -> tuple[int, int]:
        """As `_transfer`; if it fails on any rank, raise ReshardError on all."""
        moved, error = (0, 0), None
        try:
            moved = self._transfer(infos, transfer, version, delta)
        except CollectiveError:  # of the trainers' own collectives: other ranks have it, too
            raise
        except Exception as caught:
            error = caught
            self._close_link()
        if error is None and self.link is None and (lost := stopped_ranks(self._processes)):
            raise CollectiveError(f"rank {self.rank} stopped in {self._guard.place}: {lost}.")
        # Until then a rank may wait for a connection, and for an engine that another has not.
        with self._guard.collective("agreeing that everything was sent", 3 * self._timeout_s):
            raise_on_all_ranks(error, ReshardError, "the transfer")
            if not all(all_gather_values(self.link is not None, bool)):
                self._close_link()
        return moved

    def _settle(self, infos: list[EngineInfo]) -> list[EngineInfo]:
        """Wait until the engines have committed; return those that ask for another attempt."""
        sent, failed = self._sent, self.link is None
        again, committed = self._on_rank0(
            lambda c: c.settle(infos, sent, failed),
            "waiting for engines to commit",
            tuple[list[EngineInfo], bool],
            wait_s=1.25 * self._timeout_s + 2,
        )
        # If not, an engine has closed its connections.
        if not committed or (self.link is not None and not self.link.is_kept):
            self._close_link()
        return again

    def _transfer(
        self, infos: list[EngineInfo], transfer: Transfer, version: int, delta: Delta | None
    ) -> tuple[int, int]:
        """Send everything to the members once. Return (bytes received, bytes sent).

        A failed connection is no error: the engines tell whether they have committed.
        """
        link, failure = None, None
        try:
            link = self._connect(infos, transfer)
        except LinkError as error:
            failure = error
        progress = DeviceProgress(link or self._guard, self._device, limit_s=0.8 * self._timeout_s)
        transport = self._transport
        transport.begin(link, progress, link.failure if link else failure)
        increment = None
        if delta is not None and transfer.delta is not None:
            base, size = transfer.delta
            increment = Increment(self._tables, Versions(base, version), size, delta.found)
        moved = self._mover.move(transport, transfer.order, {}, increment)
        if transfer.order.verify:
            find_mismatches(transport, self._mover, {})
            with self._guard.collective("looking for NaN"):
                warn_of_nan(self._trained.shards)
        try:
            progress.mark("waiting for the device")
            progress.wait()
        except LinkError as error:
            transport.failure = error
        if transport.failure:
            self._close_link()
        return moved

    def _connect(self, infos: list[EngineInfo], transfer: Transfer) -> Link:
        if self.link is None or self._group_number != transfer.groups:
            self._close_link()
            self._group_number, self._linked_to = transfer.groups, infos
            self.link = open_link(
                self._store,
                transfer,
                self._processes,
                {info.index: info for info in infos},
                self.rank,
                self._device,
                self._timeout_s,
                self._guard,
                self._transport.sizes,
            )
        return self.link

    def _close_link(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link, self._linked_to = None, []

    # Planning

    def _plan_for(self, infos: list[EngineInfo]) -> list[EngineInfo]:
        """Plan for the layouts of the engines if these are new; drop engines with others."""
        known = [info.layout_of_tp_rank for info in infos]
        layouts = self._layouts if self._layouts in known else known[0]
        if layouts != self._layouts:
            self._plan(layouts, infos[known.index(layouts)])
        chosen = self._on_rank0(
            lambda c: c.select(infos, layouts, self._config), "choosing engines", list[EngineInfo]
        )
        processes = [process for info in chosen for process in info.processes]
        machines = set(map(machine_of, (*self._processes, *processes)))
        is_near = feeders_of(self._processes, self._devices, chosen) is not None
        local = is_near and len(machines) == 1
        finds = self._plan_number, local if self._trainers.delta == "auto" else None
        if finds != self._finds:
            self._finds = finds
            self._finder = find_changes(self._trainers, self.plan, local=local)
        return chosen

    def _plan(self, layouts: dict[int, str], info: EngineInfo) -> None:
        def make(size: int, nodes: list[int]) -> ReshardPlan:
            if info.device != self._device.type:
                raise LayoutError(
                    f"engine {info.index} has its weights on {info.device}, the trainers theirs "
                    f"on {self._device.type}: use the same kind of device on both sides"
                )
            rest = self._trained.unmerged, layouts, size, nodes
            self._inputs = PlanInputs.of(self._trainers.specs, *rest)
            differences = config_differences(self._config, info.model_config)
            return make_plan(self._inputs, self._store, info.optional_parameters, differences)

        default = min(default_bucket_bytes(self._device), info.bucket_bytes)
        with self._guard.collective("planning"):
            self.plan = self._trainers.plan(make, self._bucket_bytes, default)
        self._layouts = layouts
        self._sent = self._sent._replace(frozen=self._sent.frozen + 1)  # it measures all scales
        self._mover = Mover(self.plan, self.rank, self._device, self._trained, None)
        self._tables = DeltaTables(self._mover)
        merges = bool(self._trained.merged)
        self._transport = TrainersEnd(self._guard, self.plan, self._device, merges)
        self._transport.plan_for(self._mover.exchanges)
        self._plan_number = self._on_rank0(self._publish_plan, "publishing the plan", int)

    def _publish_plan(self, coordinator: Coordinator) -> int:
        number = self._store.next_number("plans")
        self._store.set(f"plan/{number}", self._inputs)
        return number

    # Agreement

    def _on_rank0(
        self, fn: Callable[[Coordinator], T], phase: str, expected: Any, wait_s: float = 0
    ) -> T:
        """Return on every rank what the coordinator on rank 0 returns; raise its error on all.

        expected: the type of the value.
        wait_s: how long `fn` may wait for engines.
        """
        coordinator: Any = self._coordinator  # None elsewhere
        with self._guard.collective(phase, self._timeout_s + wait_s):
            return from_rank0(lambda: fn(coordinator), expected, ReshardError)
