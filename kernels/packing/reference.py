"""The reference backends of packing, the specification of its operators, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def layout_reference(
    mask: Tensor, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen)."""
    is_token, device = mask != 0, mask.device
    lengths = is_token.sum(1)
    tokens = is_token.reshape(-1).nonzero().squeeze(1)
    total = tokens.numel()
    rows = total if capacity is None else capacity
    if total > rows and device.type == "cpu":
        raise ValueError(
            f"pack: the mask has {total} tokens, but capacity is {rows}; give a larger capacity"
        )
    tokens = tokens[:rows]
    fits = tokens.numel()
    indices = torch.full((rows,), -1, dtype=torch.int64, device=device)
    indices[:fits] = tokens
    position_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    position_ids[:fits] = (is_token.cumsum(1).reshape(-1) - 1)[tokens]
    inverse = torch.full((mask.numel(),), -1, dtype=torch.int64, device=device)
    inverse[tokens] = torch.arange(fits, device=device)
    cu_seqlens = torch.zeros(mask.size(0) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lengths.cumsum(0).clamp(max=rows)
    num_dropped = torch.tensor(total - fits, device=device)
    max_seqlen = mask.size(1) if capacity is not None else max(lengths.tolist(), default=0)
    return cu_seqlens, position_ids, indices, inverse, num_dropped, torch.tensor(max_seqlen)


def move_reference(
    source: Tensor,
    index: Tensor,
    position_ids: Tensor | None,
    leading: int,
    out_shape: Sequence[int],
    fill: float,
    shift: int,
) -> Tensor:
    """Compute out.flatten()[t] = source.flatten()[index[t]], `fill` where index[t] is -1."""
    if shift:
        assert position_ids is not None
        index = torch.where(position_ids == 0, -1, index).roll(-1)
        index[-1:] = -1
    rows = source.flatten(0, leading - 1)
    out = source.new_full([index.numel(), *source.shape[leading:]], fill)
    has_source = index >= 0
    out[has_source] = rows[index[has_source]]
    return out.view([*out_shape, *source.shape[leading:]])


def forest_reference(tokens: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (input_ids, position_ids, subtree_ends, cu_seqlens, token_index) of `pack_forest`.

    Build the trie with a node per token: tokens int64 [S], ends int64 [N + 1].
    """
    ids, edges = tokens.tolist(), ends.tolist()
    children: list[dict[int, int]] = [{}]  # of every node, by token; node 0 is above the roots
    path = []  # the node of every token of the input
    for start, stop in pairwise(edges):
        node = 0
        for token in ids[start:stop]:
            if token not in children[node]:
                children[node][token] = len(children)
                children.append({})
            node = children[node][token]
            path.append(node)
    position = [0] * len(children)  # packed position of every node
    input_ids, depths, subtree_ends, starts = list[int](), list[int](), list[int](), list[int]()
    open_nodes: list[int] = []  # packed positions of the path to the last token
    stack = [(0, token, node) for token, node in reversed(children[0].items())]
    while stack:
        depth, token, node = stack.pop()
        for done in open_nodes[depth:]:
            subtree_ends[done] = len(input_ids)
        position[node] = len(input_ids)
        open_nodes[depth:] = [position[node]]
        if depth == 0:
            starts.append(position[node])
        input_ids.append(token)
        depths.append(depth)
        subtree_ends.append(0)
        stack += [(depth + 1, *child) for child in reversed(children[node].items())]
    for done in open_nodes:
        subtree_ends[done] = len(input_ids)
    return (
        torch.tensor(input_ids, dtype=torch.int64),
        torch.tensor(depths, dtype=torch.int64),
        torch.tensor(subtree_ends, dtype=torch.int32),
        torch.tensor([*starts, len(input_ids)], dtype=torch.int32),
        torch.tensor([position[node] for node in path], dtype=torch.int64),
    )
