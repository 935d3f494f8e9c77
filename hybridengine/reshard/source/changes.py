"""What changed in the shards since the last sync, and whether sending only that pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from hybridengine.kernels import change_mask, mark_changed_, take_changed
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.source.trained import TrainedTensors
from hybridengine.runtime.all_ranks import host_device
from hybridengine.runtime.failures import CollectiveGuard
from hybridengine.sharding.changes import ChangedElements
from hybridengine.sharding.checksums import bit_checksums
from hybridengine.sharding.layout import LayoutError
from hybridengine.sharding.shards import Box, RowRange

DeltaMode = Literal["auto", "on", "off"]
ReadChanges = Callable[[], Mapping[str, ChangedElements] | None]

# Share of changed elements up to which a sync is a delta. auto: a delta takes less time than a
# dense sync (docs/delta.md). on: a message takes less memory than the elements it is made of.
_MAX_CHANGED = {"auto": 0.1, "on": 1 / 3}
_MIN_BUDGET = 1 << 16  # changes: of a rank that holds little


class Part(NamedTuple):
    """A shard, or a box of one that is merged with its adapter at a time (box not None)."""

    name: str
    dtype: torch.dtype  # of the engine
    box: Box | None


class Found(NamedTuple):
    """What changed on this rank, by part. share: of all elements of all ranks, those that changed.

    num_bytes: received from other ranks to merge adapters.
    """

    changes: Mapping[Part, ChangedElements]
    share: float
    num_bytes: int


def check_mode(delta: str) -> None:
    """Raise ValueError unless `delta` is a mode."""
    if delta not in get_args(DeltaMode):
        raise ValueError(f"delta: got {delta!r}, expected one of {get_args(DeltaMode)}")


def is_wanted(mode: DeltaMode, by_default: bool, plan: ReshardPlan) -> bool:
    """Return whether syncs look for changes. by_default: in mode `auto`.

    Raises LayoutError for mode `on` if engine tensors are quantized; `auto` sends all of these.
    """
    quantized = any(layout.quantized for layout in plan.layouts)
    if quantized and mode == "on":
        raise LayoutError(
            "delta: got 'on', but the engine's weights are quantized: the scale of a block "
            "depends on all of it. Use delta='auto' or 'off', which send all weights"
        )
    return mode == "on" or (mode == "auto" and by_default and not quantized)


def covers(bucket: Bucket) -> bool:
    """Return whether deltas replace the bucket: its engine tensors have 16 bits and are trained."""
    return bucket.engine_dtype in (torch.bfloat16, torch.float16) and not bucket.frozen


class ChangeFinder:
    """Finds changes in the optimizer's change sets, and by comparison where there are none.

    read_changes: returns parameter → what changed since the last call, in the engine's dtype, for
      the parameters that the optimizer keeps track of; None where it does not know, or where too
      much changed. They are used if they lead from the bits of the shard that were sent last to
      those that it has now, by checksums. A parameter that it does not name is compared with a copy
      of what was sent last, in the engine's dtype, on the shard's device.

    Attributes:
        changed: the share of elements that changed before the last sync, over all ranks; None where
            it is not known.
    """

    changed: float | None = None

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        trained: TrainedTensors,
        guard: CollectiveGuard,
        mode: DeltaMode,
        read_changes: ReadChanges | None,
    ) -> None:
        self._plan, self._rank, self._trained, self._guard = plan, rank, trained, guard
        self._max_changed = _MAX_CHANGED[mode]
        self._read_changes = read_changes
        buckets = [bucket for bucket in plan.buckets if covers(bucket)]
        self._parts = list(dict.fromkeys(p for bucket in buckets for p in self._parts_of(bucket)))
        # What was sent last: copies of the parts that are compared, checksums of the other shards.
        self._copies: dict[Part, torch.Tensor] = {}
        self._checksums: dict[str, int] = {}
        self._changes: Mapping[str, ChangedElements] | None = {}

    def _parts_of(self, bucket: Bucket) -> Iterator[Part]:
        plan, rank = self._plan, self._rank
        for name, chunk in bucket.chunks:
            box = None
            if bucket.merged:
                spec = plan.sources[name]
                shard = spec.shard_of(rank)
                nothing = (RowRange(0, 0),) * len(spec.shape)
                box = nothing if shard is None else spec.box(shard, *chunk.row_part)
            yield Part(name, bucket.engine_dtype, box)

    def find(self, allowed: bool) -> Found | None:
        """Return what changed since the last call, None for a dense sync.

        Collective, with the same choice on all ranks. allowed: whether an engine can take a delta,
        the same on all ranks. The current bits count as sent, whatever it returns.
        """
        self.changed = None
        if self._read_changes is not None:
            self._changes = self._read_changes()
        compared, num_bytes = self._compare(allowed)
        tracked = self._check_tracked()
        if not allowed:
            return None
        changes = None if compared is None or tracked is None else compared | tracked
        count = sum(len(c.indices) for c in changes.values()) if changes is not None else 0
        total = sum(self._numel(part) for part in self._parts)
        sums = torch.tensor([count, total, changes is None], device=host_device())
        with self._guard.collective("agreeing on a delta"):
            dist.all_reduce(sums)
            count, total, unknown = sums.tolist()
        if unknown or changes is None:
            return None
        self.changed = count / max(total, 1)
        if self.changed > self._max_changed:
            return None
        return Found(changes, self.changed, num_bytes)

    def _compare(self, allowed: bool) -> tuple[dict[Part, ChangedElements] | None, int]:
        """Return what changed of the parts that are compared, and bytes gathered; renew the copies.

        None: a part has no copy yet, or too much changed.
        """
        copies: dict[Part, torch.Tensor] = {}
        by_dtype: dict[torch.dtype, dict[Part, torch.Tensor]] = {}  # masks
        num_bytes, known = 0, allowed
        for part in self._parts:
            if not self._is_compared(part):
                continue
            current, gathered = self._read(part)
            num_bytes += gathered
            copy = self._copies.get(part)
            if copy is None:
                copy, known = current.to(part.dtype, copy=True), False
            elif allowed:
                mask = change_mask(current)
                mark_changed_(current, copy, mask)
                by_dtype.setdefault(part.dtype, {})[part] = mask
            else:
                copy.copy_(current)
            copies[part] = copy
        self._copies = copies
        changes: dict[Part, ChangedElements] = {}
        budget = sum(self._numel(part) for part in self._parts) // 3 + _MIN_BUDGET
        for dtype, masks in by_dtype.items():
            sent = [copies[part] for part in masks]
            share = min(1.0, budget / max(1, sum(t.numel() for t in sent)))
            taken = take_changed(list(masks.values()), sent, dtype=dtype, max_share=share)
            if taken is None:
                return None, num_bytes
            for part, (indices, values) in zip(masks, taken, strict=True):
                changes[part] = ChangedElements(indices, values, None, None)
        return changes if known else None, num_bytes

    def _check_tracked(self) -> dict[Part, ChangedElements] | None:
        """Return what changed of the parts that are not compared; renew their checksums.

        None: the optimizer's changes do not lead from what was sent last to what is there now.
        """
        parts = [part for part in self._parts if part not in self._copies]
        shards = self._trained.shards
        names = list(dict.fromkeys(part.name for part in parts))
        now = dict(zip(names, bit_checksums([shards[name] for name in names]), strict=True))
        sent, self._checksums = self._checksums, now
        given = self._changes or {}
        changes: dict[Part, ChangedElements] = {}
        for part in parts:
            before, after = sent.get(part.name), now[part.name]
            change = given.get(part.name)
            if before == after:
                indices, values = (
                    torch.empty(0, dtype=dtype, device=shards[part.name].device)
                    for dtype in (torch.int32, part.dtype)
                )
                change = ChangedElements(indices, values, before, after)
            if before is None or change is None or (change.before, change.after) != (before, after):
                return None
            changes[part] = change
        return changes

    def _is_compared(self, part: Part) -> bool:
        """Return whether the optimizer does not tell what changed; the same on all ranks if merged,
        because then reading it is collective."""
        if part.box is not None:
            return True
        if self._changes is None:  # which it leaves out is known from earlier calls
            return part in self._copies
        known = self._changes.get(part.name)
        return known is None or known.values.dtype != part.dtype

    def _numel(self, part: Part) -> int:
        if part.box is not None:
            return self._copies[part].numel()
        return self._trained.shards[part.name].numel()

    def _read(self, part: Part) -> tuple[torch.Tensor, int]:
        """Return the current elements of a part in contiguous order, and bytes gathered for it."""
        name, trained = part.name, self._trained
        if part.box is None:
            return trained.shards[name].reshape(-1), 0
        spec = self._plan.sources[name]
        with self._guard.collective(f"gathering the adapter of {name!r}"):
            merged = trained.merge(name, spec, self._rank, part.box)
            return merged.reshape(-1), trained.bytes_gathered(name)
