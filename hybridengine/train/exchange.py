"""Which rank trains on which sequences, and the exchange of rows that brings them there.

The split of a batch into micro-batches is a pure function, so every rank computes the same one. Its
unit is a tree: the sequences of a group, whose common prompt is computed once. Without shared
prefixes every sequence is a tree. Rows move as tensors, never as pickled objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import balance

_LOAD_SHARES = (1, 2, 4, 8)  # trees are split to at most 1, 1/2, … of a replica's mean load
_WORTH_SPLITTING = 0.99  # every part computes the prompt again: the largest load must fall by 1%
_MAX_ELEMENTS = 1 << 24  # that a rank sends or receives at once, where one row is not more


@dataclass(frozen=True)
class RowLocations:
    """Where N rows lie.

    held: for each rank, the rows that it holds; a row may be on several ranks.
    sources: int64 [N], one rank of these, which passes the row on.
    """

    held: Sequence[Sequence[int]]
    sources: Tensor


class RowExchange:
    """Move N ragged rows: row i lies on rank `sources[i]`; rank d receives the rows `wanted[d]`.

    sources: int64 [N].
    wanted: for each rank, row numbers in any order; a row may go to several ranks. All ranks pass
      the same arguments, so the sizes of all messages are known everywhere.
    group: of the ranks; None: the default group.

    Example, on both of two ranks:
        >>> exchange = RowExchange(torch.tensor([0, 1, 1]), [[1], [2, 0]])
        >>> exchange(values, lengths=torch.tensor([3, 1, 2]))  # rank 1 receives rows 2 and 0: [5]
    """

    def __init__(
        self,
        sources: Tensor,
        wanted: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self._group, self._rank = group, group.rank()
        self._sources = sources
        self._wanted = [torch.tensor(rows, dtype=torch.int64) for rows in wanted]

    def __call__(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the wanted rows end to end. Collective.

        values: the rows whose source is this rank end to end, in ascending order. A rank that is
          the source of none may pass what it holds.
        lengths: int64 [N] on the CPU, the elements of every row.
        """
        return torch.cat([values.new_empty(0), *self.pieces(values, lengths)])

    def pieces(
        self, values: Tensor, lengths: Tensor, max_elements: int = _MAX_ELEMENTS
    ) -> Iterator[Tensor]:
        """Yield the wanted rows in pieces, in order; every rank gets the same number of pieces.

        Collective: every rank must take all pieces. max_elements: that any rank sends or receives
        at once; a longer row is a piece of its own.
        """
        own = (self._sources == self._rank).nonzero().flatten()
        sizes = lengths[own].tolist()
        rows = dict(zip(own.tolist(), values[: sum(sizes)].split(sizes), strict=True))
        sent = torch.zeros(self._group.size(), dtype=torch.int64)
        for wanted in self._wanted:
            sent.index_add_(0, self._sources[wanted], lengths[wanted])
        received = [int(lengths[wanted].sum()) for wanted in self._wanted]
        count = max(1, -(-max(int(sent.max()), *received) // max_elements))
        for parts in zip(*(wanted.tensor_split(count) for wanted in self._wanted), strict=True):
            yield self._move(values, rows, lengths, parts)

    def _move(
        self, values: Tensor, rows: dict[int, Tensor], lengths: Tensor, wanted: Sequence[Tensor]
    ) -> Tensor:
        """Move one piece. rows: this rank's, by their numbers. wanted: by each rank."""
        nothing = values.new_empty(0)
        sent = [part[self._sources[part] == self._rank] for part in wanted]
        buffer = torch.cat([nothing, *(rows[i] for i in torch.cat(sent).tolist())])
        sources, sizes = self._sources[wanted[self._rank]], lengths[wanted[self._rank]]
        out_sizes = torch.zeros(self._group.size(), dtype=torch.int64).index_add_(0, sources, sizes)
        received = values.new_empty(int(sizes.sum()))
        size = values.itemsize  # bytes: neither gloo nor NCCL moves every type
        self._group.alltoall_base(
            received.view(torch.uint8),
            buffer.view(torch.uint8),
            (size * out_sizes).tolist(),
            [size * int(lengths[part].sum()) for part in sent],
        ).wait()
        by_source = sources.argsort(stable=True)  # the order in which they arrive
        arrived = received.split(sizes[by_source].tolist())
        return torch.cat([nothing, *(arrived[i] for i in by_source.argsort().tolist())])


@dataclass(frozen=True)
class _Tree:
    """Sequences that begin with the same `prompt_length` tokens and are computed together."""

    indices: list[int]
    prompt_length: int
    lengths: list[int]  # of what follows the prompt
    pair_cost: float

    @property
    def num_tokens(self) -> int:
        return self.prompt_length + sum(self.lengths)

    @property
    def cost(self) -> int:
        """The tokens, and `pair_cost` for each pair of a token and a key that it attends to."""
        prompt = self.prompt_length
        pairs = prompt * (prompt + 1) // 2
        pairs += sum(n * prompt + n * (n + 1) // 2 for n in self.lengths)
        return round(self.num_tokens + self.pair_cost * pairs)

    def split(self, size: Callable[[_Tree], int], limit: float) -> list[_Tree]:
        """Split into the fewest parts whose `size` is at most `limit`; one sequence may exceed it.

        Every part has the prompt, and the parts are nearly equal.
        """
        parts, count = [self], int(-(-size(self) // limit)) - 1
        while len(parts) < len(self.indices) and max(map(size, parts)) > limit:
            count = min(count + 1, len(self.indices))
            parts = [self._part(chosen) for chosen in balance(self.lengths, count) if chosen]
        return parts

    def _part(self, chosen: list[int]) -> _Tree:
        indices, lengths = ([x[k] for k in chosen] for x in (self.indices, self.lengths))
        return replace(self, indices=indices, lengths=lengths)


def split_micro_batches(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    *,
    prompts: Sequence[tuple[Hashable, int]] | None = None,
    pair_cost: float = 0.0,
) -> list[list[list[int]]]:
    """Split sequences into the same number of micro-batches for each of `dp_size` replicas.

    Returns the indices of the sequences of each micro-batch of each replica. A replica with fewer
    sequences than others have micro-batches must still take part in the collectives of their
    forward and backward: its micro-batches without indices are dummies.

    A micro-batch has at most max_tokens tokens; a longer sequence gets one of its own. The split is
    a function of its arguments, so every rank computes the same one.

    With `prompts`, the sequences of a group stay together and their prompt counts once. A group is
    split, each part with the prompt, where it exceeds max_tokens, and where there are too few
    groups for the replicas: only if the largest load of a replica falls by it.

    prompts: for each sequence its group, and how many tokens all sequences of this group begin
      with.
    pair_cost: cost of a key that a token attends to, relative to that of a token.
    """
    trees = [
        part
        for tree in _group(lengths, prompts, pair_cost)
        for part in tree.split(lambda t: t.num_tokens, max_tokens)
    ]
    replicas = _spread(trees, dp_size)
    count = max(1, *(-(-sum(t.num_tokens for t in part) // max_tokens) for part in replicas))
    split = [_bins(part, count) for part in replicas]
    while any(
        len(part) > 1 and sum(tree.num_tokens for tree in part) > max_tokens
        for parts in split
        for part in parts
    ):
        count += 1
        split = [_bins(part, count) for part in replicas]
    return [[sorted(i for tree in part for i in tree.indices) for part in parts] for parts in split]


def _group(
    lengths: Sequence[int], prompts: Sequence[tuple[Hashable, int]] | None, pair_cost: float
) -> list[_Tree]:
    if prompts is None:
        return [_Tree([i], 0, [length], pair_cost) for i, length in enumerate(lengths)]
    trees: dict[Hashable, _Tree] = {}
    for i, (group, prompt_length) in enumerate(prompts):
        tree = trees.setdefault(group, _Tree([], prompt_length, [], pair_cost))
        tree.indices.append(i)
        tree.lengths.append(lengths[i] - prompt_length)
    return list(trees.values())


def _spread(trees: list[_Tree], dp_size: int) -> list[list[_Tree]]:
    """Spread trees over the replicas by cost, splitting them where the largest load falls by it."""
    mean = sum(tree.cost for tree in trees) / dp_size
    best = _bins(trees, dp_size)
    num_parts = len(trees)
    for share in _LOAD_SHARES:
        parts = [part for tree in trees for part in tree.split(lambda t: t.cost, mean / share)]
        if len(parts) > num_parts:
            num_parts, finer = len(parts), _bins(parts, dp_size)
            if _largest_cost(finer) < _WORTH_SPLITTING * _largest_cost(best):
                best = finer
    return best


def _largest_cost(bins: list[list[_Tree]]) -> int:
    return max(sum(tree.cost for tree in part) for part in bins)


def _bins(trees: list[_Tree], count: int) -> list[list[_Tree]]:
    bins = balance([tree.cost for tree in trees], count)
    return [[trees[k] for k in part] for part in bins]
