"""Which rank sends each shard to each rank.

A rank that holds a shard does not receive it. Any other rank receives it from a holder in its own
node, if there is one, else from any holder. Equally good holders are used in rotation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

import numpy as np

_PAIRS_AT_ONCE = 1 << 22  # (shard, rank) pairs, bounds memory


def ranks_per_node(world_size: int) -> int:
    """Return LOCAL_WORLD_SIZE, which torchrun sets on every rank, else `world_size`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


class Topology:
    """The engine layout and the node of every rank.

    layout_of, node_of: int64 [N], numbered from 0.
    ranks_of_layout: per layout its ranks, such that successive ranks are in different nodes.
    """

    def __init__(self, layout_of: Sequence[int], node_of: Sequence[int]) -> None:
        self.layout_of = np.array(layout_of)
        self.node_of = np.unique(np.array(node_of), return_inverse=True)[1]
        self.size = len(self.layout_of)
        self.num_layouts = int(self.layout_of.max()) + 1
        self.num_nodes = int(self.node_of.max()) + 1
        self.ranks = np.arange(self.size)
        self.by_node = np.lexsort((self.ranks, self.layout_of, self.node_of))
        group = (self.node_of * self.num_layouts + self.layout_of)[self.by_node]
        within = np.empty(self.size, np.int64)  # index among the ranks of equal node and layout
        within[self.by_node] = self.ranks - np.searchsorted(group, group)
        self.by_layout = np.lexsort((self.node_of, within, self.layout_of))
        self.ranks_of_layout = [
            self.by_layout[self.layout_of[self.by_layout] == layout]
            for layout in range(self.num_layouts)
        ]

    @cached_property
    def interleaved(self) -> np.ndarray:
        """All ranks, successive ones of different layouts."""
        index = np.empty(self.size, np.int64)  # among the ranks of equal layout
        for members in self.ranks_of_layout:
            index[members] = np.arange(len(members))
        ranks: np.ndarray = np.lexsort((self.layout_of, index))
        return ranks


class Senders:
    """The sender of each shard to each rank, for all sources with the same holders.

    shard_of: the shard each rank holds, -1 for none, int64 [N].
    sender_of: int32 [S, N]; a holder is its own sender.
    held_in_node: whether a node has a holder of a shard, bool [S, nodes].
    num_receivers: how many ranks of a layout a rank sends its shard to, inside its node and in
      other nodes, int64 [2, N, layouts].
    """

    def __init__(self, holders: Sequence[Sequence[int]], topology: Topology) -> None:
        self.topology, self._holders = topology, np.array(holders)
        shards = np.arange(len(self._holders))
        self.shard_of = np.full(topology.size, -1)
        self.shard_of[self._holders] = shards[:, None]
        self.held_in_node = np.zeros((len(shards), topology.num_nodes), bool)
        self.held_in_node[shards[:, None], topology.node_of[self._holders]] = True
        self.sender_of = self._choose_senders()
        self.num_receivers = self._count_receivers()

    def _choose_senders(self) -> np.ndarray:
        shape = (len(self._holders), self.topology.size)
        if self._holders.shape[1] == 1:
            return np.broadcast_to(self._holders.astype(np.int32), shape)
        sender_of = np.empty(shape, np.int32)
        for shard, holders in enumerate(self._holders):
            sender_of[shard] = self._choose_senders_of(shard, holders)
        return sender_of

    def _choose_senders_of(self, shard: int, holders: np.ndarray) -> np.ndarray:
        """Return the sender of one shard to every rank, int64 [N].

        The rotation starts with another holder for each shard.
        """
        topology = self.topology
        holders = holders[np.argsort(topology.node_of[holders], kind="stable")]
        per_node = np.bincount(topology.node_of[holders], minlength=topology.num_nodes)
        first = np.cumsum(per_node) - per_node
        receives = self.shard_of != shard
        sender = np.where(receives, -1, topology.ranks)
        has_near_holder = receives & (per_node[topology.node_of] > 0)
        near = topology.by_node[has_near_holder[topology.by_node]]
        node = topology.node_of[near]
        index = np.arange(len(near)) - np.searchsorted(node, node) + shard
        sender[near] = holders[first[node] + index % per_node[node]]
        far = topology.by_layout[(sender < 0)[topology.by_layout]]
        sender[far] = holders[(np.arange(len(far)) + shard) % len(holders)]
        return sender

    def _count_receivers(self) -> np.ndarray:
        topology, num_shards = self.topology, len(self._holders)
        count = np.zeros((2, topology.size, topology.num_layouts), np.int64)
        step = max(1, _PAIRS_AT_ONCE // topology.size)
        for first in range(0, num_shards, step):
            shards = np.arange(first, min(first + step, num_shards))
            sender = self.sender_of[shards]
            moves = self.shard_of != shards[:, None]
            far = topology.node_of[sender] != topology.node_of
            cell = (far * topology.size + sender) * topology.num_layouts + topology.layout_of
            count += np.bincount(cell[moves], minlength=count.size).reshape(count.shape)
        return count
