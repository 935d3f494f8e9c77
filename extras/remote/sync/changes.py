"""What changed in the shards since the last sync, and whether sending only that pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridengine.kernels import Changed, change_mask, mark_changed_, take_changed
from hybridengine.run.failures import CollectiveGuard
from hybridengine.run.messages import host_device
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import Box
from hybridengine.sync.trainers import TrainedTensors, Trainers

# Share of changed elements up to which a sync is a delta. auto: over a link, where it moves 15% of
# the bytes then. on: a message takes less memory than the elements that it is made of.
MAX_CHANGED = {"auto": 0.1, "on": 1 / 3}
_MIN_BUDGET = 1 << 16  # changes: of a rank that holds little
_PAUSES = 4, 64  # dense syncs without a comparison: after the first that found too much, at most


_BYTES_PER_CHANGE = 3  # of a message, where an element has 2
_STEP = 4  # sizes of groups are powers of it, so that few sets of tables are made


def group_size(share: float) -> int:
    """Return of how many buckets the messages take about as much memory as two buckets.

    Examples:
        >>> [group_size(share) for share in (1 / 3, 0.1, 0.01, 0.001)]
        [4, 4, 64, 1024]
    """
    most = 2 * 2 / (_BYTES_PER_CHANGE * max(share, 1e-6))
    size = 1
    while size * _STEP <= most:
        size *= _STEP
    return size


class Part(NamedTuple):
    """A shard, or, if `box` is given, a part of one that is merged with its adapter at once."""

    name: str
    dtype: torch.dtype  # of the engine
    box: Box | None


class Found(NamedTuple):
    """The changes that a comparison has found on this rank.

    changes: the changes of each part.
    share: the share of changed elements among all elements of all ranks.
    num_bytes: the bytes received from other ranks to merge adapters.
    """

    changes: Mapping[Part, Changed]
    share: float
    num_bytes: int


def covers(bucket: Bucket) -> bool:
    """Return whether deltas replace the bucket: its engine tensors have 16 bits and are trained."""
    return bucket.engine_dtype in (torch.bfloat16, torch.float16) and not bucket.frozen


class ChangeFinder:
    """Finds what changed by comparison with a copy of what was sent last.

    The copies have the engine's dtype and are on the shards' device. So a write by anything, in any
    way, is found; the bits that a write has left alone are not sent.

    max_changed: share of changed elements up to which a sync is a delta.
    pauses: after a comparison that found more, drop the copies and compare nothing for 4 syncs, the
      next time for 8, and so on up to 64.

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
        max_changed: float,
        pauses: bool = False,
    ) -> None:
        self._plan, self._rank, self._trained, self._guard = plan, rank, trained, guard
        self._max_changed, self._pauses = max_changed, pauses
        self._pause = self._pause_left = 0  # dense syncs
        buckets = [bucket for bucket in plan.buckets if covers(bucket)]
        self._parts = list(dict.fromkeys(p for bucket in buckets for p in self._parts_of(bucket)))
        self._sent: dict[Part, torch.Tensor] = {}  # the elements of each part
        self._masks: dict[Part, torch.Tensor] = {}  # empty between two calls

    def _parts_of(self, bucket: Bucket) -> Iterator[Part]:
        for name, chunk in bucket.chunks:
            box = None
            if bucket.merged:
                spec = self._plan.sources[name]
                box = spec.box(spec.shard_of(self._rank), *chunk.row_part)
            yield Part(name, bucket.engine_dtype, box)

    def find(self, allowed: bool) -> Found | None:
        """Return what changed since the last call, None for a dense sync.

        Collective, with the same choice on all ranks. allowed: whether an engine can take a delta,
        the same on all ranks. The current bits count as sent, unless a pause begins or goes on.
        """
        self.changed = None
        if self.is_paused:
            self._pause_left -= 1
            return None
        is_known, num_bytes = self._compare(allowed)
        if not allowed:
            return None
        changes = self._take() if is_known else None
        count = sum(len(c.indices) for c in changes.values()) if changes is not None else 0
        too_many = is_known and changes is None
        sums = torch.tensor([count, self._numel(), not is_known, too_many], device=host_device())
        with self._guard.collective("agreeing on a delta"):
            dist.all_reduce(sums)
            count, total, unknown, too_many = sums.tolist()
        if unknown:
            return None
        if not too_many:
            self.changed = count / max(total, 1)
        if changes is None or self.changed is None or self.changed > self._max_changed:
            self._begin_pause()
            return None
        self._pause = 0
        return Found(changes, self.changed, num_bytes)

    @property
    def is_paused(self) -> bool:
        """Whether the next call of `find` compares nothing."""
        return self._pause_left > 0

    def _begin_pause(self) -> None:
        if self._pauses:
            first, longest = _PAUSES
            self._pause = self._pause_left = min(2 * self._pause or first, longest)
            self._sent, self._masks = {}, {}

    def _numel(self) -> int:
        return sum(sent.numel() for sent in self._sent.values())

    def _compare(self, marks: bool) -> tuple[bool, int]:
        """Renew the copies, and mark what changes in them; a part at a time is merged.

        marks: whether to mark. Return whether there were copies of all parts, and the bytes that
        were gathered.
        """
        num_bytes, is_known = 0, True
        for part in self._parts:
            current, gathered = self._read(part)
            num_bytes += gathered
            if part not in self._sent:
                self._sent[part] = current.to(part.dtype, copy=True)
                self._masks[part] = change_mask(current)
                is_known = False
            elif marks:
                mark_changed_(current, self._sent[part], self._masks[part])
            else:
                self._sent[part].copy_(current)
                self._masks[part].zero_()  # marks of a sync that has failed
        return is_known, num_bytes

    def _take(self) -> dict[Part, Changed] | None:
        """Return what is marked, None if too much is; clear the marks."""
        budget = self._numel() // 3 + _MIN_BUDGET
        changes: dict[Part, Changed] | None = {}
        for dtype in {part.dtype for part in self._parts}:
            parts = [part for part in self._parts if part.dtype == dtype]
            sent, masks = [self._sent[p] for p in parts], [self._masks[p] for p in parts]
            share = min(1.0, budget / max(1, sum(t.numel() for t in sent)))
            taken = take_changed(masks, sent, max_share=share)
            if taken is None or changes is None:
                changes = None
            else:
                changes |= zip(parts, taken, strict=True)
        return changes

    def _read(self, part: Part) -> tuple[torch.Tensor, int]:
        """Return the current elements of a part in contiguous order, and bytes gathered for it."""
        name, trained = part.name, self._trained
        if part.box is None:
            return trained.shards[name].reshape(-1), 0
        spec = self._plan.sources[name]
        merged, num_bytes = trained.merge(name, spec, self._rank, part.box, self._guard)
        return merged.reshape(-1), num_bytes


def find_changes(trainers: Trainers, plan: ReshardPlan, *, local: bool) -> ChangeFinder | None:
    """Return what finds changes between syncs, None where all syncs are dense.

    local: whether engines read all that they receive from memory of their machine. There a dense
        sync is about as fast as the reads that find changes: of shards, copies and engines. `auto`
        sends deltas elsewhere, where bytes cross a link.
    Raises LayoutError for mode `on` if engine tensors are quantized; `auto` sends all of these.
    """
    mode, model = trainers.delta, trainers.model
    quantized = any(layout.quantized for layout in plan.layouts)
    if quantized and mode == "on":
        raise LayoutError(
            "delta: got 'on', but the engine's weights are quantized: the scale of a block "
            "depends on all of it. Use delta='auto' or 'off', which send all weights"
        )
    if mode == "off" or quantized or model.unmerged or not any(map(covers, plan.buckets)):
        return None
    if mode == "auto" and (local or not any(plan.bytes_received)):
        return None
    limit = MAX_CHANGED[mode]
    return ChangeFinder(plan, trainers.rank, model, trainers.guard, limit, pauses=mode == "auto")
