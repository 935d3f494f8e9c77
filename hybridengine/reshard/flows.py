"""How many elements each rank sends and receives, counted over all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.reshard.geometry import Block, count_below
from hybridengine.reshard.shards import ShardSpec

__all__ = ["Blocks", "Flow", "Flows"]

Blocks = list[tuple[Block, ...]]  # per engine layout, what it needs of one source in one dtype


@dataclass(frozen=True)
class Flow:
    """Elements per rank for one source (or part): received, sent, needed, the lower bound."""

    received: np.ndarray
    sent: np.ndarray
    needed: np.ndarray
    lower_bound: np.ndarray


class Flows:
    """Counts elements that move, vectorised over ranks, once per structurally equal source."""

    def __init__(self, layout_of: Sequence[int]) -> None:
        self._layout_of = np.array(layout_of)
        self._cache: dict[tuple, Flow] = {}
        self._matrices: dict[tuple, np.ndarray] = {}

    def count(self, spec: ShardSpec, blocks: Blocks, part: int, parts: int) -> Flow:
        key = (spec, tuple(tuple(b.region for b in group) for group in blocks), part, parts)
        if key not in self._cache:
            self._cache[key] = self._count(spec, blocks, part, parts)
        return self._cache[key]

    def traffic(self, spec: ShardSpec, blocks: Blocks) -> np.ndarray:
        """Elements from sender to receiver, int64 [N, N]."""
        key = (spec, tuple(tuple(b.region for b in group) for group in blocks))
        if key not in self._matrices:
            holders, ranks = np.array(spec.holders), np.arange(len(self._layout_of))
            elements = np.array([_elements_by_shard(group, spec, 0, 1) for group in blocks])
            moved = elements[self._layout_of].T  # [S, N]
            shards = np.arange(len(holders))[:, None]
            senders = holders[shards, ranks % holders.shape[1]]
            matrix = np.zeros((len(ranks), len(ranks)), np.int64)
            np.add.at(matrix, (senders, np.broadcast_to(ranks, senders.shape)), moved)
            own = _own_shards(spec, len(ranks))
            kept = own >= 0  # what a rank holds it takes from itself, whoever's turn it is
            np.subtract.at(
                matrix,
                (senders[own[kept], ranks[kept]], ranks[kept]),
                moved[own[kept], ranks[kept]],
            )
            self._matrices[key] = matrix
        return self._matrices[key]

    def split(
        self, spec: ShardSpec, blocks: Blocks, itemsize: int, limit: int
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """(part, parts, staged bytes per rank) with no rank above `limit`, if it divides."""
        longest = max(high - low for low, high in map(spec.interval, range(len(spec.holders))))
        parts = 1
        while True:
            staged = [self._staged(spec, blocks, itemsize, part, parts) for part in range(parts)]
            worst = max(int(s.max()) for s in staged)
            if worst <= limit or parts >= longest:
                break
            parts = min(longest, max(parts + 1, -(-worst * parts // limit)))
        for part, num_bytes in enumerate(staged):
            yield part, parts, num_bytes

    def _staged(
        self, spec: ShardSpec, blocks: Blocks, itemsize: int, part: int, parts: int
    ) -> np.ndarray:
        flow = self.count(spec, blocks, part, parts)
        staged = (flow.received + flow.sent) * itemsize
        if spec.merged:
            own = _own_shards(spec, len(self._layout_of))
            formed = [high - low for low, high in (spec.part(s, part, parts) for s in own)]
            row_bytes = math.prod(spec.shape) // spec.shape[spec.dim] * spec.dtype.itemsize
            staged = staged + np.where(own >= 0, formed, 0) * row_bytes
        return staged

    def _count(self, spec: ShardSpec, blocks: Blocks, part: int, parts: int) -> Flow:
        holders = np.array(spec.holders)  # [S, R]
        by_shard = np.array(  # [layouts, S]: elements of each shard that a layout needs
            [_elements_by_shard(group, spec, part, parts) for group in blocks]
        )
        distinct = [tuple({b.region: b for b in group}.values()) for group in blocks]
        once = np.array([_elements_by_shard(group, spec, part, parts) for group in distinct])
        ranks, replicas = np.arange(len(self._layout_of)), holders.shape[1]
        own = _own_shards(spec, len(ranks))
        needed = by_shard[self._layout_of].sum(1)
        held = np.where(own >= 0, by_shard[self._layout_of, own], 0)
        held_once = np.where(own >= 0, once[self._layout_of, own], 0)
        sent = np.zeros(len(ranks), np.int64)
        for turn in range(replicas):  # receivers r with r % replicas == turn ask this replica
            asking = np.bincount(self._layout_of[turn::replicas], minlength=len(blocks))
            served = asking @ by_shard  # [S]
            np.add.at(sent, holders[:, turn], served)
        # A holder serves itself: take that out of the replica whose turn it would have been.
        keeps = own >= 0
        np.subtract.at(sent, holders[own[keeps], ranks[keeps] % replicas], held[keeps])
        return Flow(needed - held, sent, needed, once[self._layout_of].sum(1) - held_once)


def _own_shards(spec: ShardSpec, world_size: int) -> np.ndarray:
    """The shard each rank holds, -1 for none: int64 [N]."""
    own = np.full(world_size, -1)
    own[np.array(spec.holders)] = np.arange(len(spec.holders))[:, None]
    return own


def _elements_by_shard(
    blocks: Sequence[Block], spec: ShardSpec, part: int, parts: int
) -> np.ndarray:
    """How many elements of `blocks` lie in each shard's part: int64 [S]."""
    if not spec.shape:
        return np.array([sum(b.numel for b in blocks) if part == 0 else 0])
    edges = np.array([spec.part(shard, part, parts) for shard in range(len(spec.holders))])
    total = np.zeros(len(edges), np.int64)
    for block in blocks:
        total += count_below(block, spec.dim, edges[:, 1]) - count_below(
            block, spec.dim, edges[:, 0]
        )
    return total
