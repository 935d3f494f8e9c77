"""How many elements each rank sends and receives, counted over all ranks at once.

A source whose exchange is more than a small part of a bucket is cut into shares of equal load for
every rank. Per rank, the shards it receives from are laid around a circle, each as long as what it
sends; the circles of ranks with the same layout are turned against each other, so that at any place
every rank sends as much as any other. An arc of the circle is a share. So a rank's slices are no
more than the pairs it is part of, unless one pair alone is more than a small part of a bucket: then
every slice is cut along an axis that is not sharded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hybridengine.reshard.plan.overlaps import Read, shared_reads
from hybridengine.reshard.plan.routes import Route
from hybridengine.sharding.geometry import Block, count_below, cut, narrow
from hybridengine.sharding.layout import LayoutError
from hybridengine.sharding.shards import ShardSpec

__all__ = ["Kind", "Share", "Staged", "find_shares"]

_SHARES_PER_BUCKET = 8  # of a source that is more than a bucket
_SLICES_PER_BUCKET = 32  # of a pair of ranks that has more for each other than this


@dataclass(frozen=True)
class Share:
    """What of a source travels together.

    turn, turns: an arc of the circle of (shard, receiver) pairs. part, parts: one of `parts` nearly
    equal parts of the shard's rows (`by_rows`) or of an axis of each slice that is not sharded.
    """

    turn: int = 0
    turns: int = 1
    part: int = 0
    parts: int = 1
    by_rows: bool = False


class Kind:
    """What structurally equal layers have in common: a placement, and what is needed of it.

    blocks: per engine layout the blocks it reads, all for one engine dtype. Compared by identity.
    reads: per layout the regions that travel once, with all their destinations. needed: per layout,
    elements that are written.
    """

    def __init__(self, spec: ShardSpec, route: Route, blocks: Sequence[tuple[Block, ...]]) -> None:
        self.spec, self.route = spec, route
        self.needed = np.array([sum(b.numel for b in group) for group in blocks])
        self.reads = [shared_reads(group) for group in blocks]

    @cached_property
    def elements(self) -> np.ndarray:
        """Elements that a rank of each layout needs of each shard: int64 [layouts, S]."""
        return self.count(Share())

    def count(self, share: Share) -> np.ndarray:
        """As `elements`, of the share's part of the source."""
        low, high = self.edges(share)
        total = np.zeros((len(self.reads), len(low)), np.int64)
        for row, reads in zip(total, self.reads, strict=True):
            for part in (self._part(read, share) for read in reads):
                if part:
                    block = part[0][1].read
                    row += count_below(block, self.spec.dim, high)
                    row -= count_below(block, self.spec.dim, low)
        return total

    def edges(self, share: Share) -> np.ndarray:
        """[low, high) on the sharded dimension, per shard: int64 [2, S]."""
        return self.spec.intervals(*((share.part, share.parts) if share.by_rows else ()))

    @property
    def most_parts(self) -> int:
        """How many parts every slice can be cut into along an axis that is not sharded."""
        blocks = [read[0][1] for reads in self.reads for read in reads]
        axes = [self._axis(block, block.numel) for block in blocks]
        return min((1 if i is None else b.sizes[i] for b, i in zip(blocks, axes, strict=True)),
                   default=1)  # fmt: skip

    def _axis(self, block: Block, parts: int) -> int | None:
        """The outermost long enough axis that is not sharded, else the longest such."""
        free = [i for i, (dim, _) in enumerate(block.axes) if dim not in (-1, self.spec.dim)]
        long = (i for i in free if block.sizes[i] >= 4 * parts or block.sizes[i] % parts == 0)
        return next(long, max(free, key=block.sizes.__getitem__, default=None))

    def _part(self, read: Read, share: Share) -> Read:
        """What of a region belongs to the share's part of it; nothing where that is empty."""
        if share.parts == 1 or share.by_rows:
            return read
        first_block = read[0][1]
        axis = self._axis(first_block, share.parts)
        assert axis is not None
        parts = []
        for need, block in read:
            at = block.axes.index(first_block.axes[axis])
            low, high = (block.sizes[at] * p // share.parts for p in (share.part, share.part + 1))
            if low < high:
                parts.append((need, narrow(block, at, low, high)))
        return tuple(parts)

    def pieces(self, layout: int, shard: int, share: Share) -> Iterator[Read]:
        """What a shard sends to a rank of `layout` in the share's part, wherever its turn is."""
        part = (share.part, share.parts) if share.by_rows else ()
        low, high = self.spec.interval(shard, *part)
        if low == high:
            return
        for read in self.reads[layout]:
            whole = self._part(read, share)
            cuts = [cut(block, self.spec.dim, low, high) for _, block in whole]
            for blocks in zip(*cuts, strict=True):
                yield tuple((need, b) for (need, _), b in zip(whole, blocks, strict=True))

    def turns(
        self, layout: int, shards: np.ndarray, receivers: np.ndarray, turns: int
    ) -> np.ndarray:
        """The turn of each pair of (shard that the layout needs, receiver): int64 [P, R].

        A receiver's circle begins behind its own shard, which it does not receive: the pairs that
        do travel are spread over all turns.
        """
        if turns == 1:
            return np.zeros((len(shards), len(receivers)), np.int64)
        elements = self.elements[layout]
        ends, total = np.cumsum(elements)[shards, None], int(elements.sum())
        start, own = self._starts[:, receivers]
        place = (2 * (ends - start) - elements[shards, None]) % (2 * total) - 2 * own
        found = place * turns // np.maximum(2 * (total - own), 1)
        return np.clip(found, 0, turns - 1)  # 0 for its own shard

    def pairs_to(self, rank: int, turns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, receiver, turn) of all that `rank` receives or holds: int64 [P] each."""
        layout = self.route.ranks.layout_of[rank]
        shards = np.flatnonzero(self.elements[layout])
        turn = self.turns(layout, shards, np.array([rank]), turns)[:, 0]
        return shards, np.full_like(shards, rank), turn

    def pairs_from(self, rank: int, turns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, receiver, turn) of all that `rank` sends to others: int64 [P] each."""
        ranks, shard = self.route.ranks, self.route.own[rank]
        found = [np.empty((3, 0), np.int64)]
        for layout, members in enumerate(ranks.of_layout):
            if shard < 0 or not self.elements[layout][shard]:
                continue
            to = members[(self.route.sender[shard, members] == rank) & (members != rank)]
            turn = self.turns(layout, np.array([shard]), to, turns)[0]
            found.append(np.stack([np.full_like(to, shard), to, turn]))
        shards, receivers, turn = np.concatenate(found, 1)
        return shards, receivers, turn

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each rank's circle begins, and how much of it is its own shard: int64 [2, N].

        Ranks that hold none of what they need begin apart from each other and, where few layouts
        need a shard, from the others of their layout, which then are all it is sent to.
        """
        ranks, own = self.route.ranks, self.route.own
        starts = np.zeros((2, ranks.size), np.int64)
        needed_by = (self.elements > 0).sum(0)
        common = needed_by.sum() > max(1.5, ranks.num_layouts / 2) * (needed_by > 0).sum()
        held = np.where(own >= 0, self.elements[ranks.layout_of, own], 0)
        others_before = np.empty(ranks.size, np.int64)
        others_before[ranks.in_turn] = np.cumsum(held[ranks.in_turn] == 0) - 1
        num_others = max(1, int((held == 0).sum()))
        for layout, members in enumerate(ranks.of_layout):
            elements = self.elements[layout]
            ends, total = np.cumsum(elements), int(elements.sum())
            first = (ends - elements)[own[members]]
            taken = np.unique(first[held[members] > 0]).tolist()
            others = np.flatnonzero(held[members] == 0)
            if common:
                first[others] = others_before[members[others]] * total // num_others
            else:
                shift = total * layout // (ranks.num_layouts * len(members))
                first[others] = _between(taken or [shift], total, len(others), bool(taken))
            starts[:, members] = first, held[members]
        return starts

    @property
    def missing(self) -> np.ndarray:
        """Elements each rank needs and does not hold: int64 [N]."""
        layout_of, own = self.route.ranks.layout_of, self.route.own
        held = np.where(own >= 0, self.elements[layout_of, own], 0)
        return self.elements.sum(1)[layout_of] - held

    def loads(self, elements: np.ndarray, turns: int = 1) -> np.ndarray:
        """Elements that each rank moves in each turn: int64 or int32 [turns, 4, N].

        elements: of the part in question, as `count`. The channels are: received inside the node
        and from other nodes, sent inside the node and to others.
        """
        if turns == 1:
            return self._loads_of_all_turns(elements)[None]
        ranks, route = self.route.ranks, self.route
        largest = elements.sum(1).max() + (elements.sum(0) * ranks.size).max()
        loads = np.zeros((turns, 4, ranks.size), np.int64 if largest >> 31 else np.int32)
        for layout, members in enumerate(ranks.of_layout):
            shards = np.flatnonzero(self.elements[layout])
            moves = route.own[members] != shards[:, None]
            turn = self.turns(layout, shards, members, turns)[moves]
            sender = route.sender[shards[:, None], members][moves]
            amount = np.broadcast_to(elements[layout][shards, None], moves.shape)[moves]
            receiver = np.broadcast_to(np.arange(len(members)), moves.shape)[moves]
            far = ranks.node_of[sender] != ranks.node_of[members[receiver]]
            senders = np.unique(sender)
            for channel, peers, peer in (
                (0, members, receiver),
                (2, senders, np.searchsorted(senders, sender)),
            ):
                shape = (turns, 2, len(peers))
                at = (turn * 2 + far) * len(peers) + peer
                counted = np.bincount(at, amount, math.prod(shape)).reshape(shape)
                loads[:, channel : channel + 2, peers] += counted.astype(loads.dtype)
        return loads

    def _loads_of_all_turns(self, elements: np.ndarray) -> np.ndarray:
        """`loads` of one turn, without looking at pairs: int64 [4, N]."""
        ranks, route = self.route.ranks, self.route
        holds = route.own >= 0
        mine = np.where(holds, elements[ranks.layout_of, route.own], 0)
        # As a product of float64, exact below 2^53: that of integers is slow.
        near = (elements.astype(np.float64) @ route.near).astype(np.int64)
        near = near[ranks.layout_of, ranks.node_of]
        far = elements.sum(1)[ranks.layout_of] - near
        sent = (route.served * elements.T[route.own]).sum(2) * holds
        return np.stack([near - mine, far, *sent])

    def formed_bytes(self, share: Share) -> np.ndarray | int:
        """Bytes of the merged rows that each rank makes before it packs them: [N]."""
        spec, own = self.spec, self.route.own
        if not spec.merged:
            return 0
        low, high = self.edges(share)
        row_bytes = math.prod(spec.shape) // max(1, spec.shape[spec.dim]) * spec.dtype.itemsize
        return np.where(own >= 0, (high - low)[own], 0) * row_bytes


def _between(taken: Sequence[int], total: int, count: int, skip: bool) -> list[int]:
    """`count` places on a circle of length `total`, spread over the gaps between those `taken`.

    taken: ascending. skip: they are not given out; else there is one, and it is the first.
    """
    ends = [*taken[1:], taken[0] + total]
    gaps = [(first, end - first) for first, end in zip(taken, ends, strict=True)]
    steps = [int(skip)] * len(gaps)  # into so many steps, plus one, a gap would be divided next
    widest = [(-gap // (n + 1), i) for i, ((_, gap), n) in enumerate(zip(gaps, steps, strict=True))]
    heapq.heapify(widest)
    for _ in range(count):
        i = widest[0][1]
        steps[i] += 1
        heapq.heapreplace(widest, (-(gaps[i][1] // (steps[i] + 1)), i))
    return [
        (first + gap * step // n) % max(total, 1)
        for (first, gap), n in zip(gaps, steps, strict=True)
        for step in range(int(skip), n)
    ]


class Staged(NamedTuple):
    """A share, what each rank moves of it (elements, [4, N]) and stages (bytes, [N])."""

    share: Share
    loads: np.ndarray
    staged: np.ndarray


def find_shares(name: str, kind: Kind, itemsize: int, limit: int) -> list[Staged]:
    """Divide a source into shares that fit a bucket of `limit` bytes on every rank.

    Raises LayoutError where even the smallest shares of source `name` do not.
    """
    small = max(1, limit // _SHARES_PER_BUCKET)
    whole = _staged(kind, itemsize, 1, 1, False)
    most = _most(whole)
    if most <= small:
        return whole
    rows = kind.spec.interval(0)[1]
    if kind.spec.merged:  # what is merged is formed once, for all receivers
        wanted, most_turns, ways = -(-most // small), 1, [(True, rows)]
    else:
        slices = int(kind.elements.max()) * itemsize * _SLICES_PER_BUCKET
        wanted, most_turns = max(1, -(-slices // limit)), kind.route.ranks.size
        ways = [(False, kind.most_parts), (True, rows)]
        ways.sort(key=lambda way: -min(way[1], wanted))
    for by_rows, most_parts in ways:
        parts = min(wanted, most_parts)
        while True:
            turns = min(most_turns, -(-most // (parts * small)))
            found = _staged(kind, itemsize, turns, parts, by_rows)
            if (worst := _most(found)) <= limit:
                return found
            if parts >= most_parts:
                break
            parts = min(most_parts, max(parts + 1, parts * worst // limit))
    raise LayoutError(
        f"bucket_bytes: parameter {name!r} of shape {kind.spec.shape} does not split into pieces "
        f"that fit a bucket of {limit} bytes. Give larger buckets."
    )


def _staged(kind: Kind, itemsize: int, turns: int, parts: int, by_rows: bool) -> list[Staged]:
    """Every share with something in it."""
    known: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}  # most parts are alike
    found: list[Staged] = []
    for part in range(parts):
        share = Share(0, turns, part, parts, by_rows)
        elements = kind.count(share)
        key = elements.tobytes()
        if key not in known:
            loads = kind.loads(elements, turns)
            known[key] = loads, loads.sum(1, dtype=np.int64) * itemsize
        for turn, (loads, staged) in enumerate(zip(*known[key], strict=True)):
            if staged.any() or (turn == 0 and elements.any()):  # turn 0 has what ranks keep
                share = Share(turn, turns, part, parts, by_rows)
                found.append(Staged(share, loads, staged + kind.formed_bytes(share)))
    return found or [Staged(Share(), *(a[0] for a in next(iter(known.values()))))]


def _most(shares: list[Staged]) -> int:
    return max(int(share.staged.max()) for share in shares)
