"""What changed in this rank's shards since the last sync, in the engine's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hybridengine.kernels.delta import Changes, changed_elements
from hybridengine.reshard.execute.trained import TrainedTensors
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.runtime.failures import CollectiveGuard
from hybridengine.sharding.changes import ChangedElements
from hybridengine.sharding.shards import Box, RowRange

_MIN_BUDGET = 1 << 16  # changes: of a rank that holds little

ReadChanges = Callable[[], Mapping[str, ChangedElements] | None]


class Part(NamedTuple):
    """A shard, or a box of one that is merged with its adapter at a time (box not None)."""

    name: str
    dtype: torch.dtype  # of the engine
    box: Box | None


class Found(NamedTuple):
    """What changed on this rank.

    changes: by part; empty where more than the limit changed. num_changed, total: elements that
    changed, of those that were looked at. complete: whether what changed is known of every part.
    bytes: received from other ranks to merge adapters.
    """

    changes: dict[Part, ChangedElements]
    num_changed: int
    total: int
    complete: bool
    bytes: int


class ChangeFinder:
    """Finds changes in the optimizer's change sets, and by comparison where there are none.

    buckets: those whose parameters are looked at. read_changes: returns parameter → what changed
    since the last call, in the engine's dtype, for the parameters that the optimizer keeps track
    of; None where it does not know. A parameter that it does not name is compared with the bits
    that were sent last: a copy of the shard in the engine's dtype, on the shard's device.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        trained: TrainedTensors,
        guard: CollectiveGuard,
        buckets: Sequence[Bucket],
        read_changes: ReadChanges | None,
    ) -> None:
        self._plan, self._rank, self._trained, self._guard = plan, rank, trained, guard
        self._read_changes = read_changes
        self._parts = list(dict.fromkeys(p for bucket in buckets for p in self._parts_of(bucket)))
        self._sent: dict[Part, torch.Tensor] = {}
        self._changes: Mapping[str, ChangedElements] | None = {}

    def _parts_of(self, bucket: Bucket) -> Iterator[Part]:
        for name, chunk in bucket.chunks:
            box = None
            if bucket.merged:
                spec = self._plan.sources[name]
                shard = spec.shard_of(self._rank)
                nothing = (RowRange(0, 0),) * len(spec.shape)
                box = nothing if shard is None else spec.box(shard, *chunk.row_part)
            yield Part(name, bucket.engine_dtype, box)

    def take(self) -> None:
        """Take the optimizer's change sets; every sync does, whether it uses them or not."""
        if self._read_changes is not None:
            self._changes = self._read_changes()

    def find(self) -> Found:
        """Return what changed since the last `find` or `refresh`; collective with adapters.

        If more than a third changed, it is only counted, to bound the memory that changes take.
        """
        shards = self._trained.shards
        own = sum(shards[name].numel() for name in {part.name for part in self._parts})
        return self._find(own // 3 + _MIN_BUDGET)

    def refresh(self) -> None:
        """Take the current bits as sent, for a dense sync; collective with adapters."""
        self._find(0)

    def _find(self, budget: int) -> Found:
        changes: dict[Part, ChangedElements] = {}
        if self._changes is None:
            self._sent.clear()
            return Found(changes, 0, 0, False, 0)
        count = total = num_bytes = 0
        complete = True
        for part in self._parts:
            if (known := self._known(part)) is not None:
                total += self._trained.shards[part.name].numel()
                changes[part], found = known, len(known.indices)
            else:
                current, gathered = self._read(part)
                num_bytes += gathered
                total += current.numel()
                complete &= part in self._sent
                *elements, found = self._compare(part, current, max(0, budget - count))
                changes[part] = ChangedElements(*elements)
            count += found
        if count > budget:
            changes.clear()
        return Found(changes, count, total, complete, num_bytes)

    def _compare(self, part: Part, current: torch.Tensor, capacity: int) -> Changes:
        if part not in self._sent:
            self._sent[part] = torch.zeros(current.numel(), dtype=part.dtype, device=current.device)
        return changed_elements(current, self._sent[part], capacity=capacity)

    def _known(self, part: Part) -> ChangedElements | None:
        if part.box is not None or not self._changes:
            return None
        known = self._changes.get(part.name)
        return known if known is not None and known.values.dtype == part.dtype else None

    def _read(self, part: Part) -> tuple[torch.Tensor, int]:
        """Return the current elements of a part in contiguous order, and bytes gathered for it."""
        trained, name = self._trained, part.name
        if part.box is None:
            return trained.shards[name].reshape(-1), 0
        spec = self._plan.sources[name]
        with self._guard.collective(f"gathering the adapter of {name!r}"):
            merged = trained.merge(name, spec, self._rank, part.box)
            return merged.reshape(-1), trained.bytes_gathered(name)
