"""Verify a sync: compare checksums of the engine's tensors with those of the shards.

Each sender computes the checksums of its own slices, cast to the engine's dtype; each receiver
those of the same slices, read back from its engine tensors. Only checksums travel. Both sides cast
and read in plain PyTorch, so errors of the copy kernels are detected as well as errors of the
transport.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridengine.kernels import bit_checksum
from hybridengine.run.messages import all_gather_values
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.blocks import Block
from hybridengine.sync.buckets import Bucket
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.mover import Mover
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.source_class import SliceCopy
from hybridengine.sync.trainers import TrainedTensors
from hybridengine.sync.transport import Transport
from hybridengine.sync.weight_target import ReshardError

# Elements that `value_checksum` converts at a time, which take a few MiB. The same on all devices:
# the sum depends on it, and those that are compared may be of a CPU and of a GPU.
_CHUNK = 1 << 18


Mismatch = tuple[int, str, str]  # receiving rank, engine tensor, trained parameter
_SUM_BYTES = 8


def find_mismatches(
    transport: Transport, mover: Mover, weights: Mapping[str, torch.Tensor]
) -> list[Mismatch]:
    """Return all slices that differ in this rank's engine; collective.

    mover: what has moved the weights.
    weights: the tensors of this rank's engine; {} if it has no engine.
    """
    plan, rank, source, device = mover.plan, mover.rank, mover.source, mover.device
    arriving: list[_Write] = []
    leaving: list[_Write] = []
    for bucket in plan.buckets:
        arrivals = list(plan.arrivals(bucket, rank))
        kept = [a for a in arrivals if a[1].sender == rank]
        arriving += _slice_writes(plan, bucket, arrivals)
        leaving += _slice_writes(plan, bucket, [*plan.departures(bucket, rank), *kept])
    arriving.sort(key=lambda write: write.slice.sender)
    leaving.sort(key=lambda write: write.slice.receiver)
    received = np.bincount([w.slice.sender for w in arriving], minlength=plan.world_size)
    sent = np.bincount([w.slice.receiver for w in leaving], minlength=plan.world_size)
    ours = None
    if source is not None:
        with transport.guard.collective("gathering adapters to verify"):
            adapters = {name: adapter.full() for name, adapter in source.merged.items()}
        blocks = (_expected(mover, source, write, adapters.get(write.name)) for write in leaving)
        ours = _checksums(blocks, leaving, device).view(torch.uint8)
    sizes = (sent * _SUM_BYTES).tolist(), (received * _SUM_BYTES).tolist()
    arrived = transport.post("the checksums of all slices", ours, *sizes).wait()
    if not arriving:
        return []

    def read_engine(write: _Write) -> torch.Tensor:
        weight, block = weights[write.destination], write.block
        offset = weight.storage_offset() + block.offset
        return weight.as_strided(block.sizes, block.strides, offset)

    actual = _checksums(map(read_engine, arriving), arriving, device)
    expected = torch.cat(arrived).view(torch.int64)
    differ = (expected != actual).nonzero().flatten().tolist()
    return [(rank, arriving[i].destination, arriving[i].name) for i in differ]


def checksum_error(mismatches: Sequence[Mismatch], where: str, scope: str) -> ReshardError:
    """Return the error of slices that differ, the first of them on the rank `where`."""
    _, destination, source = mismatches[0]
    return ReshardError(
        f"the checksum of engine tensor {destination!r} on {where} differs from its source "
        f"{source!r} ({len(mismatches)} slices differ {scope}): data was corrupted in transfer, or "
        "something else wrote to the engine. Sync again."
    )


class _Write(NamedTuple):
    """One write of a slice: a part of a parameter and the part of an engine tensor it fills."""

    name: str
    slice: SliceCopy
    destination: str
    block: Block
    dtype: torch.dtype


def _slice_writes(
    plan: ReshardPlan, bucket: Bucket, slices: Iterable[tuple[str, SliceCopy]]
) -> Iterator[_Write]:
    for name, slice_copy in slices:
        names = plan.destinations(name, bucket.engine_dtype, slice_copy.receiver)
        for index, block in slice_copy.writes:
            yield _Write(name, slice_copy, names[index], block, bucket.engine_dtype)


def _expected(
    mover: Mover, source: TrainedTensors, write: _Write, adapter: Adapter | None
) -> torch.Tensor:
    """Return what a write must leave in the receiver's engine, in plain PyTorch.

    adapter: the full adapter of a merged parameter.
    """
    name, slice_copy, destination, block, _ = write
    values = source.slice(name, mover.plan.sources[name], slice_copy.shard, block, adapter)
    return mover.encoding.expected(values, slice_copy.receiver, destination, block)


def find_unstable(
    rank: int, layout: EngineLayout, tensors: Mapping[str, torch.Tensor], reload: Callable[[], None]
) -> list[Mismatch]:
    """Return tensors of the engine's own loader that differ when loaded again; collective.

    reload: gathers the parameters again and passes them to the loader.
    """
    sources: dict[str, list[str]] = {name: [] for name in tensors}
    for source, reason in layout.fallback.items():
        sources.setdefault(reason.partition(": ")[0], []).append(source)
    before = {name: int(value_checksum(tensor, tensor.dtype)) for name, tensor in tensors.items()}
    reload()
    return from_all_ranks(
        [
            (rank, name, ", ".join(sources[name]) or "the loader's input")
            for name, tensor in tensors.items()
            if int(value_checksum(tensor, tensor.dtype)) != before[name]
        ],
        Mismatch,
    )


def warn_of_nan(shards: Mapping[str, torch.Tensor]) -> None:
    """Warn on every rank if a trained parameter contains NaN on any rank; collective."""
    names = [
        name
        for name, shard in shards.items()
        if shard.is_floating_point() and any(bool(part.isnan().any()) for part in chunks(shard))
    ]
    if all_names := sorted(set(from_all_ranks(names, str))):
        warnings.warn(
            f"the trained parameter {all_names[0]!r} (and {len(all_names) - 1} more) contains NaN, "
            "and so does the engine now. The sync itself is correct.",
            RuntimeWarning,
            stacklevel=2,
        )


def from_all_ranks(entries: list, expected: Any) -> list:
    """Return the entries of all ranks in rank order, without repetitions within a rank.

    expected: the type of an entry.
    """
    parts = all_gather_values(entries, list[expected])
    return [entry for part in parts for entry in dict.fromkeys(part)]


def _checksums(
    blocks: Iterable[torch.Tensor], writes: Sequence[_Write], device: torch.device
) -> torch.Tensor:
    """Return the checksum of each block in its engine's dtype, int64 [number of blocks]."""
    sums = [value_checksum(b, w.dtype) for b, w in zip(blocks, writes, strict=True)]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)


def value_checksum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a checksum (int64 scalar on the same device) of `values`, any strides, as `dtype`.

    It depends on the order of the elements, not on their strides. All NaNs count as one: their
    payload has no meaning, and casts do not keep it.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 0
    for part in chunks(values):
        part = part.to(dtype).contiguous()
        if part.is_floating_point():
            if part.itemsize == 1:
                part = part.half()  # exact; float8 has few operations
            part = part.masked_fill(part.isnan(), float("nan"))
        total += bit_checksum(part) * (2 * start + 1)
        start += part.numel()
    return total


def chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most 2^18 elements, in an order that depends on the shape alone."""
    if values.numel() <= _CHUNK:
        yield values
        return
    dim = next(d for d, size in enumerate(values.shape) if size > 1)
    for part in values.split(max(1, values.shape[dim] * _CHUNK // values.numel()), dim):
        yield from chunks(part)
