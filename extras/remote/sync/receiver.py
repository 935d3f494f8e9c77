"""The engines' side of a weight sync from trainers in other processes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from hybridengine.remote.sync.between_worlds import EnginesEnd, open_link
from hybridengine.remote.sync.delta import CorruptDeltaError, DeltaTables, Increment, Versions
from hybridengine.remote.sync.engine_rank import EngineRank
from hybridengine.remote.sync.link import Link, LinkError
from hybridengine.remote.sync.records import (
    EngineInfo,
    Holding,
    PlanInputs,
    SyncState,
    SyncStore,
    Transfer,
    make_plan,
)
from hybridengine.run.failures import DeviceProgress, one_line
from hybridengine.sync.adapter import adapters_of_factors
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.mover import Mover
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.verify import checksum_error, find_mismatches
from hybridengine.sync.weight_target import (
    EngineState,
    HasTarget,
    RankFailedError,
    ReshardError,
    WeightTarget,
    engine_weights,
    target_of,
)


class WeightReceiver:
    """Receives the weights of one engine from a `WeightSender`; make one on every engine rank.

    engine: the weights of this rank, or an engine that has them.
    store: the store of the sender.
    index: the number of this engine, from 0.
    timeout_s: see `WeightSender`; also the longest that `receive` waits for a sync to begin.

    The ranks of the engine are those of its default process group, without one this process alone.
    New processes may take the index of an engine that has ended.

    Attributes:
        engine_state: what the last sync has left in the engine; None where no later sync needs it.
    """

    def __init__(
        self,
        engine: WeightTarget | HasTarget,
        store: dist.Store,
        *,
        index: int,
        timeout_s: float = 300.0,
    ) -> None:
        self.engine, self.index = target_of(engine), index
        self._store, self._timeout_s = SyncStore(store), timeout_s
        self.rank = EngineRank(self.engine, self._store, index, timeout_s)
        self._device = self.rank.device
        self.link: Link | None = None
        self._group_number = self._plan_number = 0
        self.engine_state: EngineState | None = None

    def pending(self) -> bool:
        """Return whether a sync waits for this engine, the same on every rank. Collective.

        The engine may go on generating; the sync waits for `receive` until its timeout.
        """
        self.rank.phase = "looking for a sync"
        return self.rank.on_rank0(lambda: self.rank.invitation() is not None, bool)

    def receive(self) -> SyncReport:
        """Take part in a sync: write the weights in place and set the weight version. Collective.

        Waits until a sync begins. The report counts bytes from trainers and from replicas in other
        processes, and bytes to replicas.

        Raises LayoutError, before anything moves, if the engine cannot take weights now (running
        requests, sleep) or does not fit the trainers' model; RankFailedError if a trainer or a rank
        of this engine is lost; ReshardError if no sync begins within the timeout, if the engine was
        dropped, or if a checksum differs. After an error during the transfer the engine refuses to
        generate until the next complete sync.
        """
        rank = self.rank
        rank.phase = "waiting for a sync"
        state = rank.on_rank0(rank.wait_for_invitation, SyncState, 2 * self._timeout_s)
        started = time.perf_counter()
        rank.phase = "starting"
        self._check_engine()
        rank.last = state.number

        def finish_on_all_ranks(finish: Callable[[], None]) -> None:
            rank.phase = "committing"
            finish()
            rank.all_finish(state, "committing")

        with self._operation(state):
            holding = self._holding()
            if rank.rank == 0:
                rank.tell_state(state, holding)
            state, transfer = self._first_transfer(state)
            self._plan_for(transfer)
            with self.engine.weight_update(state.version, finish_on_all_ranks), torch.no_grad():
                before = self.engine_state
                while (moved := self._try(transfer, state)) is None:
                    before = None  # a part of a delta may have been written
                    rank.tell_ready(state, state.attempt + 1)
                    state, transfer = rank.wait_for_transfer(state, state.attempt + 1)
            self.engine_state = None
            if transfer.order.remembers:
                increment = self._increment
                self.engine_state = (
                    increment.state_of(self.engine, before)
                    if increment
                    else EngineState.of(self.engine)
                )
            if self.link is not None and not self.link.is_kept:
                self._close_link()
            rank.tell_committed(state)
        rank.phase = f"after the sync to version {state.version}"
        elapsed = (time.perf_counter() - started) * 1e3
        return SyncReport(state.version, *moved, elapsed, transfer.delta is not None)

    def close(self) -> None:
        """End the connections to trainers and replicas; no further sync is possible."""
        self._close_link()

    def _check_engine(self) -> None:
        def check() -> None:
            self.engine.check_ready()
            engine_weights(self.engine, self._device, {})

        self.rank.on_all_ranks(check, LayoutError, self._timeout_s)

    def _holding(self) -> Holding:
        """Return which weights all ranks of the engine have."""
        held = self.engine_state
        base = held.version if held and held.is_kept_by(self.engine) else None
        own = Holding(base is None, base)
        ranks = self.rank.all_gather(own, Holding, self._timeout_s)
        bases = {holding.base for holding in ranks}
        base = bases.pop() if len(bases) == 1 else None
        return Holding(any(holding.lost for holding in ranks), base)

    @contextmanager
    def _operation(self, state: SyncState) -> Iterator[None]:
        """Name this rank and its phase in errors, and tell the trainers of them."""
        try:
            yield
        except BaseException as error:
            self._close_link()
            rank = self.rank
            with suppress(RankFailedError):  # the store is gone
                failure = f"rank {rank.rank} failed while {rank.phase}: {one_line(error)}"
                rank.tell_state(state, failure)
            error.add_note(f"{rank.name} was {rank.phase} in the sync to {state.version}")
            raise

    # Transfer

    def _first_transfer(self, state: SyncState) -> tuple[SyncState, Transfer]:
        """Return once the trainers begin to send.

        The engine refuses to generate if this fails after another rank of it may have begun.
        """
        self.rank.tell_ready(state, 0)
        try:
            return self.rank.wait_for_transfer(state, 0)
        except ReshardError:
            if self.rank.others_may_receive(state):
                self.engine.state.updating_to = state.version
            raise

    def _plan_for(self, transfer: Transfer) -> None:
        if transfer.plan != self._plan_number:
            self.rank.phase = "planning"
            inputs: PlanInputs = self._store.get(f"plan/{transfer.plan}", PlanInputs)
            plan = make_plan(
                inputs, self._store, self.engine.optional_parameters, self.engine.config_differences
            )
            self._inputs, self._plan, self._plan_number = inputs, plan, transfer.plan
            num_trainers = len(inputs.nodes)
            rank = num_trainers + self.engine.tp_rank
            self._mover = Mover(plan, rank, self._device, None, self.engine)
            self._tables = DeltaTables(self._mover)
            self._transport = EnginesEnd(plan, num_trainers)
        if self._plan.digest != transfer.digest:
            raise LayoutError(
                f"{self.rank.name} made another reshard plan than the trainers: run the same "
                "version of this package on both sides"
            )

    def _try(self, transfer: Transfer, state: SyncState) -> tuple[int, int] | None:
        """Return (bytes received, bytes sent) when all ranks of the engine have everything.

        None if a connection has failed, here or for another rank of the engine.
        """
        self.rank.phase = "connecting to the trainers"
        try:
            link = self._connect(transfer, state)
            try:
                moved = self._transfer(transfer, state, link)
            finally:
                self.rank.phase = link.phase
        except LinkError:
            self._close_link()
            return None
        except CorruptDeltaError as error:
            warnings.warn(f"{self.rank.name}: {error}: it requests all weights", stacklevel=2)
            self.rank.tell_state(state, Holding(False, None))
            self._close_link()
            return None
        self.rank.phase = "waiting for the other ranks of the engine"
        if self.rank.all_finish(state, "moving"):
            return moved
        self._close_link()
        return None

    def _transfer(self, transfer: Transfer, state: SyncState, link: Link) -> tuple[int, int]:
        """Receive everything. Return (bytes received, bytes sent)."""
        progress = DeviceProgress(link, self._device, limit_s=0.8 * self._timeout_s)
        scales = self._inputs.scales
        weights = engine_weights(self.engine, self._device, self._inputs.factors)
        self._transport.begin(link, progress)
        self._increment: Increment | None = None
        if transfer.delta is not None:
            base, size = transfer.delta
            versions = Versions(base, state.version)
            self._increment = Increment(self._tables, versions, size, None)
        moved = self._mover.move(self._transport, transfer.order, weights, self._increment)
        if transfer.order.verify:
            progress.wait()
            self._verify(link, weights, state.version)
        if scales:
            self.engine.load_adapters(adapters_of_factors(scales, weights), state.version)
        progress.mark("waiting for the device before committing")
        progress.wait()
        return moved

    def _connect(self, transfer: Transfer, state: SyncState) -> Link:
        if self.link is None or self._group_number != transfer.groups:
            self._close_link()
            trainers = self.rank.trainers(state)
            engines = {member.engine for member in transfer.members}
            own = self.rank.rank, self.index
            place = next(i for i, m in enumerate(transfer.members) if (m.rank, m.engine) == own)
            self._group_number = transfer.groups
            self.link = open_link(
                self._store,
                transfer,
                trainers,
                {i: self._store.get(f"engine/{i}", EngineInfo) for i in engines},
                len(trainers) + place,
                self._device,
                self._timeout_s,
                self.rank.guard,
            )
        return self.link

    def _close_link(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None

    def _verify(self, link: Link, weights: dict[str, torch.Tensor], version: int) -> None:
        wrong = find_mismatches(self._transport, self._mover, weights)
        self.rank.activity.compared(version, wrong)
        if wrong:
            link.phase = "verifying"
            raise checksum_error(wrong, self.rank.name, "on this rank")
