"""Checksums of what the engine holds against what the shards hold, after a sync.

NaNs are equal to each other: their bits say nothing, and casts do not keep them.

Each sender sums its own slices, cast to the engine's dtype; each receiver sums the same slices read
back from its engine tensors; only the sums travel. Plain PyTorch on both sides, so a fault of the
copy kernels shows as well as one of the wire.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.reshard.plan.planner import Piece, ReshardPlan
from hybridengine.sharding.layout import EngineLayout

__all__ = ["find_mismatches", "find_unstable", "warn_of_nan"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18  # elements summed at a time: a checksum takes a few MiB
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: elements that change places change the sum


def find_mismatches(
    plan: ReshardPlan,
    rank: int,
    slice_of_shard: Callable[[Piece], torch.Tensor],
    slice_of_engine: Callable[[Piece], torch.Tensor],
) -> list[tuple[int, str, str]]:
    """(receiving rank, engine tensor, checkpoint name) of every slice that differs; collective.

    slice_of_shard, slice_of_engine: this rank's view of a piece, in its own memory. Every rank gets
    the same list.
    """
    found: list[tuple[int, str, str]] = []
    for bucket in plan.buckets:
        arrivals = sorted(plan.arrivals(bucket, rank), key=lambda p: p.sender)
        own = [p for p in arrivals if p.sender == rank]
        leaving = [*plan.departures(bucket, rank), *own]
        leaving.sort(key=lambda p: p.receiver)
        device = slice_of_engine(arrivals[0]).device if arrivals else torch.device("cpu")
        sent = _checksums(map(slice_of_shard, leaving), bucket.engine_dtype, device)
        expected = torch.empty(len(arrivals), dtype=torch.int64, device=device)
        dist.all_to_all_single(
            expected,
            sent,
            np.bincount([p.sender for p in arrivals], minlength=plan.world_size).tolist(),
            np.bincount([p.receiver for p in leaving], minlength=plan.world_size).tolist(),
        )
        there = _checksums(map(slice_of_engine, arrivals), bucket.engine_dtype, device)
        for i in (expected != there).nonzero().flatten().tolist():
            found.append((rank, arrivals[i].destination, arrivals[i].source))
    return _everywhere(found)


def find_unstable(
    rank: int,
    layout: EngineLayout,
    tensors: Mapping[str, torch.Tensor],
    reload: Callable[[], None],
) -> list[tuple[int, str, str]]:
    """As `find_mismatches`, for engine tensors that the engine's own loader makes; collective.

    reload: gathers the parameters again and gives them to the loader, which must make the very
    same tensors of them.
    """
    sources: dict[str, list[str]] = {name: [] for name in tensors}
    for source, reason in layout.fallback.items():
        sources.setdefault(reason.partition(": ")[0], []).append(source)
    before = {name: _checksum(tensor, tensor.dtype) for name, tensor in tensors.items()}
    reload()
    return _everywhere(
        [
            (rank, name, ", ".join(sources[name]) or "the loader's input")
            for name, tensor in tensors.items()
            if _checksum(tensor, tensor.dtype) != before[name]
        ]
    )


def warn_of_nan(shards: Mapping[str, torch.Tensor]) -> None:
    """Say on every rank which trained parameters hold NaN on any rank; collective."""
    names = [
        name
        for name, shard in shards.items()
        if shard.is_floating_point() and any(bool(part.isnan().any()) for part in _chunks(shard))
    ]
    if found := sorted(set(_everywhere(names))):
        warnings.warn(
            f"the trained parameter {found[0]!r} (and {len(found) - 1} more) contains NaN, and so "
            "does the engine now: the sync is correct, the weights are not",
            RuntimeWarning,
            stacklevel=2,
        )


def _everywhere(found: list) -> list:
    """What all ranks found, in their order; equal entries of a rank once."""
    parts: list[list] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, found)
    return [entry for part in parts for entry in dict.fromkeys(part)]


def _checksums(
    slices: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """int64, wrapping: per slice, cast to dtype, the sum of its bits times odd place numbers."""
    sums = [_checksum(s, dtype) for s in slices]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)


def _checksum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 0
    for part in _chunks(values):
        bits = _bits(part.to(dtype).contiguous().view(-1))
        place = torch.arange(start, start + bits.numel(), device=values.device)
        total += bits.mul_(place.mul_(_MIX).mul_(2).add_(1)).sum()
        start += bits.numel()
    return total


def _bits(values: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the bits of each element, those of one NaN for all NaNs."""
    if values.is_floating_point():
        values = values.masked_fill(values.isnan(), float("nan"))
    return values.view(_BITS[values.itemsize]).to(torch.int64)


def _chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of at most _CHUNK elements, in an order that depends on the shape alone."""
    if values.numel() <= _CHUNK:
        yield values
        return
    dim = next(d for d, size in enumerate(values.shape) if size > 1)
    for part in values.split(max(1, values.shape[dim] * _CHUNK // values.numel()), dim):
        yield from _chunks(part)
