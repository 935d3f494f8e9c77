"""Deltas of this rank: from changes of shards to messages, and from messages into the engine.

A delta follows the same tables of strided copies as a dense sync (`execute.exchange`), one change
at a time. Several buckets travel together, since their changes are small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybridengine.kernels.delta import ChangeTable
from hybridengine.reshard.delta.find import Part
from hybridengine.reshard.delta.message import CorruptDeltaError, Header, decode, encode
from hybridengine.reshard.execute.exchange import ExchangeBuilder
from hybridengine.reshard.execute.trained import TrainedTensors
from hybridengine.reshard.plan.buckets import Bucket
from hybridengine.reshard.plan.planner import ReshardPlan
from hybridengine.runtime.all_ranks import host_device
from hybridengine.runtime.device import DeviceProgress
from hybridengine.runtime.failures import CollectiveGuard
from hybridengine.sharding.changes import ChangedElements
from hybridengine.sharding.geometry import contiguous_strides

_BUCKETS_PER_GROUP = 4

Changes = Mapping[Part, ChangedElements]


class _Group(NamedTuple):
    """Buckets whose deltas travel together, as one bucket. Fields as of `Exchange`.

    parts: what pack and local read. starts: where the elements of each rank begin in the order of
    sending and of receiving, and their ends: world_size + 1 entries each.
    """

    bucket: Bucket
    parts: list[Part]
    destinations: list[str]
    pack: ChangeTable
    local: ChangeTable
    unpack: ChangeTable
    send_starts: list[int]
    receive_starts: list[int]


class DeltaPipeline:
    """Sends and applies the deltas of `buckets`; the other arguments as of `BucketPipeline`."""

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        trained: TrainedTensors,
        device: torch.device,
        guard: CollectiveGuard,
        progress: DeviceProgress,
        buckets: Sequence[Bucket],
    ) -> None:
        self._device, self._guard, self._progress = device, guard, progress
        strides = {n: contiguous_strides(p.local_shape) for n, p in trained.placements.items()}
        builder = ExchangeBuilder(plan, rank, strides, device)
        self._groups = [_build_group(builder, device, b) for b in _grouped(buckets)]

    def run(
        self, changes: Changes, weights: Mapping[str, torch.Tensor], base_version: int, version: int
    ) -> tuple[int, int]:
        """Bring `weights` from base_version to version. Return (bytes received, bytes sent).

        changes: of this rank's shards. A message that is damaged, or made from another version, is
        not applied; `problem` then says why, else it is None. Collective.
        """
        self._bytes_received = self._bytes_sent = 0
        self.problem: str | None = None
        previous: Iterator[None] = iter(())
        for i, group in enumerate(self._groups, 1):
            where = f"delta {i} of {len(self._groups)}"
            transfer = self._transfer(group, where, changes, weights, (base_version, version))
            next(transfer)  # start it
            next(previous, None)  # finish the group before
            previous = transfer
        next(previous, None)
        return self._bytes_received, self._bytes_sent

    def _transfer(
        self,
        group: _Group,
        where: str,
        changes: Changes,
        weights: Mapping[str, torch.Tensor],
        versions: tuple[int, int],
    ) -> Iterator[None]:
        """Start the exchange of a group, yield, then wait for it and apply what has arrived."""
        self._guard.phase = f"packing {where}"
        found = [changes[part] for part in group.parts]
        lists = [c.indices for c in found], [c.values for c in found]
        sent, messages = self._encode(group, lists, versions)
        received = self._exchange_headers(sent, where)
        outgoing = torch.cat(messages)
        sizes = [header.num_bytes for header in received]
        incoming = outgoing.new_empty(sum(sizes))
        with self._guard.collective(f"exchanging {where}"):
            out_sizes = [len(message) for message in messages]
            work = dist.all_to_all_single(incoming, outgoing, sizes, out_sizes, async_op=True)
        header_bytes = 8 * len(Header._fields) * (len(sizes) - 1)
        self._bytes_received += incoming.nbytes + header_bytes
        self._bytes_sent += outgoing.nbytes + header_bytes
        self._guard.phase = f"applying the local part of {where}"
        destinations = [weights[name] for name in group.destinations]
        group.local.scatter(*lists, destinations)
        yield
        with self._guard.collective(f"exchanging {where}"):
            work.wait()
        self._progress.mark(f"exchanging {where}")
        self._guard.phase = f"applying {where}"
        arrived = self._decode(group, received, incoming.split(sizes), versions)
        if arrived is not None:
            group.unpack.scatter(*([tensor] for tensor in arrived), destinations)

    def _encode(
        self,
        group: _Group,
        lists: tuple[list[torch.Tensor], list[torch.Tensor]],
        versions: tuple[int, int],
    ) -> tuple[list[Header], list[torch.Tensor]]:
        """Return header and message for each rank."""
        positions, values = group.pack.map(*lists)
        edges = torch.tensor(group.send_starts, device=positions.device)
        cuts = torch.searchsorted(positions, edges).tolist()
        pairs = [
            encode(positions[low:high], values[low:high], start, *versions)
            for (low, high), start in zip(itertools.pairwise(cuts), group.send_starts, strict=False)
        ]
        return [header for header, _ in pairs], [message for _, message in pairs]

    def _exchange_headers(self, headers: Sequence[Header], where: str) -> list[Header]:
        sent = torch.tensor(headers, dtype=torch.int64, device=host_device())
        received = torch.empty_like(sent)
        with self._guard.collective(f"exchanging the sizes of {where}"):
            dist.all_to_all_single(received, sent)
            return [Header(*row) for row in received.tolist()]

    def _decode(
        self,
        group: _Group,
        headers: Sequence[Header],
        messages: Sequence[torch.Tensor],
        versions: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (positions, values) of all changes received; None, and a problem, on an error."""
        parts = []
        for sender, (header, message) in enumerate(zip(headers, messages, strict=True)):
            start, end = group.receive_starts[sender : sender + 2]
            try:
                if (header.base_version, header.version) != versions:
                    raise CorruptDeltaError(
                        f"it leads from version {header.base_version} to {header.version}, "
                        f"expected {versions[0]} to {versions[1]}"
                    )
                parts.append(decode(header, message, group.bucket.engine_dtype, start, end))
            except CorruptDeltaError as error:
                self.problem = f"the delta from rank {sender} was not applied: {error}"
                return None
        positions, values = (torch.cat(column) for column in zip(*parts, strict=True))
        return positions, values


