"""Delta syncs between ranks that train and hold the engine.

A delta needs an unbroken chain: the engine holds the version that the last sync of this resharder
committed, and nothing else has begun to write to it since. A new engine, a restart, a failed sync
or discarded weights break the chain; a dense sync begins a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridengine.reshard.delta.find import ChangeFinder, DeltaMode, Found, ReadChanges
from hybridengine.reshard.delta.group import DeltaGroup, DeltaGroups, delta_builder, group_size
from hybridengine.reshard.delta.message import HEADER_BYTES, CorruptDeltaError, Header, Versions
from hybridengine.reshard.execute.context import RankContext
from hybridengine.reshard.execute.pipelining import run_pipelined
from hybridengine.runtime.all_ranks import host_device

if TYPE_CHECKING:
    from hybridengine.sharding.weight_target import WeightTarget


class DeltaSync:
    """Delta syncs of one resharder. finder: what changed."""

    def __init__(
        self,
        context: RankContext,
        engine: WeightTarget,
        mode: DeltaMode,
        read_changes: ReadChanges | None,
    ) -> None:
        self._guard, self._progress = context.guard, context.progress
        self.finder = ChangeFinder(context, mode, read_changes)
        self._engine = engine
        self._groups = DeltaGroups(delta_builder(context))
        self._base: tuple[int, int] | None = None  # weight version, number of the update

    @property
    def chain_is_broken(self) -> bool:
        """Whether this rank's engine may differ from what was sent last."""
        engine = self._engine
        state = (engine.weight_version, engine.updates_begun)
        return self._base is None or engine.discarded or self._base != state

    def find(self, chain_is_intact: bool) -> Found | None:
        """Return what changed, None for a dense sync. Collective, the same choice on all ranks.

        chain_is_intact: on all ranks, the same on all of them.
        """
        base, self._base = self._base, None  # until the sync has finished
        self._base_version = base[0] if base else -1
        return self.finder.find(chain_is_intact)

    def apply(
        self, found: Found, weights: Mapping[str, torch.Tensor], version: int
    ) -> tuple[int, int]:
        """Write what changed into `weights`. Return (bytes received, bytes sent). Collective.

        Raises CorruptDeltaError, once everything has travelled, on a rank where a message was
        damaged or made from another version, and was not applied.
        """
        self._moved = [found.num_bytes, 0]
        self._problem: CorruptDeltaError | None = None
        versions = Versions(self._base_version, version)
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

    def commit(self, version: int) -> None:
        """All ranks' engines hold `version`: the next sync can be a delta."""
        self._base = (version, self._engine.updates_begun)
