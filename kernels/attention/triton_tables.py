"""Which key blocks a block of queries visits: tables of the blocks of a packed forest.

The tokens before a query block that any of its queries sees are ancestors of its first query,
because subtrees are nested. Going back from an ancestor in block b, the next block with an ancestor
is the nearest one before b whose largest subtree end is not below that of b: one link per key block
leads through all of them, whatever the query. Consecutive blocks form runs, so a program follows a
link per run, not per block. Everything is computed on the device, in memory linear in T.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch

# Rows of the tables, one column per block of tokens.
MAX_END = tl.constexpr(0)
MIN_END = tl.constexpr(1)
RUN_BEGIN = tl.constexpr(2)  # first block of the run that ends here
PREVIOUS = tl.constexpr(3)  # nearest earlier block with an ancestor of this block's last ancestor
LAST = tl.constexpr(4)  # nearest earlier block with an ancestor of the first token of this block
MAX_POSITION = tl.constexpr(5)  # from here on only with a window
MIN_POSITION = tl.constexpr(6)
BEGIN = tl.constexpr(7)  # first block within the window of the queries that begin here
QUERY_END = tl.constexpr(8)  # end of the query blocks within the window of the keys of this block
_ROWS, _ROWS_WITH_WINDOW = 5, 9

_SCAN = 1024  # blocks at a time
_HIGHEST = tl.constexpr(2147483647)
VARYING = ["tokens", "blocks", "window_size"]  # not specialized: they differ in every batch


@triton.jit(do_not_specialize=["tokens", "blocks"])
def bounds_kernel(
    ends, positions, tables, tokens, blocks, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """Largest and smallest subtree end and position of each block of tokens."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < tokens
    end = tl.load(ends + index, mask=inside, other=0)
    tl.store(tables + MAX_END * blocks + block, tl.max(end, 0))
    end = tl.where(inside, end, _HIGHEST)
    tl.store(tables + MIN_END * blocks + block, tl.min(end, 0))
    if HAS_WINDOW:
        position = tl.load(positions + index, mask=inside, other=0)
        tl.store(tables + MAX_POSITION * blocks + block, tl.max(position, 0))
        position = tl.where(inside, position, _HIGHEST)
        tl.store(tables + MIN_POSITION * blocks + block, tl.min(position, 0))


@triton.jit(do_not_specialize=["blocks"])
def links_kernel(tables, blocks, BLOCK: tl.constexpr, SCAN: tl.constexpr):
    """RUN_BEGIN, PREVIOUS and LAST of each block; -1 if there is no such block."""
    block = tl.program_id(0)
    start = block * BLOCK
    max_end = tables + MAX_END * blocks
    end = tl.load(max_end + block)
    run = tl.full((), 0, tl.int32)
    previous = tl.full((), -1, tl.int32)
    last = tl.full((), -1, tl.int32)
    for first in range(0, block, SCAN):
        index = first + tl.arange(0, SCAN)
        before = index < block
        ends = tl.load(max_end + index, mask=before, other=-1)
        following = tl.load(max_end + index + 1, mask=before, other=-1)
        run = tl.maximum(run, tl.max(tl.where(ends < following, index + 1, 0), 0))
        previous = tl.maximum(previous, tl.max(tl.where(before & (ends >= end), index, -1), 0))
        last = tl.maximum(last, tl.max(tl.where(ends > start, index, -1), 0))
    tl.store(tables + RUN_BEGIN * blocks + block, run)
    tl.store(tables + PREVIOUS * blocks + block, previous)
    tl.store(tables + LAST * blocks + block, last)


@triton.jit(do_not_specialize=VARYING)
def window_kernel(
    positions,
    tables,
    tokens,
    blocks,
    window_size,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """BEGIN and QUERY_END of each block."""
    block = tl.program_id(0)
    start = block * BLOCK
    max_end = tables + MAX_END * blocks
    tree_end = tl.full((), 0, tl.int32)  # of the token before `start`
    for first in range(0, block, SCAN):
        index = first + tl.arange(0, SCAN)
        tree_end = tl.maximum(tree_end, tl.max(tl.load(max_end + index, index < block, 0), 0))
    rows = start + tl.arange(0, BLOCK_M)
    earlier_keys = rows < tl.minimum(tokens, tree_end)  # the other queries see no earlier key
    lowest = tl.min(tl.load(positions + rows, mask=earlier_keys, other=_HIGHEST), 0)
    begin = block
    for first in range(0, block, SCAN):
        index = first + tl.arange(0, SCAN)
        ends = tl.load(max_end + index, mask=index < block, other=-1)
        position = tl.load(tables + MAX_POSITION * blocks + index, mask=index < block, other=0)
        visible = (ends > start) & (position > lowest - window_size)
        begin = tl.minimum(begin, tl.min(tl.where(visible, index, block), 0))
    tl.store(tables + BEGIN * blocks + block, begin)

    end = tl.minimum(tl.load(max_end + block), tokens)
    highest = tl.load(tables + MAX_POSITION * blocks + block)
    last = block
    for first in range(block, tl.cdiv(end, BLOCK), SCAN):
        index = first + tl.arange(0, SCAN)
        position = tl.load(tables + MIN_POSITION * blocks + index, index < blocks, _HIGHEST)
        last = tl.maximum(last, tl.max(tl.where(position - window_size < highest, index, 0), 0))
    tl.store(tables + QUERY_END * blocks + block, tl.minimum((last + 1) * BLOCK, end))


def block_tables(
    subtree_ends: Tensor,
    position_ids: Tensor | None,
    window_size: int | None,
    block: int,
    block_m: int,
) -> Tensor:
    """Return the tables, int32 [rows, T / block], for key blocks of `block` tokens.

    block_m: number of queries of a program, a multiple of `block`.
    """
    tokens, blocks = subtree_ends.shape[0], ceil_div(subtree_ends.shape[0], block)
    rows = _ROWS if window_size is None else _ROWS_WITH_WINDOW
    tables = torch.empty(rows, blocks, dtype=torch.int32, device=subtree_ends.device)
    grid = (blocks,)
    launch(
        bounds_kernel,
        grid,
        subtree_ends,
        position_ids,
        tables,
        tokens,
        blocks,
        window_size is not None,
        block,
    )
    launch(links_kernel, grid, tables, blocks, block, _SCAN)
    if window_size is not None:
        launch(
            window_kernel,
            grid,
            position_ids,
            tables,
            tokens,
            blocks,
            window_size,
            block_m,
            block,
            _SCAN,
        )
    return tables
