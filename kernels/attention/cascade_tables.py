"""The FlashAttention calls over a packed forest: which nodes take part in which, on the host.

Nodes are contiguous in packed order, and so are the strict descendants of a node. A level is the
inner nodes of one depth: their descendants attend to them. It is one call over one range of queries
and one of keys. What lies between its nodes are runs of queries without keys and of keys without
queries, whose results are never read: nothing is copied, and a call has at most three runs a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .flash import Runs

MAX_LEVELS = 4
# Keys that a query has at a level on average, below which joining its result costs more than the
# call saves (argued in docs/notes.md).
MIN_KEYS = 128


class Level(NamedTuple):
    """The call of one level.

    rows: from the first descendant of its nodes to the last; keys: from the first node to the last.
    cu_seqlens_q, cu_seqlens_k: int32 [runs + 1], counted from the begin of rows and of keys.
    max_seqlen_q, max_seqlen_k: the longest run with keys, and with queries.
    """

    rows: slice
    keys: slice
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def runs(self, softmax_scale: float) -> Runs:
        return Runs(*self[2:], causal=False, softmax_scale=softmax_scale)


class Cascade(NamedTuple):
    """The calls over a forest of T tokens; all tensors are int32.

    cu_seqlens, max_seqlen: of the nodes.
    row_levels, key_levels: [T], bit l: whether the query, or the key, takes part in level l.
    row_ranges, key_ranges: [levels, 2], begin and length of each level's range.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    levels: tuple[Level, ...]
    row_levels: Tensor
    key_levels: Tensor
    row_ranges: Tensor
    key_ranges: Tensor

    def own_runs(self, softmax_scale: float) -> Runs:
        ends, longest = self.cu_seqlens, self.max_seqlen
        return Runs(ends, ends, longest, longest, causal=True, softmax_scale=softmax_scale)


class _Node(NamedTuple):
    begin: int
    end: int
    tree_end: int  # of its subtree
    depth: int


def cascades_of(subtree_ends: Tensor) -> tuple[Cascade, ...]:
    """Return the calls over a forest, int32 [T], T > 0; none where they are not worth it.

    They are worth it for at most MAX_LEVELS levels with MIN_KEYS keys a query. Waits for the
    device.
    """
    nodes = _nodes_of(subtree_ends.cpu())
    inner = [node for node in nodes if node.end < node.tree_end]
    depth = max((node.depth + 1 for node in inner), default=0)
    rows = sum(node.tree_end - node.end for node in inner)
    pairs = sum((node.tree_end - node.end) * (node.end - node.begin) for node in inner)
    worth_it = depth <= MAX_LEVELS and pairs >= MIN_KEYS * rows
    return (_cascade(nodes, subtree_ends.device),) if worth_it else ()


def make_cascade(subtree_ends: Tensor) -> Cascade:
    """Return the calls over a forest, int32 [T], T > 0, of up to 31 levels."""
    return _cascade(_nodes_of(subtree_ends.cpu()), subtree_ends.device)


def _cascade(nodes: list[_Node], device: torch.device) -> Cascade:
    inner = [node for node in nodes if node.end < node.tree_end]
    depth = max((node.depth + 1 for node in inner), default=0)
    by_depth = [[node for node in inner if node.depth == i] for i in range(depth)]
    rows_of = [(level[0].end, level[-1].tree_end) for level in by_depth]
    keys_of = [(level[0].begin, level[-1].end) for level in by_depth]
    lengths = torch.tensor([node.end - node.begin for node in nodes])
    row_levels = torch.tensor([(1 << node.depth) - 1 for node in nodes])
    key_levels = torch.tensor([(node.end < node.tree_end) << node.depth for node in nodes])
    runs = [_runs_of(level) for level in by_depth]
    tables = [
        torch.tensor([0, *(node.end for node in nodes)]),
        row_levels.repeat_interleave(lengths),
        key_levels.repeat_interleave(lengths),
        *(torch.tensor([(i, j - i) for i, j in ranges]).flatten() for ranges in (rows_of, keys_of)),
        *(torch.tensor(ends) for pair in runs for ends in pair),
    ]
    # One transfer of all of them.
    sent = torch.cat([table.int() for table in tables]).to(device)
    own, row_bits, key_bits, row_ranges, key_ranges, *ends = sent.split([len(x) for x in tables])
    levels = tuple(
        Level(
            slice(*rows_of[i]),
            slice(*keys_of[i]),
            ends[2 * i],
            ends[2 * i + 1],
            max(node.tree_end - node.end for node in level),
            max(node.end - node.begin for node in level),
        )
        for i, level in enumerate(by_depth)
    )
    longest = int(lengths.max())
    return Cascade(own, longest, levels, row_bits, key_bits, row_ranges, key_ranges)


def _nodes_of(ends: Tensor) -> list[_Node]:
    """Return the nodes in packed order. An only child continues the node of its parent."""
    begins = [0, *((ends[1:] != ends[:-1]).nonzero().flatten() + 1).tolist()]
    tree_ends = ends[begins].tolist()
    nodes, around = [], list[int]()  # the ends of the subtrees that a node is in
    for begin, end, tree_end in zip(begins, [*begins[1:], len(ends)], tree_ends, strict=True):
        while around and around[-1] <= begin:
            around.pop()
        nodes.append(_Node(begin, end, tree_end, len(around)))
        around.append(tree_end)
    return nodes


def _runs_of(level: list[_Node]) -> tuple[list[int], list[int]]:
    """Return cu_seqlens of the queries and of the keys of a level's call."""
    first = level[0]
    queries, keys = [first.end], [first.begin]
    for node in level:
        if node is not first:  # queries without keys up to its descendants, keys without queries
            queries += [node.end, node.end]
            keys += [keys[-1], node.begin]
        queries.append(node.tree_end)
        keys.append(node.end)
    return [i - first.end for i in queries], [i - first.begin for i in keys]
