"""tree_attention in Triton with bits that depend on a token's path alone, forward.

The path of a token are its ancestors and itself. Its keys are visited in blocks of BLOCK_N
positions counted from the root, in ascending order, whatever is packed beside it: not as they lie
in memory, as in triton_forward.py. `paged_attention` visits the keys of a cached sequence in the
same loop. Blocks that a token does not see at all, before or after those that it sees, change no
bit of it: they add 0 and multiply by 1.

A chain is a run of tokens of which each is the parent of the next. It is described at its first
token, by the packed index of that token's parent. Rows of a tile are (token, query head of a
group), so that a decoding step reads keys once for the group.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch
from .._once import once
from .reference import Heads, TreeOptions
from .triton_finite import replace_rows
from .triton_forward import LN2, begin_softmax, of_head, scores_of, softmax_step
from .triton_tiles import (
    MAX_HEAD_SIZE,
    Inputs,
    Tiles,
    capability_of,
    form_of,
    scale_arguments,
    strided,
)

_SCAN = 1024  # tokens at a time


def path_tiles(head_size: int, itemsize: int, capability: int) -> Tiles:
    """Return the tiles of head sizes up to 256, on whose BLOCK_N the bits depend."""
    column = 0 if head_size <= 64 else 1 if head_size <= 128 else 2
    if itemsize == 4:
        stages = 1 if capability < 100 else 2
        return (Tiles(16, 16, 4, 1), Tiles(32, 16, 8, stages), Tiles(8, 16, 4, 1))[column]
    return (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 16, 8, 2))[column]


@triton.jit
def parents_kernel(positions, begins, parents, SCAN: tl.constexpr):
    """The parent of the first token of each chain: the last earlier token at the position before.

    The packed order is depth first, so that this one is an ancestor.
    """
    token = tl.program_id(0)
    if tl.load(begins + token) == token:
        wanted = tl.load(positions + token) - 1
        found = tl.full((), -1, tl.int32)
        end = token
        while (end > 0) & (found < 0) & (wanted >= 0):
            index = end - SCAN + tl.arange(0, SCAN)
            position = tl.load(positions + index, mask=index >= 0, other=-1)
            found = tl.max(tl.where(position == wanted, index, -1), 0)
            end -= SCAN
        tl.store(parents + token, found)


@triton.jit
def find_ancestors(position, chain, positions, begins, parents):
    """Packed indices of the ancestors at `position` [BLOCK_N] of the tokens of a chain.

    Positions after the chain's first token are taken to be in the chain.
    """
    at = position * 0 + chain
    first = tl.load(positions + at)
    while tl.max(first - position, 0) > 0:
        before = first > position
        parent = tl.load(parents + at, mask=before, other=0)
        at = tl.where(before & (parent >= 0), tl.load(begins + tl.maximum(parent, 0)), at)
        # A root at another position than 0 has no parent; the loop has to end nevertheless.
        known = tl.where(parent < 0, position, tl.load(positions + at))
        first = tl.where(before, known, first)
    return at + position - first


@triton.jit
def add_keys(
    sums, total, top, query, key_rows, value_rows, is_key, visible, inputs, form: tl.constexpr
):
    """Add a block of keys to the online softmax.

    key_rows, value_rows: pointers to the rows of the keys. is_key: rows that are read; visible:
    which rows of the tile see them.
    """
    column = tl.arange(0, form.BLOCK_D)[None, :]
    reads = is_key[:, None] if form.ALL_COLUMNS else is_key[:, None] & (column < inputs.width)
    k = tl.load(key_rows[:, None] + column, mask=reads, other=0.0)
    products = tl.dot(query, k.T, input_precision="ieee")
    scores = scores_of(products, inputs.cap_scale, form.HAS_CAP)
    scores = tl.where(visible, scores, -float("inf"))
    p, shrink, total, top = softmax_step(scores, total, top, inputs.factor)
    column = tl.arange(0, form.BLOCK_V)[None, :]
    width = inputs.value_width
    reads = is_key[:, None] if form.ALL_COLUMNS else is_key[:, None] & (column < width)
    v = tl.load(value_rows[:, None] + column, mask=reads, other=0.0)
    sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return sums, total, top


@triton.jit
def load_queries(query, rows, width, is_row, BLOCK_D: tl.constexpr):
    """Load the rows of queries that begin at `rows`; 0 where there is none."""
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = is_row[:, None] & (column < width)
    return tl.load(query + rows[:, None] + column, mask=mask, other=0.0)


@triton.jit
def store_results(out, rows, value_width, is_row, sums, total, BLOCK_V: tl.constexpr):
    column = tl.arange(0, BLOCK_V)[None, :]
    mask = is_row[:, None] & (column < value_width)
    values = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] + column, values, mask=mask)


@triton.jit(do_not_specialize=["tokens", "window_size"])
def path_kernel(
    inputs, sinks, positions, begins, parents, out, lse, tokens, window_size, form: tl.constexpr
):
    """out [T, H, D_v] and lse [H, T]; programs [H_kv, T * group / BLOCK_M].

    The chains of a tile's tokens are attended one after the other.
    """
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_V: tl.constexpr = form.BLOCK_V
    group, width, value_width = inputs.group, inputs.width, inputs.value_width
    kv_head = tl.program_id(0).to(tl.int64)
    row_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    row = row_start + tl.arange(0, BLOCK_M)
    token, head = row // group, kv_head * group + row % group
    is_row = token < tokens
    key, key_stride = of_head(inputs.key, kv_head)
    value, value_stride = of_head(inputs.value, kv_head)
    row_position = tl.load(positions + token, mask=is_row, other=0)
    row_chain = tl.load(begins + token, mask=is_row, other=-1)
    query, query_stride, query_head_stride = inputs.query
    offsets = token.to(tl.int64) * query_stride + head * query_head_stride
    q = load_queries(query, offsets, width, is_row, form.BLOCK_D)
    sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total, top = begin_softmax(sinks, head, BLOCK_M)
    current = row_start // group
    last = tl.minimum((row_start + BLOCK_M - 1) // group, tokens - 1)
    while current <= last:
        chain = tl.load(begins + current)
        stop = tl.max(tl.where(row_chain == chain, token, 0), 0) + 1
        chain_position = tl.load(positions + chain)
        end = chain_position + stop - chain  # of the positions that these tokens see
        begin = tl.full((), 0, tl.int32)
        if form.HAS_WINDOW:
            lowest = chain_position + current - chain - window_size + 1
            begin = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, end, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            index = chain - chain_position + position
            if start < chain_position:  # a block with ancestors before the chain
                index = find_ancestors(position, chain, positions, begins, parents)
            index = index.to(tl.int64)
            seen = (row_chain == chain)[:, None] & (position[None, :] <= row_position[:, None])
            if form.HAS_WINDOW:
                seen = seen & (row_position[:, None] - position[None, :] < window_size)
            key_rows, value_rows = key + index * key_stride, value + index * value_stride
            sums, total, top = add_keys(
                sums, total, top, q, key_rows, value_rows, position < end, seen, inputs, form
            )
        current = stop
    total = tl.where(total == 0, 1.0, total)
    rows = (token.to(tl.int64) * tl.num_programs(0) * group + head) * value_width
    store_results(out, rows, value_width, is_row, sums, total, BLOCK_V)
    tl.store(lse + head * tokens + token, (top + tl.log2(total)) * LN2, mask=is_row)


def path_attention(
    inputs: Heads, options: TreeOptions, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D_v] and the log-sum-exp of scores and sink, [H, T] float32.

    Every token's position is its depth in its tree.
    """
    query, key, value = inputs
    ends, positions, _, window_size, softcap = options
    (tokens, heads, width), kv_heads, value_width = query.shape, key.shape[1], value.shape[2]
    out = query.new_empty(tokens, heads, value_width)
    lse = query.new_empty(heads, tokens, dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if max(width, value_width) > MAX_HEAD_SIZE:
        raise ValueError(
            f"tree_attention: heads of size {max(width, value_width)} have no batch-invariant form "
            f"on a GPU; expected at most {MAX_HEAD_SIZE}."
        )
    assert positions is not None
    begins, parents = once("chains", _chains, ends, positions)
    query, scores = scale_arguments(query, options.softmax_scale, softcap)
    tiles = path_tiles(max(width, value_width), query.dtype.itemsize, capability_of(query))
    group = heads // kv_heads
    (key, value), _ = replace_rows((key, value), mark_first=True)
    q, k, v = map(strided, (query, key, value))
    sizes = (group, width, value_width, options.softmax_scale)
    read = Inputs(q, k, v, None, *sizes, **scores)
    launch(
        path_kernel,
        (kv_heads, ceil_div(tokens * group, tiles.block_m)),
        *(read, sinks, positions, begins, parents, out, lse, tokens, window_size or 0),
        form=form_of(width, value_width, window_size, softcap, tiles),
        **tiles.options,
    )
    return out, lse


def _chains(ends: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token of every token's chain, and the parents of the first tokens, int32."""
    tokens = torch.arange(ends.shape[0], dtype=torch.int32, device=ends.device)
    is_first = torch.ones_like(ends, dtype=torch.bool)
    is_first[1:] = ends[:-1] <= tokens[1:]
    begins = torch.where(is_first, tokens, 0).cummax(0).values
    parents = torch.empty_like(begins)
    launch(parents_kernel, (len(begins),), positions, begins, parents, SCAN=_SCAN)
    return begins, parents
