"""Divide sources into chunks, and chunks into buckets that load all ranks alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridengine.kernels.block_quantize import QUANTIZED_DTYPE
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.source_class import Chunk, SourceClass

_MIN_BYTES, _MAX_BYTES = 64 << 20, 1 << 30
_SHARE_OF_FREE = 16  # two buffers are in use, so an eighth of the free memory in all


def default_bucket_bytes(device: torch.device) -> int:
    """Return the staging memory of one all-to-all, in bytes, that suits `device` now.

    On a CPU 64 MiB, which stays near the caches. On a GPU a bucket has a fixed cost on the host, so
    that larger ones are faster: a sixteenth of the free memory, at most 1 GiB.
    """
    if device.type != "cuda":
        return _MIN_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bucket_bytes_of(free + cached)


def bucket_bytes_of(free: int) -> int:
    """Return the default bucket of a GPU with `free` bytes.

    Examples:
        >>> [bucket_bytes_of(gib << 30) >> 20 for gib in (0, 8, 100)]
        [64, 512, 1024]
    """
    return min(max(free // _SHARE_OF_FREE, _MIN_BYTES), _MAX_BYTES)


_CHUNKS_PER_BUCKET = 8  # of a source that is larger than one bucket
_SLICES_PER_BUCKET = 32  # cut the slices of a pair of ranks that exchanges more than this

Source = tuple[str, torch.dtype]  # trained parameter, dtype of the engine tensors it goes to


@dataclass
class Bucket:
    """The content of one all-to-all: (source, chunk) pairs of equal dtypes and treatment.

    frozen: whether a sync may leave the bucket out (`ReshardPlan.sent_once`).
    merged: as `ShardSpec`, for all sources of the bucket.
    intra_bytes, inter_bytes: what the busiest rank sends or receives (the larger of the two) inside
      its node and across nodes.
    """

    engine_dtype: torch.dtype
    frozen: bool
    merged: bool
    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    intra_bytes: int = 0
    inter_bytes: int = 0

    @property
    def quantized(self) -> bool:
        """Whether the values are quantized as they are packed."""
        return self.engine_dtype == QUANTIZED_DTYPE


class ChunkTable:
    """The T chunks of a source class.

    loads: elements that each rank moves of each chunk, by channel (`SourceClass.loads`): [T, 4, N].
    staged_before: bytes that each rank stages of all chunks before a chunk: int64 [T + 1, N].
    max_staged: most bytes that a rank stages of one chunk.
    """

    def __init__(
        self, chunks: list[Chunk], loads: Sequence[np.ndarray], staged: Sequence[np.ndarray]
    ) -> None:
        """staged: bytes that each rank stages of each chunk: [T] arrays [N]."""
        maxima = [int(s.max()) for s in staged]
        self.chunks, self.loads, self.max_staged = chunks, np.stack(loads), max(maxima)
        self.staged_before = _running_sum(staged)
        self._max_staged_before = _running_sum(maxima)

    def end_of_fit(self, first: int, used: np.ndarray, limit: int) -> int:
        """Return the end of the longest run of chunks from `first` on that fits on every rank.

        used: the bytes [N] that each rank already stages in the bucket.
        limit: the size of the bucket in bytes.
        """
        room = limit - used.max() + self._max_staged_before[first]
        fits = int(np.searchsorted(self._max_staged_before, room, "right")) - 1
        end = max(first, fits)  # at least these fit, even if one rank had the maximum of each
        begin = used - self.staged_before[first]
        while end < len(self.chunks) and (begin + self.staged_before[end + 1]).max() <= limit:
            end += 1
        return end


def _running_sum(values: Sequence) -> np.ndarray:
    sums = np.zeros((len(values) + 1, *np.shape(values[0])), np.int64)
    np.cumsum(values, axis=0, out=sums[1:])
    return sums


def divide(name: str, source_class: SourceClass, itemsize: int, limit: int) -> ChunkTable:
    """Divide a source into chunks that fit a bucket of `limit` bytes on every rank.

    name: the parameter's name, for the error message.
    itemsize: the bytes of an element in the engine's dtype.

    Raises LayoutError if even the smallest possible chunks do not fit.
    """
    small = max(1, limit // _CHUNKS_PER_BUCKET)
    all_at_once = _divide(source_class, itemsize, 1, 1, False)
    total = all_at_once.max_staged
    if total <= small:
        return all_at_once
    spec = source_class.spec
    num_rows = spec.num_rows
    if spec.merged:  # merged rows are computed once and sent to all receivers at once
        wanted, max_rounds, ways = -(-total // small), 1, [(True, num_rows)]
    else:
        pair_bytes = int(source_class.num_needed.max()) * itemsize
        wanted = max(1, -(-pair_bytes * _SLICES_PER_BUCKET // limit))
        max_rounds = source_class.senders.topology.size
        ways = [(False, source_class.max_parts), (True, num_rows)]
        # Of two ways that give enough parts, the outer axis: runs of adjacent elements stay long.
        rows_last = source_class.cuts_before_rows(wanted)
        ways.sort(key=lambda way: (-min(way[1], wanted), way[0] == rows_last))
    for by_rows, max_parts in ways:
        num_parts = min(wanted, max_parts)
        while True:
            num_rounds = min(max_rounds, -(-total // (num_parts * small)))
            table = _divide(source_class, itemsize, num_rounds, num_parts, by_rows)
            if (largest := table.max_staged) <= limit:
                return table
            if num_parts >= max_parts:
                break
            num_parts = min(max_parts, max(num_parts + 1, num_parts * largest // limit))
    raise LayoutError(
        f"bucket_bytes: parameter {name!r} of shape {spec.shape} cannot be divided into parts "
        f"that fit a bucket of {limit} bytes. Use larger buckets."
    )


def _divide(
    source_class: SourceClass, itemsize: int, num_rounds: int, num_parts: int, by_rows: bool
) -> ChunkTable:
    """Return the chunks of a division, without empty ones."""
    known: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}  # most parts have equal loads
    chunks, all_loads, all_staged = [], [], []
    for part in range(num_parts):
        needed = source_class.count_needed(Chunk(0, num_rounds, part, num_parts, by_rows))
        key = needed.tobytes()
        if key not in known:
            loads = source_class.loads(needed, num_rounds)
            known[key] = loads, loads.sum(1, dtype=np.int64) * itemsize
        for number, (load, staged) in enumerate(zip(*known[key], strict=True)):
            # Round 0 includes what ranks keep: it may be needed although nothing travels.
            if staged.any() or (number == 0 and needed.any()):
                chunk = Chunk(number, num_rounds, part, num_parts, by_rows)
                chunks.append(chunk)
                all_loads.append(load)
                all_staged.append(staged + source_class.merge_bytes(chunk))
    if not chunks:
        loads, staged = next(iter(known.values()))
        return ChunkTable([Chunk()], [loads[0]], [staged[0]])
    return ChunkTable(chunks, all_loads, all_staged)


class _Filling:
    """An open bucket, and the bytes that each rank stages [N] and moves [4, N] of it."""

    def __init__(self, bucket: Bucket, world_size: int) -> None:
        self.bucket = bucket
        self.staged = np.zeros(world_size, np.int64)
        self.moved = np.zeros((4, world_size), np.int64)


def fill_buckets(
    classes: Mapping[Source, SourceClass],
    bucket_bytes: int,
    world_size: int,
    tables: dict[tuple[SourceClass, int], ChunkTable],
    sent_once: Set[Source],
) -> tuple[list[Bucket], np.ndarray, int]:
    """Return (buckets, bytes each rank moves int64 [4, N], most bytes that a rank stages).

    The four channels are those of `SourceClass.loads`. tables: known chunks by (class, bytes of an
    element); new ones are added. sent_once: see `ReshardPlan`.
    """
    fillings: list[_Filling] = []
    latest: dict[tuple, _Filling] = {}  # by treatment
    for (name, dtype), source_class in classes.items():
        spec, key = source_class.spec, (source_class, dtype.itemsize)
        if key not in tables:
            tables[key] = divide(name, *key, bucket_bytes)
        table, first = tables[key], 0
        treatment = (spec.dtype, dtype, (name, dtype) in sent_once, spec.merged)
        into = latest.get(treatment)
        while first < len(table.chunks):
            end = table.end_of_fit(first, into.staged, bucket_bytes) if into else first
            if into is None or end == first:
                into = latest[treatment] = _Filling(Bucket(*treatment[1:]), world_size)
                fillings.append(into)
                continue
            into.bucket.chunks += [(name, chunk) for chunk in table.chunks[first:end]]
            into.staged += table.staged_before[end] - table.staged_before[first]
            into.moved += table.loads[first:end].sum(0, dtype=np.int64) * dtype.itemsize
            first = end
    total, max_staged = np.zeros((4, world_size), np.int64), 0
    for filled in fillings:
        received_sent = filled.moved.reshape(2, 2, -1)  # inside the node, across nodes
        bucket = filled.bucket
        bucket.intra_bytes, bucket.inter_bytes = received_sent.max((0, 2)).tolist()
        total += filled.moved
        max_staged = max(max_staged, int(filled.staged.max()))
    return [filled.bucket for filled in fillings], total, max_staged
