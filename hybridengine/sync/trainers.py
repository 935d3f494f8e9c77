"""The training ranks of a sync: the model that they read, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial

import torch
import torch.distributed as dist

from hybridengine.run.all_ranks import (
    all_gather_values,
    host_device,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from hybridengine.run.failures import CollectiveGuard
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.checksums import bit_checksums
from hybridengine.sync.delta.changes import (
    MAX_CHANGED,
    ChangeFinder,
    DeltaMode,
    check_mode,
    is_possible,
)
from hybridengine.sync.delta.rates import max_share
from hybridengine.sync.errors import PlanOutdatedError, ReshardError
from hybridengine.sync.holders import unite_holders
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.plan.planner import ReshardPlan
from hybridengine.sync.plan.senders import ranks_per_node
from hybridengine.sync.trained import Parameters, TrainedTensors

_NEXT = -1  # in place of a version: the next one


class Trainers:
    """This rank among the training ranks.

    The arguments are those of `Resharder`. Without timeout_s, collectives have their groups' limit.

    Attributes:
        model: the trained tensors that this rank reads.
        guard: the guard of the collectives.
        verify_requested: whether somebody has requested that this sync be verified, on all ranks.
        specs: placement of every parameter, once `compare` has run.
        device: the device of the shards, once `compare` has run.
    """

    def __init__(
        self,
        parameters: Callable[[], Parameters],
        adapters: Callable[[], Mapping[str, Adapter]],
        merge: bool,
        delta: DeltaMode,
        timeout_s: float | None = None,
        frozen: Callable[[], Set[str]] = frozenset,
    ) -> None:
        check_mode(delta)
        self.timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._delta = delta
        self.model = model = TrainedTensors(parameters, adapters, merge, frozen)
        self.guard = CollectiveGuard(
            self.rank,
            self.world_size,
            timeout_s=timeout_s,
            groups=model.groups,
            name=f"trainer rank {self.rank}",
        )
        self.verify_requested = False
        self._frozen_checksums: list[int] | None = None  # as of the last sync

    def compare(self) -> None:
        """Read where every parameter is. Collective. Raises LayoutError on every rank."""
        specs = run_on_all_ranks(partial(self.model.read_specs, self.world_size), LayoutError)
        self.specs = unite_holders(specs)
        self._placements = self.model.placements
        shards = self.model.shards.values()
        self.device = next((t.device for t in shards), torch.device("cpu"))
        self._frozen = [name for name, spec in specs.items() if spec.frozen]

    def plan(
        self,
        make: Callable[[int, list[int]], ReshardPlan],
        bucket_bytes: int | None,
        default_bytes: int,
    ) -> tuple[ReshardPlan, list[int]]:
        """Return the plan, the same on every rank, and the node of each rank. Collective.

        make: plans for a bucket size and the nodes.
        bucket_bytes: None: the least of the ranks' `default_bytes`.
        Raises LayoutError on every rank.
        """
        own = default_bytes, self.rank // ranks_per_node(self.world_size)
        defaults, nodes = zip(*all_gather_values(own, tuple[int, int]), strict=True)
        size = min(defaults) if bucket_bytes is None else bucket_bytes
        plan = run_on_all_ranks(lambda: make(size, list(nodes)), LayoutError)
        digests = all_gather_values((plan.digest, self._delta), tuple[str, str])
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise LayoutError(
                f"ranks {odd} made another reshard plan than rank 0: their model, engine or "
                "bucket size differs. Start every rank with the same configuration."
            )
        return plan, list(nodes)

    def find_changes(self, plan: ReshardPlan, is_far: bool, pulls: bool) -> ChangeFinder | None:
        """Return what finds changes between syncs, None where all syncs are dense. Collective.

        is_far: whether weights cross between machines.
        pulls: see `rates.measure`.
        """
        if not is_possible(self._delta, plan) or self.model.unmerged:
            return None
        limit = MAX_CHANGED[self._delta]
        if self._delta == "auto" and not is_far:
            read = sum(t.nbytes + 2 * t.numel() for t in self.model.shards.values())
            sizes = plan.bytes_received, all_gather_values(read, int), plan.bytes_needed
            limit = min(limit, max_share(*sizes, self.device, pulls))
        if not limit:
            return None
        pauses = self._delta == "auto"
        return ChangeFinder(plan, self.rank, self.model, self.guard, limit, pauses)

    def start(
        self,
        version: int | None,
        check: Callable[[bool], bool],
        remedy: str,
        next_version: int = 0,
        remembers: bool = True,
    ) -> tuple[int, bool]:
        """Read the model; continue only if no rank has a problem. Collective.

        version: None: the highest `next_version`.
        check: gets whether the frozen parameters of this rank are those of the last sync.
        remedy: for a model that differs from the plan.
        remembers: whether a sync may leave out what has not changed; if not, no checksum is
          computed.
        Return the version, and whether `check` returned True on all ranks.
        """
        changed: str | None = None
        problem: Exception | None = None
        is_kept, checksums = False, None
        try:
            self.model.read()
            if not (changed := self.model.describe_change(self._placements)):
                frozen = self._frozen if remembers else []
                checksums = bit_checksums([self.model.shards[name] for name in frozen])
                is_kept = check(checksums == self._frozen_checksums)
        except Exception as error:
            problem = error
        given = _NEXT if version is None else version
        problems = problem is not None, changed is not None
        requested = self.guard.activity.verify_requested()
        state = [*problems, not is_kept, requested, given, -given, next_version]
        flags = torch.tensor(state, device=host_device())
        with self.guard.collective("agreeing to start"):
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True)
            self.guard.wait(work, flags.device)
            failed, outdated, differs, requested, highest, lowest, next_version = flags.tolist()
            if failed or outdated:
                raise_on_all_ranks(
                    problem or (changed and f"{changed} {remedy}"),
                    PlanOutdatedError if outdated else LayoutError,
                )
        if highest != -lowest:
            raise ReshardError(
                f"rank {self.rank} syncs to version {version}, other ranks to versions between "
                f"{-lowest} and {highest}: every rank must call sync() with the same version"
            )
        self._frozen_checksums, self.verify_requested = checksums, bool(requested)
        if requested:
            self.guard.activity.verify_begun()
        return next_version if version is None else version, not differs
