"""The split of a batch into micro-batches: a pure function, so every rank computes the same one.

The unit is a tree: the sequences of a group, whose common prompt is computed once. Without shared
prefixes every sequence is a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from hybridengine.kernels import balance

_LOAD_SHARES = (1, 2, 4, 8)  # trees are split to at most 1, 1/2, … of a replica's mean load
_WORTH_SPLITTING = 0.99  # every part computes the prompt again: the largest load must fall by 1%


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
    while any(_exceeds(part, max_tokens) for parts in split for part in parts):
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


def _exceeds(trees: list[_Tree], max_tokens: int) -> bool:
    return len(trees) > 1 and sum(tree.num_tokens for tree in trees) > max_tokens
