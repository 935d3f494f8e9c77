"""Which rank sends what another one needs: itself, a rank of the same node, or any holder in turn.

A shard with several holders (HSDP, replication) is sent by one in the receiver's node where there
is one, so that nothing crosses nodes that need not; equals take turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

__all__ = ["Ranks", "Route", "ranks_per_node"]

_CHUNK = 1 << 22  # (shard, rank) pairs looked at together


def ranks_per_node(world_size: int) -> int:
    """As torchrun and its like tell every rank (LOCAL_WORLD_SIZE), else all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


class Ranks:
    """The engine layout and the node of every rank.

    layout_of, node_of: int64 [N], numbered from 0.
    """

    def __init__(self, layout_of: Sequence[int], node_of: Sequence[int]) -> None:
        self.layout_of = np.array(layout_of)
        self.node_of = np.unique(np.array(node_of), return_inverse=True)[1]
        self.size = len(self.layout_of)
        self.num_layouts = int(self.layout_of.max()) + 1
        self.num_nodes = int(self.node_of.max()) + 1
        self.all = np.arange(self.size)
        # Ranks by node and layout; by layout, and in it neighbours from different nodes.
        self.by_node = np.lexsort((self.all, self.layout_of, self.node_of))
        group = (self.node_of * self.num_layouts + self.layout_of)[self.by_node]
        within = np.empty(self.size, np.int64)
        within[self.by_node] = self.all - np.searchsorted(group, group)
        self.by_layout = np.lexsort((self.node_of, within, self.layout_of))
        self.of_layout = [
            self.by_layout[self.layout_of[self.by_layout] == layout]
            for layout in range(self.num_layouts)
        ]
        for members in self.of_layout:
            within[members] = np.arange(len(members))
        self.in_turn = np.lexsort((self.layout_of, within))  # one of each layout, and again


class Route:
    """Who sends each shard to each rank, for all tensors that lie on the same holders.

    own: the shard each rank holds, -1 for none, int64 [N]. sender: int32 [S, N]; a holder is its
    own sender. near: whether a shard has a holder in a node, bool [S, nodes]. served: int64
    [2, N, layouts], how many ranks of a layout a rank sends its shard to, inside its node and
    outside.
    """

    def __init__(self, holders: Sequence[Sequence[int]], ranks: Ranks) -> None:
        self.ranks, self.holders = ranks, np.array(holders)
        shards = np.arange(len(self.holders))
        self.own = np.full(ranks.size, -1)
        self.own[self.holders] = shards[:, None]
        self.near = np.zeros((len(shards), ranks.num_nodes), bool)
        self.near[shards[:, None], ranks.node_of[self.holders]] = True
        self.sender = self._senders()
        self.served = np.zeros((2, ranks.size, ranks.num_layouts), np.int64)
        rows = max(1, _CHUNK // ranks.size)
        for first in range(0, len(shards), rows):
            sender = self.sender[first : first + rows]
            moves = self.own != shards[first : first + rows, None]
            far = ranks.node_of[sender] != ranks.node_of
            place = (far * ranks.size + sender) * ranks.num_layouts + ranks.layout_of
            self.served += np.bincount(place[moves], minlength=self.served.size).reshape(
                self.served.shape
            )

    def _senders(self) -> np.ndarray:
        shape = (len(self.holders), self.ranks.size)
        if self.holders.shape[1] == 1:
            return np.broadcast_to(self.holders.astype(np.int32), shape)
        sender = np.empty(shape, np.int32)
        for shard, holders in enumerate(self.holders):
            sender[shard] = self._senders_of(shard, holders)
        return sender

    def _senders_of(self, shard: int, holders: np.ndarray) -> np.ndarray:
        """The sender of one shard to every rank, int64 [N]; shards begin with different holders."""
        ranks = self.ranks
        holders = holders[np.argsort(ranks.node_of[holders], kind="stable")]
        per_node = np.bincount(ranks.node_of[holders], minlength=ranks.num_nodes)
        first = np.cumsum(per_node) - per_node
        others = self.own != shard
        sender = np.where(others, -1, ranks.all)
        near = ranks.by_node[(others & (per_node[ranks.node_of] > 0))[ranks.by_node]]
        node = ranks.node_of[near]
        turn = np.arange(len(near)) - np.searchsorted(node, node) + shard
        sender[near] = holders[first[node] + turn % per_node[node]]
        far = ranks.by_layout[(sender < 0)[ranks.by_layout]]
        sender[far] = holders[(np.arange(len(far)) + shard) % len(holders)]
        return sender
