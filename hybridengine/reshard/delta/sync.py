"""Delta syncs between ranks that train and hold the engine.

A delta needs an unbroken chain: the engine holds the bits that the last sync of this resharder left
there (`execute.target.EngineState`). A new engine, a restart, a failed sync, discarded weights or a
write by anything else break the chain; a dense sync begins a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from hybridengine.reshard.delta.find import ChangeFinder, DeltaMode, Found, ReadChanges
from hybridengine.reshard.delta.group import DeltaGroup, DeltaGroups, delta_builder, group_size
from hybridengine.reshard.delta.message import HEADER_BYTES, CorruptDeltaError, Header, Versions
from hybridengine.reshard.execute.context import RankContext
from hybridengine.reshard.execute.pipelining import run_pipelined
from hybridengine.runtime.all_ranks import host_device


class DeltaSync:
    """Delta syncs of one resharder. finder: what changed."""

    def __init__(
        self, context: RankContext, mode: DeltaMode, read_changes: ReadChanges | None
    ) -> None:
        self._guard, self._progress = context.guard, context.progress
        self.finder = ChangeFinder(context, mode, read_changes)
        self._groups = DeltaGroups(delta_builder(context))

    def apply(
        self, found: Found, weights: Mapping[str, torch.Tensor], versions: Versions
    ) -> tuple[int, int]:
        """Write what changed into `weights`. Return (bytes received, bytes sent). Collective.

        Raises CorruptDeltaError, once everything has travelled, on a rank where a message was
        damaged or made from another version, and was not applied.
        """
        self._moved = [found.num_bytes, 0]
        self._problem: CorruptDeltaError | None = None
        groups = self._groups.of_size(group_size(found.share))
        run_pipelined(
            self._transfer(group, f"delta {i} of {len(groups)}", found, weights, versions)
            for i, group in enumerate(groups, 1)
        )
        if self._problem:
            raise self._problem
        return self._moved[0], self._moved[1]

    def _transfer(
        self,
        group: DeltaGroup,
        where: str,
        found: Found,
        weights: Mapping[str, torch.Tensor],
        versions: Versions,
    ) -> Iterator[None]:
        """Start the exchange of a group, yield, then wait for it and apply what has arrived."""
        self._guard.phase = f"packing {where}"
        leaving, outgoing = group.encode(found.changes, versions)
        arriving = self._exchange_headers(leaving, where)
        in_sizes, out_sizes = ([h.num_bytes for h in headers] for headers in (arriving, leaving))
        incoming = outgoing.new_empty(sum(in_sizes))
        with self._guard.collective(f"exchanging {where}"):
            work = dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, async_op=True)
        header_bytes = HEADER_BYTES * (len(leaving) - 1)
        self._moved[0] += incoming.nbytes + header_bytes
        self._moved[1] += outgoing.nbytes + header_bytes
        self._guard.phase = f"applying the local part of {where}"
        group.write_local(found.changes, weights)
        yield
        with self._guard.collective(f"exchanging {where}"):
            work.wait()
        self._progress.mark(f"exchanging {where}")
        self._guard.phase = f"applying {where}"
        try:
            group.write(arriving, incoming, versions, weights)
        except CorruptDeltaError as error:
            self._problem = error

    def _exchange_headers(self, headers: Sequence[Header], where: str) -> list[Header]:
        sent = torch.tensor(headers, dtype=torch.int64, device=host_device())
        received = torch.empty_like(sent)
        with self._guard.collective(f"exchanging the sizes of {where}"):
            dist.all_to_all_single(received, sent)
            return [Header(*row) for row in received.tolist()]
