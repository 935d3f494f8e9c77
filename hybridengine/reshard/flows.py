"""How many elements each rank sends and receives, counted over all ranks at once.

A source whose exchange is more than a bucket is cut into shares: first by pairs of (shard, rank),
rotating so that in each share every rank receives from some shards and sends to some ranks; only
then along its rows. So the slices of a large exchange are no more than the pairs that have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridengine.reshard.geometry import Block, count_below, cut
from hybridengine.reshard.layout import LayoutError
from hybridengine.reshard.shards import ShardSpec

__all__ = ["Flows", "Kind", "Share"]

Shares = list[tuple["Share", np.ndarray]]


@dataclass(frozen=True)
class Share:
    """What of a source travels together.

    turn, turns: the pairs with (shard + receiver) % turns == turn. dim, part, parts: one of `parts`
    nearly equal parts of every shard, if `dim` is the sharded one, else of the whole dimension.
    """

    turn: int = 0
    turns: int = 1
    dim: int = 0
    part: int = 0
    parts: int = 1


class Kind:
    """What structurally equal layers have in common: a placement, and what is needed of it.

    blocks: per engine layout the blocks it reads, all for one engine dtype. Compared by identity.
    """

    def __init__(self, spec: ShardSpec, blocks: Sequence[tuple[Block, ...]]) -> None:
        self.spec, self.blocks = spec, blocks

    def edges(self, share: Share) -> np.ndarray:
        """[low, high) on the sharded dimension, per shard: int64 [2, S]."""
        mine = share.dim == self.spec.dim
        return self.spec.intervals(*((share.part, share.parts) if mine else ()))

    def windowed(self, block: Block, share: Share) -> Iterator[Block]:
        """What of `block` lies in the share's part of a dimension that is not sharded."""
        if share.dim == self.spec.dim or share.parts == 1:
            yield block
            return
        size = self.spec.shape[share.dim]
        ends = (size * p // share.parts for p in (share.part, share.part + 1))
        yield from cut(block, share.dim, *ends)

    def cut(self, block: Block, shard: int, share: Share) -> Iterator[Block]:
        """What of `block` lies in a shard's part of a share."""
        low, high = self.edges(share)[:, shard].tolist()
        if low < high:
            for part in self.windowed(block, share):
                yield from cut(part, self.spec.dim, low, high)

    def elements(self, blocks: Sequence[Block], share: Share) -> np.ndarray:
        """How many elements of `blocks` lie in each shard's part of a share: int64 [S]."""
        low, high = self.edges(share)
        total = np.zeros(len(low), np.int64)
        for block in (part for b in blocks for part in self.windowed(b, share)):
            total += count_below(block, self.spec.dim, high)
            total -= count_below(block, self.spec.dim, low)
        return total


class Flows:
    """Counts elements that move, vectorised over ranks, once per kind of source."""

    def __init__(self, layout_of: Sequence[int]) -> None:
        self._layout_of = np.array(layout_of)
        self._ranks = np.arange(len(layout_of))
        self._counted: dict[Kind, np.ndarray] = {}
        self._shared: dict[Kind, Shares] = {}

    def count(self, kind: Kind) -> np.ndarray:
        """int64 [4, N]: elements each rank receives, sends, needs, and the least it can receive."""
        if kind not in self._counted:
            moved, senders = self._moves(kind, Share())
            sent = np.bincount(senders.ravel(), moved.ravel(), len(self._ranks))
            distinct = [tuple({b.region: b for b in group}.values()) for group in kind.blocks]
            once, _ = self._moves(Kind(kind.spec, distinct), Share())
            needed = np.array([sum(b.numel for b in group) for group in kind.blocks])
            counts = (moved.sum(0), sent, needed[self._layout_of], once.sum(0))
            self._counted[kind] = np.stack(counts).astype(np.int64)
        return self._counted[kind]

    def traffic(self, kind: Kind) -> np.ndarray:
        """Elements from sender to receiver, int64 [N, N]."""
        moved, senders = self._moves(kind, Share())
        matrix = np.zeros((len(self._ranks),) * 2, np.int64)
        np.add.at(matrix, (senders, np.broadcast_to(self._ranks, senders.shape)), moved)
        return matrix

    def shares(self, name: str, kind: Kind, itemsize: int, limit: int) -> Shares:
        """(share, staged bytes per rank), with no rank above `limit` in any of them.

        Raises LayoutError where even one row or column of source `name` is more than that.
        """
        if kind not in self._shared:
            self._shared[kind] = self._find_shares(name, kind, itemsize, limit)
        return self._shared[kind]

    def _find_shares(self, name: str, kind: Kind, itemsize: int, limit: int) -> Shares:
        spec, turns = kind.spec, 1
        while True:
            found = self._staged(kind, itemsize, turns, spec.dim, 1)
            worst = _worst(found)
            if worst <= limit:
                return found
            if spec.merged or turns == len(spec.holders):  # what is merged is formed once
                break
            turns = min(len(spec.holders), max(turns + 1, -(-worst * turns // limit)))
        best: Shares = []
        for dim in (
            [spec.dim] if spec.merged else sorted(range(len(spec.shape)), key=spec.dim.__ne__)
        ):
            size = spec.interval(0)[1] if dim == spec.dim else spec.shape[dim]
            parts, found, at_most = 1, [], worst
            while at_most > limit and parts < size:
                parts = min(size, max(parts + 1, -(-at_most * parts // limit)))
                found = self._staged(kind, itemsize, turns, dim, parts)
                at_most = _worst(found)
            if at_most <= limit and (not best or len(found) < len(best)):
                best = found
        if not best:
            raise LayoutError(
                f"bucket_bytes: parameter {name!r} of shape {spec.shape} does not split into "
                f"pieces that fit a bucket of {limit} bytes. Give larger buckets."
            )
        return best

    def _staged(self, kind: Kind, itemsize: int, turns: int, dim: int, parts: int) -> Shares:
        """Bytes that each rank sends and receives (and forms) per share."""
        num_ranks, own = len(self._ranks), self._own_shards(kind)
        shards = np.arange(len(kind.spec.holders))[:, None]
        first = (shards + self._ranks) % turns * num_ranks
        shares: Shares = []
        for part in range(parts):
            moved, senders = self._moves(kind, Share(0, 1, dim, part, parts))
            staged = np.zeros(turns * num_ranks)  # float64: exact below 2^53
            for peers in (self._ranks, senders):
                at = (first + peers).ravel()
                staged += np.bincount(at, moved.ravel(), turns * num_ranks)
            for turn, elements in enumerate(staged.astype(np.int64).reshape(turns, num_ranks)):
                share = Share(turn, turns, dim, part, parts)
                shares.append((share, elements * itemsize + self._formed(kind, share, own)))
        return shares

    def _formed(self, kind: Kind, share: Share, own: np.ndarray) -> np.ndarray | int:
        """Bytes of the merged rows that each rank makes before it packs them."""
        if not kind.spec.merged:
            return 0
        low, high = kind.edges(share)
        shape = kind.spec.shape
        row_bytes = math.prod(shape) // max(1, shape[kind.spec.dim]) * kind.spec.dtype.itemsize
        return np.where(own >= 0, (high - low)[own], 0) * row_bytes

    def _moves(self, kind: Kind, share: Share) -> tuple[np.ndarray, np.ndarray]:
        """Elements from each shard to each rank, int64 [S, N], and which rank sends them."""
        moved = np.array([kind.elements(group, share) for group in kind.blocks])
        moved = moved[self._layout_of].T.copy()
        own = self._own_shards(kind)
        kept = own >= 0  # what a rank holds it takes from itself, whoever's turn it is
        moved[own[kept], self._ranks[kept]] = 0
        holders = np.array(kind.spec.holders)
        return moved, holders[np.arange(len(holders))[:, None], self._ranks % holders.shape[1]]

    def _own_shards(self, kind: Kind) -> np.ndarray:
        """The shard each rank holds, -1 for none: int64 [N]."""
        own = np.full(len(self._ranks), -1)
        own[np.array(kind.spec.holders)] = np.arange(len(kind.spec.holders))[:, None]
        return own


def _worst(shares: Shares) -> int:
    return max(int(staged.max()) for _, staged in shares)
