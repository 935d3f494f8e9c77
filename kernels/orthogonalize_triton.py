"""The symmetric products of orthogonalize in Triton: tiles up to the diagonal, stored twice."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch

TILE, TILE_K = 128, 64
OPTIONS = {"num_warps": 8, "num_stages": 3}
FEWEST_ROWS = 4 * TILE  # 10 of 16 tiles; fewer rows leave cuBLAS's product in full


@triton.jit
def symmetric_kernel(
    x,
    out,
    rows,
    k,
    alpha,
    beta,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """out[b] [rows, rows] = alpha x[b] x[b].T (+ beta x[b] if ADD: rows = k); a program per tile.

    Tile t is the t-th of the lower triangle, row by row: row i begins with tile i (i + 1) / 2.
    """
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i -= (i * (i + 1) // 2 > tile).to(tl.int32)  # the root is rounded
    i += ((i + 1) * (i + 2) // 2 <= tile).to(tl.int32)
    j = tile - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    row, column = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, TILE_K)
    matrix = x + batch * rows * k
    left = matrix + row[:, None].to(tl.int64) * k + depth[None, :]
    right = matrix + column[None, :].to(tl.int64) * k + depth[:, None]
    has_row, has_column = row < rows, column < rows
    sums = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, TILE_K):
        inside = depth < k - start
        a = tl.load(left, mask=has_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(right, mask=has_column[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
        left += TILE_K
        right += TILE_K
    sums *= alpha
    at, both = row[:, None].to(tl.int64) * rows + column[None, :], has_row[:, None] & has_column
    if ADD:
        sums += beta * tl.load(matrix + at, mask=both, other=0.0).to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    target = out + batch * rows * rows
    tl.store(target + at, result, mask=both)
    if i != j:
        at = column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(target + at, tl.trans(result), mask=has_column[:, None] & has_row[None, :])


def symmetric(x: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Return alpha x xᵀ + beta x for each of x [B, M, K], contiguous; with beta, x is symmetric."""
    count, rows, k = x.shape
    out = x.new_empty(count, rows, rows)
    tiles = ceil_div(rows, TILE)
    if out.numel():
        launch(
            symmetric_kernel,
            (tiles * (tiles + 1) // 2, count),
            x,
            out,
            rows,
            k,
            alpha,
            beta,
            ADD=beta != 0,
            TILE=TILE,
            TILE_K=TILE_K,
            **OPTIONS,
        )
    return out


def takes(x: Tensor) -> bool:
    """Return whether matrices are taken; float32 has no tensor cores for these products."""
    return x.dtype in (torch.bfloat16, torch.float16) and min(x.shape[1:]) >= FEWEST_ROWS
