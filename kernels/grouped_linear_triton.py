"""grouped_linear in Triton: tiles that find their expert on the device, and a gradient per expert.

The host knows neither the groups nor how many tiles they need, and does not wait to learn it. It
launches T // BLOCK_M + E tiles of rows: group e has those from cu_counts[e] // BLOCK_M + e on,
which are at least as many as its rows need and end where the next group's begin. So a tile finds
its group by one comparison with every entry of cu_counts, without a prefix sum; those without rows
end at once. As in decode_linear, an element of the product is one chain of instructions over
ascending k, so a row's bits do not depend on other rows. A weight's gradient is one chain over the
rows of its group in every tile, which nothing else adds to.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch
from .decode_linear_triton import GROUP, Tiles

SEARCH = 256  # entries of cu_counts that a tile reads at once

# Up to so many rows per group, on average → tiles.
_HALF: dict[int | None, Tiles] = {64: Tiles(64, 128, 64, 4, 3), None: Tiles(128, 128, 64, 8, 3)}
_FLOAT32: dict[int | None, Tiles] = {None: Tiles(64, 64, 16, 4, 2)}
TILES = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _FLOAT32}


def choose_tiles(rows: int, groups: int, dtype: torch.dtype) -> Tiles:
    by_rows = TILES[dtype].items()
    return next(tiles for most, tiles in by_rows if most is None or rows <= most * groups)


@triton.jit
def _find_group(cu_counts, groups, tile, BLOCK_M: tl.constexpr, SEARCH: tl.constexpr):
    """Return the last group whose first tile is not after `tile`."""
    found = -1
    for start in range(0, groups, SEARCH):
        group = start + tl.arange(0, SEARCH)
        begin = tl.load(cu_counts + group, mask=group < groups, other=0)
        not_after = (begin // BLOCK_M + group <= tile) & (group < groups)
        found += tl.sum(not_after.to(tl.int32), 0)
    return found


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    weight,
    cu_counts,
    out,
    rows,
    groups,
    n,
    k,
    x_stride,
    group_stride,
    n_stride,
    k_stride,
    ALL_OF_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """out [rows, n] = x [rows, k] @ weight[e].T for the rows of every group e; a program per tile.

    Programs go through `GROUP` tiles of rows before the next tile of outputs.
    """
    row_tiles, column_tiles = rows // BLOCK_M + groups, tl.cdiv(n, BLOCK_N)
    first_tile = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    near = tl.minimum(row_tiles - first_tile, GROUP)
    within = tl.program_id(0) % (GROUP * column_tiles)
    tile = first_tile + within % near
    group = _find_group(cu_counts, groups, tile, BLOCK_M, SEARCH)
    begin, end = tl.load(cu_counts + group), tl.load(cu_counts + group + 1)
    first = begin + (tile - group - begin // BLOCK_M) * BLOCK_M
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = within // near * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    has_row, has_column = row[:, None] < end, column[None, :] < n
    x_tile = x + row[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_tile = weight + group.to(tl.int64) * group_stride
    weight_tile += column[None, :].to(tl.int64) * n_stride
    weight_tile += depth[:, None].to(tl.int64) * k_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if ALL_OF_K:
            a = tl.load(x_tile, mask=has_row, other=0.0)
            b = tl.load(weight_tile, mask=has_column, other=0.0)
        else:
            inside = depth < k - start
            a = tl.load(x_tile, mask=has_row & inside[None, :], other=0.0)
            b = tl.load(weight_tile, mask=has_column & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        x_tile += BLOCK_K
        weight_tile += BLOCK_K * k_stride
    target = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def weight_grad_kernel(
    left,
    right,
    cu_counts,
    out,
    m,
    n,
    left_stride,
    right_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[e] [m, n] = left.T @ right of the rows of every group e; a program per tile."""
    column_tiles = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * column_tiles
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    begin, end = tl.load(cu_counts + group), tl.load(cu_counts + group + 1)
    row = tile // column_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % column_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    has_row, has_column = row[:, None] < m, column[None, :] < n
    token = begin.to(tl.int64) + depth
    left_tile = left + token[None, :] * left_stride + row[:, None]
    right_tile = right + token[:, None] * right_stride + column[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = depth < end - start
        a = tl.load(left_tile, mask=has_row & inside[None, :], other=0.0)
        b = tl.load(right_tile, mask=has_column & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        left_tile += BLOCK_K * left_stride
        right_tile += BLOCK_K * right_stride
    target = out + group.to(tl.int64) * m * n + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=has_row & has_column)


def product(x: Tensor, weight: Tensor, cu_counts: Tensor) -> Tensor:
    """Return [T, N] from x [T, K] of inner stride 1 and weight [E, N, K] of any strides.

    It is fast if one of the two inner strides of the weight is 1.
    """
    (rows, k), (groups, n, _) = x.shape, weight.shape
    out = x.new_empty(rows, n)
    if out.numel() == 0:
        return out
    tiles = choose_tiles(rows, groups, x.dtype)
    launch(
        product_kernel,
        ((rows // tiles.block_m + groups) * ceil_div(n, tiles.block_n),),
        x,
        weight,
        cu_counts,
        out,
        rows,
        groups,
        n,
        k,
        x.stride(0),
        *weight.stride(),
        ALL_OF_K=k % tiles.block_k == 0,
        GROUP=GROUP,
        SEARCH=SEARCH,
        **tiles.arguments,
    )
    return out


def weight_grad(left: Tensor, right: Tensor, cu_counts: Tensor) -> Tensor:
    """Return left.T @ right of every group, [E, M, N].

    left: [T, M], right: [T, N], of inner stride 1.
    """
    groups, m, n = len(cu_counts) - 1, left.shape[1], right.shape[1]
    out = left.new_empty(groups, m, n)
    if out.numel() == 0:
        return out
    tiles = TILES[left.dtype][None]
    launch(
        weight_grad_kernel,
        (groups * ceil_div(m, tiles.block_m) * ceil_div(n, tiles.block_n),),
        left,
        right,
        cu_counts,
        out,
        m,
        n,
        left.stride(0),
        right.stride(0),
        **tiles.arguments,
    )
    return out
