"""Whether a sync can be a delta, and whether that pays; the same answer on all ranks.

A delta needs an unbroken chain: the engine holds the version that the last sync of this resharder
committed, and nothing else has begun to write to it since. A new engine, a restart, a failed sync
or discarded weights break the chain; a dense sync begins a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from hybridengine.reshard.delta.find import ChangeFinder, Found, ReadChanges
from hybridengine.reshard.delta.pipeline import DeltaPipeline
from hybridengine.reshard.execute.trained import TrainedTensors
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.runtime.all_ranks import host_device
from hybridengine.runtime.device import DeviceProgress
from hybridengine.runtime.failures import CollectiveGuard

if TYPE_CHECKING:
    from hybridengine.sharding.weight_target import WeightTarget

DeltaMode = Literal["auto", "on", "off"]

# Share of changed elements up to which a sync is a delta. auto: a delta takes less time than a
# dense sync (docs/delta.md). on: its messages fit in twice the staging memory of a bucket.
_MAX_CHANGED = {"auto": 0.1, "on": 1 / 3}


class DeltaSync:
    """Delta syncs of one resharder.

    changed: the share of elements that changed before the last sync, over all ranks; None where it
    is not known. problem: why messages of the last `apply` were not applied on this rank.
    """

    changed: float | None = None
    problem: str | None = None

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        trained: TrainedTensors,
        device: torch.device,
        guard: CollectiveGuard,
        progress: DeviceProgress,
        engine: WeightTarget,
        mode: DeltaMode,
        read_changes: ReadChanges | None,
    ) -> None:
        self._arguments = (plan, rank, trained, device, guard, progress)
        self._guard, self._engine = guard, engine
        self._max_changed = _MAX_CHANGED[mode]
        self._buckets = [bucket for bucket in plan.buckets if self.covers(bucket)]
        self._finder = ChangeFinder(plan, rank, trained, guard, self._buckets, read_changes)
        self._pipeline: DeltaPipeline | None = None
        self._base: tuple[int, int] | None = None  # weight version, number of the update

    @staticmethod
    def covers(bucket: Bucket) -> bool:
        """Whether deltas replace the bucket: its engine tensors have 16 bits and it is trained."""
        return bucket.engine_dtype in (torch.bfloat16, torch.float16) and not bucket.frozen

    @property
    def chain_is_broken(self) -> bool:
        """Whether this rank's engine may differ from what was sent last."""
        engine = self._engine
        state = (engine.weight_version, engine.updates_begun)
        return self._base is None or engine.discarded or self._base != state

    def find(self, allowed: bool) -> Found | None:
        """Return what changed, None for a dense sync. Collective, the same choice on all ranks.

        allowed: whether no rank's chain is broken, the same on all ranks.
        """
        base, self._base = self._base, None  # until the sync has finished
        self._base_version = base[0] if base else -1
        self._finder.take()
        self.changed = None
        if not allowed:
            self._finder.refresh()
            return None
        found = self._finder.find()
        over = found.num_changed > 0 and not found.changes
        sums = torch.tensor(
            [found.num_changed, found.total, not found.complete, over], device=host_device()
        )
        with self._guard.collective("agreeing on a delta"):
            dist.all_reduce(sums)
            count, total, incomplete, over = sums.tolist()
        if incomplete:
            return None
        self.changed = count / max(total, 1)
        return None if over or self.changed > self._max_changed else found

    def apply(
        self, found: Found, weights: Mapping[str, torch.Tensor], version: int
    ) -> tuple[int, int]:
        """Write what changed into `weights`. Return (bytes received, bytes sent). Collective."""
        if self._pipeline is None:
            self._pipeline = DeltaPipeline(*self._arguments, self._buckets)
        moved = self._pipeline.run(found.changes, weights, self._base_version, version)
        self.problem = self._pipeline.problem
        return moved[0] + found.bytes, moved[1]

    def commit(self, version: int) -> None:
        """All ranks' engines hold `version`: the next sync can be a delta."""
        self._base = (version, self._engine.updates_begun)
