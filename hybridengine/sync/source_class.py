"""Source classes: volumes, rounds and slices, computed once for structurally equal parameters.

A parameter whose exchange is more than a small part of a bucket travels in several rounds; in each,
every rank sends and receives about as much as any other. For one receiver, lay the shards it needs
around a circle, each as long as the number of elements it sends. Receivers with the same engine
layout have the same circle, but each starts behind its own shard, so that at any angle they receive
from different senders. A round is an arc of the circle: all (shard, receiver) pairs whose middle
lies in it. Pairs stay together, so a rank has no more slices than pairs. Only where one pair alone
is more than a small part of a bucket are its slices cut into parts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybridengine.sync.blocks import Axis, Block, Writes, count_below, cut, disjoint_regions, narrow
from hybridengine.sync.senders import Senders
from hybridengine.sync.shards import ShardSpec, grid_product

_Pair = tuple[int, int]  # shard, receiver


class Chunk(NamedTuple):
    """The elements of a source that are sent together: one round, one part. Default: all of it.

    part: one of `num_parts` nearly equal parts, of the rows of a shard (`by_rows`) or of another
    axis of each slice.
    """

    round: int = 0
    num_rounds: int = 1
    part: int = 0
    num_parts: int = 1
    by_rows: bool = False

    @property
    def row_part(self) -> tuple[int, int]:
        """Return (part, number of parts) of the rows of a shard."""
        return (self.part, self.num_parts) if self.by_rows else (0, 1)


class SliceCopy(NamedTuple):
    """One strided slice on its way from a shard to the engine tensors of one rank.

    It is sent once, in the order of `read`, and written to each of `writes`; their indices are
    those of `ReshardPlan.destinations`.
    """

    shard: int
    sender: int
    receiver: int
    writes: Writes

    @property
    def read(self) -> Block:
        return self.writes[0][1].read


class SourceClass:
    """Sources of equal shape, dtype, placement and copies, such as those of equal layers.

    spec: the placement of the sources.
    senders: which rank sends each shard to which rank.
    regions: per engine layout, the regions of the source that it needs, each sent once.
    num_written: the number of elements written, per layout.
    Compared by identity.
    """

    def __init__(
        self, spec: ShardSpec, senders: Senders, blocks: Sequence[tuple[Block, ...]]
    ) -> None:
        """blocks: per engine layout, the copies of the source into tensors of one dtype."""
        self.spec, self.senders = spec, senders
        self.num_written = np.array([sum(b.numel for b in group) for group in blocks])
        self.regions = [disjoint_regions(group) for group in blocks]
        self._pairs: dict[tuple, dict[int, list[_Pair]]] = {}
        self._slices: dict[tuple, list[SliceCopy]] = {}

    # Volumes

    @cached_property
    def num_needed(self) -> np.ndarray:
        """Return the elements a rank of each layout needs of each shard, int64 [layouts, S]."""
        return self.count_needed(Chunk())

    def count_needed(self, chunk: Chunk) -> np.ndarray:
        """Return `num_needed` for the part of a chunk, in all rounds together."""
        total = np.zeros((len(self.regions), len(self.spec.holders)), np.int64)
        for row, regions in zip(total, self.regions, strict=True):
            parts = (self._part_of(region, chunk) for region in regions)
            self._count(row, (part[0][1].read for part in parts if part), *chunk.row_part)
        return total

    def _count(self, total: np.ndarray, blocks: Iterable[Block], *part: int) -> None:
        """Add to `total` [S] how many elements the blocks read of (a part of) each shard."""
        spec = self.spec
        ranges = [(split.dim, spec.chunk_ranges(split, *part)) for split in spec.splits]
        for block in blocks:
            counts = [np.diff(count_below(block, dim, r), axis=0)[0] for dim, r in ranges]
            rest = (axis.size for axis in block.axes if axis.dim not in spec.split_dims)
            total += grid_product(counts) * math.prod(rest)

    @property
    def num_missing(self) -> np.ndarray:
        """Return how many elements each rank needs and does not hold, int64 [N]."""
        return self.num_needed.sum(1)[self.senders.topology.layout_of] - self._num_held

    @property
    def _num_held(self) -> np.ndarray:
        """Return how many elements each rank needs of its own shard, int64 [N]."""
        return self._own(self.num_needed)

    def _own(self, needed: np.ndarray) -> np.ndarray:
        """Pick each rank's own layout and shard out of [layouts, S]; 0 for a rank without one."""
        shard_of = self.senders.shard_of
        return np.where(shard_of >= 0, needed[self.senders.topology.layout_of, shard_of], 0)

    def loads(self, needed: np.ndarray, num_rounds: int = 1) -> np.ndarray:
        """Count the elements each rank moves in each round: int64 or int32 [rounds, 4, N].

        needed: as `count_needed`. The four channels are: received inside the node, received from
        other nodes, sent inside the node, sent to other nodes.
        """
        if num_rounds == 1:
            return self._loads_of_one_round(needed)[None]
        senders, topology = self.senders, self.senders.topology
        largest = needed.sum(1).max() + (needed.sum(0) * topology.size).max()
        dtype = np.int64 if largest >> 31 else np.int32
        loads = np.zeros((num_rounds, 4, topology.size), dtype)
        for layout, members in enumerate(topology.ranks_of_layout):
            shards = np.flatnonzero(self.num_needed[layout])
            moves = senders.shard_of[members] != shards[:, None]
            rounds = self._rounds(layout, shards, members, num_rounds)[moves]
            sender = senders.sender_of[shards[:, None], members][moves]
            amount = np.broadcast_to(needed[layout][shards, None], moves.shape)[moves]
            receiver = np.broadcast_to(np.arange(len(members)), moves.shape)[moves]
            far = topology.node_of[sender] != topology.node_of[members[receiver]]
            sending = np.unique(sender)
            for channel, ranks, index in (
                (0, members, receiver),
                (2, sending, np.searchsorted(sending, sender)),
            ):
                shape = (num_rounds, 2, len(ranks))
                cell = (rounds * 2 + far) * len(ranks) + index
                counted = np.bincount(cell, amount, math.prod(shape)).reshape(shape)
                loads[:, channel : channel + 2, ranks] += counted.astype(dtype)
        return loads

    def _loads_of_one_round(self, needed: np.ndarray) -> np.ndarray:
        """Return `loads` of all rounds together, without enumerating pairs: int64 [4, N]."""
        senders, topology = self.senders, self.senders.topology
        # A product of float64, exact below 2^53: the product of integers is slow.
        near = (needed.astype(np.float64) @ senders.held_in_node).astype(np.int64)
        near = near[topology.layout_of, topology.node_of]
        far = needed.sum(1)[topology.layout_of] - near
        sent = (senders.num_receivers * needed.T[senders.shard_of]).sum(2)
        return np.stack([near - self._own(needed), far, *(sent * (senders.shard_of >= 0))])

    def merge_bytes(self, chunk: Chunk) -> np.ndarray | int:
        """Return the bytes of the rows that each rank merges with its adapter, [N]."""
        spec, shard_of = self.spec, self.senders.shard_of
        if not spec.merged:
            return 0
        sizes = spec.num_elements(*chunk.row_part)
        return np.where(shard_of >= 0, sizes[shard_of], 0) * spec.dtype.itemsize

    # Slices

    def incoming(self, chunk: Chunk, rank: int) -> list[SliceCopy]:
        """Return the slices of a chunk that `rank` receives, and those it keeps.

        Sender and receiver list the slices between them in the same order.
        """
        return self._slices_of(chunk, rank, receives=True)

    def outgoing(self, chunk: Chunk, rank: int) -> list[SliceCopy]:
        """Return the slices of a chunk that `rank` sends to others, as `incoming`."""
        return self._slices_of(chunk, rank, receives=False)

    def _slices_of(self, chunk: Chunk, rank: int, receives: bool) -> list[SliceCopy]:
        key = (chunk, rank, receives)
        if key not in self._slices:
            pairs = self._pairs_by_round(rank, chunk.num_rounds, receives).get(chunk.round, [])
            self._slices[key] = list(self._cut_pairs(chunk, pairs))
        return self._slices[key]

    def _cut_pairs(self, chunk: Chunk, pairs: Iterable[_Pair]) -> Iterator[SliceCopy]:
        known: dict[_Pair, list[Writes]] = {}  # by shard and layout
        for shard, receiver in pairs:
            layout = int(self.senders.topology.layout_of[receiver])
            if (shard, layout) not in known:
                known[shard, layout] = list(self._cut_shard(layout, shard, chunk))
            sender = int(self.senders.sender_of[shard, receiver])
            for writes in known[shard, layout]:
                yield SliceCopy(shard, sender, receiver, writes)

    def _cut_shard(self, layout: int, shard: int, chunk: Chunk) -> Iterator[Writes]:
        """Yield what a shard sends to any rank of `layout` in the part of a chunk."""
        box = self.spec.box(shard, *chunk.row_part)
        if any(low == high for low, high in box):
            return
        for region in self.regions[layout]:
            writes = self._part_of(region, chunk)
            cuts = [[block] for _, block in writes]
            for dim in self.spec.split_dims:
                cuts = [
                    [part for b in blocks for part in cut(b, dim, *box[dim])] for blocks in cuts
                ]
            for blocks in zip(*cuts, strict=True):
                yield tuple((index, b) for (index, _), b in zip(writes, blocks, strict=True))

    def _part_of(self, region: Writes, chunk: Chunk) -> Writes:
        """Restrict a region to the part of a chunk; empty where nothing is left."""
        if chunk.num_parts == 1 or chunk.by_rows:
            return region
        axis = self._axis_to_cut(region[0][1], chunk.num_parts)
        assert axis is not None
        low, high = (axis.size * p // chunk.num_parts for p in (chunk.part, chunk.part + 1))
        if low == high:
            return ()
        at = [[a[:3] for a in block.axes].index(axis[:3]) for _, block in region]
        return tuple(
            (index, narrow(block, i, low, high))
            for i, (index, block) in zip(at, region, strict=True)
        )

    @property
    def max_parts(self) -> int:
        """Return into how many parts every slice can be cut along an axis that is not sharded."""
        return min((1 if axis is None else axis.size for axis in self._axes_to_cut()), default=1)

    def cuts_before_rows(self, num_parts: int) -> bool:
        """Return whether parts that are not of rows are of axes outside of the rows."""
        return all(a and a.dim < self.spec.row_dim for a in self._axes_to_cut(num_parts))

    def _axes_to_cut(self, num_parts: int | None = None) -> list[Axis | None]:
        blocks = [region[0][1] for regions in self.regions for region in regions]
        return [self._axis_to_cut(block, num_parts or block.numel) for block in blocks]

    def _axis_to_cut(self, block: Block, num_parts: int) -> Axis | None:
        """Return the outermost axis that is not sharded and is long enough, else the longest."""
        free = [axis for axis in block.axes if axis.dim not in (-1, *self.spec.split_dims)]
        long = (a for a in free if a.size >= 4 * num_parts or a.size % num_parts == 0)
        return next(long, max(free, key=lambda axis: axis.size, default=None))

    # Rounds

    def _pairs_by_round(self, rank: int, num_rounds: int, receives: bool) -> dict[int, list[_Pair]]:
        """Return the pairs that `rank` receives or keeps, else those it sends to others."""
        key = (rank, num_rounds, receives)
        if key not in self._pairs:
            by_round: dict[int, list[_Pair]] = defaultdict(list)
            for layout, shards, receivers in self._pair_groups(rank, receives):
                rounds = self._rounds(layout, shards, receivers, num_rounds).ravel().tolist()
                pairs = itertools.product(shards.tolist(), receivers.tolist())
                for pair, number in zip(pairs, rounds, strict=True):
                    by_round[number].append(pair)
            self._pairs[key] = dict(by_round)
        return self._pairs[key]

    def _pair_groups(
        self, rank: int, receives: bool
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (layout, shards, receivers) whose product are the pairs of `_pairs_by_round`."""
        senders, shard = self.senders, self.senders.shard_of[rank]
        layout_of_rank = int(senders.topology.layout_of[rank])
        if receives:
            yield layout_of_rank, np.flatnonzero(self.num_needed[layout_of_rank]), np.array([rank])
        elif shard >= 0:
            for layout, members in enumerate(senders.topology.ranks_of_layout):
                if self.num_needed[layout][shard]:
                    served = (senders.sender_of[shard, members] == rank) & (members != rank)
                    yield layout, np.array([shard]), members[served]

    def _rounds(
        self, layout: int, shards: np.ndarray, receivers: np.ndarray, num_rounds: int
    ) -> np.ndarray:
        """The round of each pair of (shard that the layout needs, receiver): int64 [P, R].

        A receiver's own shard takes no part, so the other pairs spread over all rounds.
        """
        if num_rounds == 1:
            return np.zeros((len(shards), len(receivers)), np.int64)
        needed = self.num_needed[layout]
        ends, total = np.cumsum(needed)[shards, None], int(needed.sum())
        start, own = self._circle_starts[:, receivers]
        middle = (2 * (ends - start) - needed[shards, None]) % (2 * total) - 2 * own
        rounds = middle * num_rounds // np.maximum(2 * (total - own), 1)
        return np.clip(rounds, 0, num_rounds - 1)  # 0 for its own shard

    @cached_property
    def _circle_starts(self) -> np.ndarray:
        """Where each rank's circle starts, and the length of its own shard there: int64 [2, N].

        Ranks that hold nothing of what they need start at distances from each other; where few
        layouts need a shard, also from the other ranks of their layout, its only receivers.
        """
        senders, topology = self.senders, self.senders.topology
        held = self._num_held
        starts = np.zeros((2, topology.size), np.int64)
        layouts_per_shard = (self.num_needed > 0).sum(0)
        limit = max(1.5, topology.num_layouts / 2) * (layouts_per_shard > 0).sum()
        shared = layouts_per_shard.sum() > limit
        others_before = np.empty(topology.size, np.int64)
        interleaved = topology.interleaved
        others_before[interleaved] = np.cumsum(held[interleaved] == 0) - 1
        num_others = max(1, int((held == 0).sum()))
        for layout, members in enumerate(topology.ranks_of_layout):
            needed = self.num_needed[layout]
            ends, total = np.cumsum(needed), int(needed.sum())
            first = (ends - needed)[senders.shard_of[members]]
            taken = np.unique(first[held[members] > 0]).tolist()
            others = np.flatnonzero(held[members] == 0)
            if shared:
                first[others] = others_before[members[others]] * total // num_others
            else:
                shift = total * layout // (topology.num_layouts * len(members))
                first[others] = _spread(taken or [shift], total, len(others), bool(taken))
            starts[:, members] = first, held[members]
        return starts


def _spread(taken: Sequence[int], total: int, count: int, skip_taken: bool) -> list[int]:
    """Choose `count` points on a circle of length `total`, spread over the gaps between `taken`.

    taken: ascending.
    skip_taken: do not choose these; otherwise there is one, the first choice.
    """
    ends = [*taken[1:], taken[0] + total]
    gaps = [(first, end - first) for first, end in zip(taken, ends, strict=True)]
    steps = [int(skip_taken)] * len(gaps)  # the next point of a gap divides it into steps + 1
    widest = [(-gap // (n + 1), i) for i, ((_, gap), n) in enumerate(zip(gaps, steps, strict=True))]
    heapq.heapify(widest)
    for _ in range(count):
        i = widest[0][1]
        steps[i] += 1
        heapq.heapreplace(widest, (-(gaps[i][1] // (steps[i] + 1)), i))
    return [
        (first + gap * step // n) % max(total, 1)
        for (first, gap), n in zip(gaps, steps, strict=True)
        for step in range(int(skip_taken), n)
    ]
