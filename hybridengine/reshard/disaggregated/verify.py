"""Checksums of all slices: of the trainers' shards, against what the engines hold.

As `execute.verify`, but every member of a tensor-parallel rank is sent the trainers' checksums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hybridengine.reshard.disaggregated.link import Link
from hybridengine.reshard.execute.verify import slice_checksums, slice_writes
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.reshard.plan.source_class import SliceCopy
from hybridengine.sharding.geometry import Block


def send_checksums(
    plan: ReshardPlan, link: Link, read_shard: Callable[[str, SliceCopy, str, Block], torch.Tensor]
) -> None:
    """Send the checksums of all slices of this trainer rank; `read_shard` as `execute.verify`."""
    sums: dict[int, list[torch.Tensor]] = {tp_rank: [] for tp_rank in link.replicas}
    for bucket in plan.buckets:
        for tp_rank, parts in sums.items():
            receiver = link.num_trainers + tp_rank
            leaving = (d for d in plan.departures(bucket, link.rank) if d[1].receiver == receiver)
            writes = slice_writes(plan, bucket, leaving)
            blocks = (read_shard(*write) for write in writes)
            parts.append(slice_checksums(blocks, bucket.engine_dtype, link.device))
    outgoing = [torch.cat(parts) for parts in sums.values()]
    of_members = [o for o, m in zip(outgoing, link.replicas.values(), strict=True) for _ in m]
    with link.collective("sending checksums"):
        link.send(torch.cat(of_members), [o.nbytes for o in of_members]).wait()


def find_mismatches(
    plan: ReshardPlan, link: Link, tp_rank: int, read_engine: Callable[[str, Block], torch.Tensor]
) -> list[tuple[str, str]]:
    """Return (engine tensor, trained parameter) of each slice that differs on this engine rank.

    read_engine: (engine tensor, block) → the part of the tensor that the block is written to.
    """
    entries: list[tuple[int, str, str]] = []  # sender, engine tensor, parameter
    sums: list[torch.Tensor] = []
    for bucket in plan.buckets:
        arrivals = plan.arrivals(bucket, link.num_trainers + tp_rank)
        writes = list(slice_writes(plan, bucket, arrivals))
        entries += [(s.sender, to, name) for name, s, to, _ in writes]
        blocks = (read_engine(to, block) for _, _, to, block in writes)
        sums.append(slice_checksums(blocks, bucket.engine_dtype, link.device))
    senders = np.array([sender for sender, _, _ in entries], np.int64)
    order = np.argsort(senders, kind="stable")
    expected = torch.empty(len(entries), dtype=torch.int64, device=link.device)
    counts = np.bincount(senders, minlength=link.num_trainers) * expected.itemsize
    with link.collective("receiving checksums"):
        link.receive(expected, counts.tolist()).wait()
    actual = torch.cat(sums)[torch.from_numpy(order).to(link.device)]
    differ = (expected != actual).nonzero().flatten().tolist()
    return [entries[order[i]][1:] for i in differ]
