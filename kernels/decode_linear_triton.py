"""decode_linear in Triton: a batch-invariant product with tensor cores.

An element is one chain of tensor-core instructions over ascending k, 16 elements each (float32: of
fused multiply-adds, one each), into one float32 accumulator: K is never divided over warps or
programs. Tiles differ by the number of rows, in what is reused and how many programs there are. All
tiles of a GPU and dtype have the same instruction: on Hopper and later one of 64 rows of a warp
group, which smaller tiles would not get.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch

GROUP = 8  # tiles of rows that share a tile of the weight while it is in the second cache


class Tiles(NamedTuple):
    """Rows, outputs and elements of k of a tile; warps of a program; loads in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def arguments(self) -> dict[str, int]:
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
        return dict(zip(names, self, strict=True))


# Up to so many rows → tiles. Few rows: the weight is read once, by many programs.
_BFLOAT16 = {
    64: Tiles(64, 32, 128, 4, 4),
    512: Tiles(64, 128, 64, 4, 3),
    None: Tiles(128, 128, 64, 8, 3),
}
_FLOAT32 = {64: Tiles(32, 32, 32, 4, 2), None: Tiles(64, 64, 16, 4, 2)}
TILES = {torch.bfloat16: _BFLOAT16, torch.float32: _FLOAT32}


def choose_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    return next(tiles for most, tiles in TILES[dtype].items() if most is None or rows <= most)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k,
    x_stride,
    weight_stride,
    out_stride,
    HAS_BIAS: tl.constexpr,
    ALL_OF_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, n] = x [rows, k] @ weight [n, k].T + bias; a program per tile.

    Programs go through `GROUP` tiles of rows before the next tile of outputs.
    """
    row_tiles, tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    row = (group * GROUP + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    has_row, has_column = row[:, None] < rows, column[:, None] < n
    x_tile = x + row[:, None].to(tl.int64) * x_stride + depth[None, :]
    weight_tile = weight + column[:, None].to(tl.int64) * weight_stride + depth[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if ALL_OF_K:
            a = tl.load(x_tile + start, mask=has_row, other=0.0)
            b = tl.load(weight_tile + start, mask=has_column, other=0.0)
        else:
            inside = depth[None, :] < k - start
            a = tl.load(x_tile + start, mask=has_row & inside, other=0.0)
            b = tl.load(weight_tile + start, mask=has_column & inside, other=0.0)
        sums = tl.dot(a, b.T, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=has_row & (column[None, :] < n))


def decode_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [M, K] and weight [N, K] of inner stride 1; see `hybridengine.kernels.decode_linear`.

    tiles: None chooses them by M; the result has the same bits.
    out: [M, N] of out_dtype and of inner stride 1, to write to; None: a new tensor.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(rows, n, dtype=out_dtype)
    if out.numel() == 0:
        return out
    tiles = tiles or choose_tiles(rows, x.dtype)
    grid = (ceil_div(rows, tiles.block_m) * ceil_div(n, tiles.block_n),)
    launch(
        linear_kernel,
        grid,
        x,
        weight,
        bias,
        out,
        rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        ALL_OF_K=k % tiles.block_k == 0,
        GROUP=GROUP,
        **tiles.arguments,
    )
    return out