def _grouped(buckets: Sequence[Bucket]) -> Iterator[Bucket]:
    """Yield buckets with the chunks of up to `_BUCKETS_PER_GROUP` buckets of equal treatment."""

    def treatment(bucket: Bucket) -> tuple:
        return str(bucket.source_dtype), str(bucket.engine_dtype), bucket.frozen, bucket.merged

    for _, alike in itertools.groupby(sorted(buckets, key=treatment), key=treatment):
        members = list(alike)
        for first in range(0, len(members), _BUCKETS_PER_GROUP):
            group = members[first : first + _BUCKETS_PER_GROUP]
            yield replace(group[0], chunks=[pair for bucket in group for pair in bucket.chunks])


def _build_group(builder: ExchangeBuilder, device: torch.device, bucket: Bucket) -> _Group:
    rows = builder.rows(bucket)
    tables = (rows.pack, rows.local, rows.unpack)
    pack, local, unpack = (ChangeTable(torch.from_numpy(t), device) for t in tables)
    return _Group(
        bucket,
        [Part(n, bucket.engine_dtype, b if bucket.merged else None) for n, b in rows.sources],
        rows.destinations,
        pack,
        local,
        unpack,
        [0, *itertools.accumulate(rows.send_counts)],
        [0, *itertools.accumulate(rows.receive_counts)],
    )
