"""Deltas between trainers and engines: what changed crosses once, and replicas share it.

As the buckets of `transfer`, but their sizes are not known from the plan: the trainers tell each
other how much each of them sends, and the engines by headers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.reshard.delta.find import Found
from hybridengine.reshard.delta.group import DeltaGroups, delta_builder, group_size
from hybridengine.reshard.delta.message import HEADER_BYTES, CorruptDeltaError, Header, Versions
from hybridengine.reshard.disaggregated.link import Link, LinkError, divide
from hybridengine.reshard.disaggregated.transfer import Arrival, SendPipeline
from hybridengine.reshard.execute.context import RankContext
from hybridengine.reshard.execute.exchange import ExchangeBuilder
from hybridengine.runtime.all_ranks import host_device
from hybridengine.runtime.device import DeviceProgress


class Delta(NamedTuple):
    """What changed on this trainer between two versions.

    generation: of the parameters that engines of the first one have (`Generations.trained`).
    """

    versions: Versions
    generation: int
    found: Found


class DeltaSender:
    """Sends what changed in the shards of a trainer rank, over the connections of `pipeline`."""

    def __init__(self, context: RankContext, pipeline: SendPipeline) -> None:
        self._rank, self._device, self._guard = context.rank, context.device, context.guard
        self._pipeline, self._num_trainers = pipeline, dist.get_world_size()
        self._groups = DeltaGroups(delta_builder(context))

    def send(self, delta: Delta) -> int:
        """Send a delta to all members. Return the bytes sent. Collective over the trainers.

        A connection that fails is the pipeline's `failure`, as in its `run`.
        """
        sent = 0
        groups = self._groups.of_size(group_size(delta.found.share))
        for i, group in enumerate(groups, 1):
            where = f"delta {i} of {len(groups)}"
            self._guard.phase = f"packing {where}"
            headers, outgoing = group.encode(delta.found.changes, delta.versions)
            headers = headers[self._num_trainers :]  # of the tensor-parallel ranks
            sizes = self._gather_sizes(headers, where)
            if not self._pipeline.failure:
                try:
                    sent += self._send(headers, outgoing, sizes, where)
                except LinkError as error:
                    self._pipeline.failure = error
        return sent

    def _gather_sizes(self, headers: Sequence[Header], where: str) -> np.ndarray:
        """Return the bytes from each trainer to each tensor-parallel rank, int64 [N, T]."""
        own = torch.tensor([header.num_bytes for header in headers], device=host_device())
        sizes = own.new_empty(self._num_trainers * len(headers))
        with self._guard.collective(f"exchanging the sizes of {where}"):
            dist.all_gather_into_tensor(sizes, own)
            return sizes.cpu().numpy().reshape(self._num_trainers, -1)

    def _send(
        self, headers: Sequence[Header], outgoing: torch.Tensor, sizes: np.ndarray, where: str
    ) -> int:
        """Send headers, then messages in a row. Return the bytes sent."""
        link = self._pipeline.link
        rows: list[Header] = []
        counts: list[int] = []
        for header, sent, members in zip(headers, sizes.T, link.members_by_tp_rank, strict=True):
            rows += [header] * len(members)
            counts += divide(sent, len(members)).counts[self._rank].tolist()
        told = torch.tensor(rows, dtype=torch.int64, device=self._device).view(-1)
        with link.collective(f"sending the sizes of {where}"):
            work = link.send(told, [HEADER_BYTES] * len(rows))
        self._pipeline.finish(f"sending the sizes of {where}", work)
        with link.collective(f"sending {where}"):
            work = link.send(outgoing, counts)
        self._pipeline.finish(f"sending {where}", work)
        return told.nbytes + outgoing.nbytes


class DeltaReceiver:
    """Receives the deltas of one tensor-parallel rank; the arguments as of `ReceivePipeline`."""

    def __init__(self, builder: ExchangeBuilder, num_trainers: int) -> None:
        self._num_trainers, self._device = num_trainers, builder.device
        self._groups = DeltaGroups(builder)

    def receive(
        self,
        link: Link,
        progress: DeviceProgress,
        weights: Mapping[str, torch.Tensor],
        versions: Versions,
        size: int,
    ) -> tuple[int, int]:
        """Write a delta into `weights`. Return (bytes received, bytes sent to replicas).

        size: of the groups (`group_size`). Raises CorruptDeltaError, once everything has arrived,
        if a message was damaged or made from another version, and was not applied.
        """
        received = sent = 0
        problem: CorruptDeltaError | None = None
        groups = self._groups.of_size(size)
        for i, group in enumerate(groups, 1):
            where = f"delta {i} of {len(groups)}"
            headers = self._receive_headers(link, progress, where)
            sizes = np.array([header.num_bytes for header in headers])
            arrival = Arrival(link, sizes, self._buffer, where)
            incoming = arrival.finish(progress)
            received += arrival.received + HEADER_BYTES * len(headers)
            sent += arrival.sent
            link.phase = f"applying {where}"
            try:
                group.write(headers, incoming, versions, weights)
            except CorruptDeltaError as error:
                problem = error
        if problem:
            raise problem
        return received, sent

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _receive_headers(self, link: Link, progress: DeviceProgress, where: str) -> list[Header]:
        phase = f"receiving the sizes of {where}"
        rows = self._buffer(HEADER_BYTES * self._num_trainers)
        with link.collective(phase):
            link.receive(rows, [HEADER_BYTES] * self._num_trainers).wait()
        progress.mark(phase)
        progress.wait()
        numbers = rows.view(torch.int64).view(self._num_trainers, -1)
        return [Header(*row) for row in numbers.tolist()]
