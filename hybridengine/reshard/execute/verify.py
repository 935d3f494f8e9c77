"""Verify a sync: compare checksums of the engine's tensors with those of the shards.

Each sender computes the checksums of its own slices, cast to the engine's dtype; each receiver
those of the same slices, read back from its engine tensors. Only checksums travel. Both sides use
plain PyTorch, so errors of the copy kernels are detected as well as errors of the transport.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.plan.source_class import SliceCopy
from hybridengine.runtime.all_ranks import all_gather_values
from hybridengine.sharding.checksums import chunks, value_checksum
from hybridengine.sharding.geometry import Block
from hybridengine.sharding.layout import EngineLayout

_Mismatch = tuple[int, str, str]  # receiving rank, engine tensor, trained parameter


def find_mismatches(
    plan: ReshardPlan,
    rank: int,
    read_shard: Callable[[str, SliceCopy, str, Block], torch.Tensor],
    read_engine: Callable[[str, Block], torch.Tensor],
) -> list[_Mismatch]:
    """Return all slices that differ, the same list on every rank; collective.

    read_shard: (parameter, slice, engine tensor, block) → that part of this rank's shard.
    read_engine: (engine tensor, block) → the part of the tensor that the block is written to.
    """
    mismatches: list[_Mismatch] = []
    for bucket in plan.buckets:
        dtype = bucket.engine_dtype
        arrivals = sorted(plan.arrivals(bucket, rank), key=lambda a: a[1].sender)
        received = list(slice_writes(plan, bucket, arrivals))
        kept = [a for a in arrivals if a[1].sender == rank]
        leaving = sorted([*plan.departures(bucket, rank), *kept], key=lambda d: d[1].receiver)
        sent = list(slice_writes(plan, bucket, leaving))
        device = read_engine(*received[0][2:]).device if received else torch.device("cpu")
        ours = slice_checksums(
            (read_shard(name, s, to, b) for name, s, to, b in sent), dtype, device
        )
        expected = torch.empty(len(received), dtype=torch.int64, device=device)
        dist.all_to_all_single(
            expected,
            ours,
            np.bincount([s.sender for _, s, _, _ in received], minlength=plan.world_size).tolist(),
            np.bincount([s.receiver for _, s, _, _ in sent], minlength=plan.world_size).tolist(),
        )
        actual = slice_checksums((read_engine(to, b) for _, _, to, b in received), dtype, device)
        for i in (expected != actual).nonzero().flatten().tolist():
            name, _, destination, _ = received[i]
            mismatches.append((rank, destination, name))
    return _from_all_ranks(mismatches, _Mismatch)


def slice_writes(
    plan: ReshardPlan, bucket: Bucket, slices: Iterable[tuple[str, SliceCopy]]
) -> Iterator[tuple[str, SliceCopy, str, Block]]:
    """Yield (parameter, slice, engine tensor, block) of each write of each slice."""
    for name, slice_copy in slices:
        names = plan.destinations(name, bucket.engine_dtype, slice_copy.receiver)
        for index, block in slice_copy.writes:
            yield name, slice_copy, names[index], block


def find_unstable(
    rank: int, layout: EngineLayout, tensors: Mapping[str, torch.Tensor], reload: Callable[[], None]
) -> list[_Mismatch]:
    """Return tensors of the engine's own loader that differ when loaded again; collective.

    reload: gathers the parameters again and passes them to the loader.
    """
    sources: dict[str, list[str]] = {name: [] for name in tensors}
    for source, reason in layout.fallback.items():
        sources.setdefault(reason.partition(": ")[0], []).append(source)
    before = {name: int(value_checksum(tensor, tensor.dtype)) for name, tensor in tensors.items()}
    reload()
    return _from_all_ranks(
        [
            (rank, name, ", ".join(sources[name]) or "the loader's input")
            for name, tensor in tensors.items()
            if int(value_checksum(tensor, tensor.dtype)) != before[name]
        ],
        _Mismatch,
    )


def warn_of_nan(shards: Mapping[str, torch.Tensor]) -> None:
    """Warn on every rank if a trained parameter contains NaN on any rank; collective."""
    names = [
        name
        for name, shard in shards.items()
        if shard.is_floating_point() and any(bool(part.isnan().any()) for part in chunks(shard))
    ]
    if all_names := sorted(set(_from_all_ranks(names, str))):
        warnings.warn(
            f"the trained parameter {all_names[0]!r} (and {len(all_names) - 1} more) contains NaN, "
            "and so does the engine now. The sync itself is correct.",
            RuntimeWarning,
            stacklevel=2,
        )


def _from_all_ranks(entries: list, expected: Any) -> list:
    """Return the entries of all ranks in rank order, without repetitions within a rank.

    expected: type of an entry.
    """
    parts = all_gather_values(entries, list[expected])
    return [entry for part in parts for entry in dict.fromkeys(part)]


def slice_checksums(
    slices: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the checksum of each slice as `dtype`, int64 [number of slices]."""
    sums = [value_checksum(s, dtype) for s in slices]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)
