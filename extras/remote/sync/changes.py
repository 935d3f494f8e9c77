"""What changed in the shards since the last sync, and whether sending only that pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridengine.kernels import Changed, bit_checksum, change_mask, mark_changed_, take_changed
from hybridengine.run.failures import CollectiveGuard
from hybridengine.run.messages import all_gather_values, host_device
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.shards import Box
from hybridengine.sync.trainers import TrainedTensors, Trainers

# Share of changed elements up to which a sync is a delta. auto: over a network, where a delta takes
# less time than a dense sync (docs/reshard.md). on: a message takes less memory than the elements
# that it is made of.
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
      next time for 8, and so on up to 64. On one machine a comparison takes about as long as a
      dense sync.

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


# Of a change, from finding to writing it: the bytes that are read in that time (docs/reshard.md).
_CHANGE_BYTES = 500
_BYTES = 32 << 20  # of an engine, for a measurement: larger than its cache
_REPEATS = 3


def find_changes(
    trainers: Trainers, plan: ReshardPlan, *, is_far: bool, pulls: bool
) -> ChangeFinder | None:
    """Return what finds changes between syncs, None where all syncs are dense. Collective.

    is_far: whether weights cross between machines.
    pulls: see `measure`.
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
    limit = MAX_CHANGED[mode]
    if mode == "auto" and not is_far:
        read = sum(t.nbytes + 2 * t.numel() for t in model.shards.values())
        sizes = plan.bytes_received, all_gather_values(read, int), plan.bytes_needed
        limit = min(limit, max_share(*sizes, trainers.device, pulls))
    if not limit:
        return None
    return ChangeFinder(plan, trainers.rank, model, trainers.guard, limit, pauses=mode == "auto")


class Rates(NamedTuple):
    """Bytes per second of the slowest rank, while all of them do the same.

    dense: received from others, what is sent cast first and what is received written to an engine.
    kept: cast and written to the engine of the same rank.
    memory: read.
    """

    dense: float
    kept: float
    memory: float


def measure(device: torch.device, pulls: bool) -> Rates:
    """Measure the rates of the default process group's ranks. Collective.

    pulls: whether a rank reads what it receives from the memory of others, or by an all-to-all.
    """
    world_size = dist.get_world_size()
    size = _BYTES // 2 // world_size * world_size
    values = torch.ones(size, device=device)  # zeros: the system maps one page for all of them
    staged, received, engine = torch.ones(3, size, dtype=torch.bfloat16, device=device).unbind()

    def dense() -> None:
        staged.copy_(values)
        if not pulls:
            dist.all_to_all_single(received, staged)
        engine.copy_(staged if pulls else received)

    calls = dense, lambda: engine.copy_(values), lambda: bit_checksum(values)
    dense_s, kept_s, memory_s = (
        max(all_gather_values(_seconds(call, device), float)) for call in calls
    )
    arrives = 1.0 if pulls or world_size == 1 else (world_size - 1) / world_size
    written = engine.nbytes
    return Rates(written * arrives / dense_s, written / kept_s, values.nbytes / memory_s)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of calls that all ranks begin at once, after one that is not measured.

    Not the shortest: ranks may share cores and memory.
    """
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    call()
    wait()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    wait()
    return (time.perf_counter() - started) / _REPEATS


def max_share(
    received: Sequence[int],
    compared: Sequence[int],
    engines: Sequence[int],
    device: torch.device,
    pulls: bool,
) -> float:
    """Return the share of changed elements up to which a delta takes less time; 0: none.

    Between ranks of one machine, by measured rates. A dense sync casts what is sent or kept, and
    each rank receives what its engine needs and it does not hold. A delta reads each shard and the
    copy of what was sent, and the engine's tensors, which may have been written to; each change
    then costs about as much time as a part of the memory that an engine's rank reads.

    Collective, with the same result on all ranks. An engine that is smaller than the measured
    transfer gives 0, because either kind of sync takes a few milliseconds.

    received: bytes that each rank receives in a dense sync.
    compared: bytes that a comparison reads on each rank.
    engines: bytes of each rank's engine, with 16 bits per element.
    """
    if max(engines) < _BYTES or not max(received):
        return 0.0
    return share_of(received, compared, engines, measure(device, pulls), 1 + (device.type != "cpu"))


def share_of(
    received: Sequence[int],
    compared: Sequence[int],
    engines: Sequence[int],
    rates: Rates,
    engine_reads: int,
) -> float:
    """Return the share at given rates. engine_reads: of its tensors, by a delta."""
    dense_s = max(
        r / rates.dense + max(0, e - r) / rates.kept
        for r, e in zip_longest(received, engines, fillvalue=0)
    )
    reads = (c + engine_reads * e for c, e in zip_longest(compared, engines, fillvalue=0))
    change_s = _CHANGE_BYTES * max(max(engines) / 2, 1) / rates.memory  # if all elements change
    return max(0.0, dense_s - max(reads) / rates.memory) / change_s
