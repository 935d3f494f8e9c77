"""decode_linear in Triton: a batch-invariant product with tensor cores.

K has up to 8 parts, whose length depends on K alone. Of a part, an element is one chain of
tensor-core instructions over ascending k, 16 elements each (float32: of fused multiply-adds, one
each), into one float32 accumulator. The parts are added in their order. Where tiles are too few for
the GPU, each part is a program and a second kernel adds them; else a program goes through all
parts. Tiles differ by the number of rows, in what is reused and how many programs there are. All
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
PARTS = 8  # of K, at most
PART_UNIT = 256  # elements of K; a multiple of every BLOCK_K
FEW_TILES = 264  # fewer leave multiprocessors idle (an H200 has 132): parts are programs
JOIN_BLOCK = 1024  # elements


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
    64: Tiles(64, 32, 64, 4, 6),
    512: Tiles(64, 128, 64, 4, 3),
    None: Tiles(128, 128, 64, 8, 3),
}
_FLOAT32 = {64: Tiles(32, 32, 32, 4, 2), None: Tiles(64, 64, 16, 4, 2)}
TILES = {torch.bfloat16: _BFLOAT16, torch.float32: _FLOAT32}


def part_of(k: int) -> int:
    """Return the elements of a part of K."""
    return max(ceil_div(k, PARTS * PART_UNIT), 1) * PART_UNIT


def choose_tiles(rows: int, dtype: torch.dtype) -> Tiles:
    return next(tiles for most, tiles in TILES[dtype].items() if most is None or rows <= most)


@triton.jit
def _part_of_tile(
    x_tile,
    weight_tile,
    has_row,
    k,
    first,
    end,
    ALL_OF_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the products of the elements first to end - 1 of K, added in ascending order."""
    depth = tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_K):
        if ALL_OF_K:
            a = tl.load(x_tile + start, mask=has_row, other=0.0)
            b = tl.load(weight_tile + start)
        else:
            inside = depth < k - start
            a = tl.load(x_tile + start, mask=has_row & inside, other=0.0)
            b = tl.load(weight_tile + start, mask=inside, other=0.0)
        sums = tl.dot(a, b.T, sums, input_precision="ieee")
    return sums


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
    part,
    part_stride,
    HAS_BIAS: tl.constexpr,
    ALL_OF_K: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [rows, n] = x [rows, k] @ weight [n, k].T + bias; a program per tile.

    Programs go through `GROUP` tiles of rows before the next tile of outputs.
    part: elements of a part of K. APART: a program per tile and part; out is [parts, rows, n].
    """
    row_tiles, tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group = tl.program_id(0) // (GROUP * tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    row = (group * GROUP + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    has_row = row[:, None] < rows
    x_tile = x + row[:, None].to(tl.int64) * x_stride + depth[None, :]
    loaded = tl.minimum(column, n - 1)  # the last one several times, which needs no mask
    weight_tile = weight + loaded[:, None].to(tl.int64) * weight_stride + depth[None, :]
    tiles_of = (x_tile, weight_tile, has_row, k)
    if APART:
        first = tl.program_id(1) * part
        end = tl.minimum(first + part, k)
        total = _part_of_tile(*tiles_of, first, end, ALL_OF_K, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, k, part):
            end = tl.minimum(first + part, k)
            total += _part_of_tile(*tiles_of, first, end, ALL_OF_K, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    target += tl.program_id(1) * part_stride
    tl.store(target, total.to(out.dtype.element_ty), mask=has_row & (column[None, :] < n))


@triton.jit
def join_kernel(
    parts,
    bias,
    out,
    rows,
    n,
    out_stride,
    part_stride,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, n] = the sum of parts [PARTS, rows, n], in their order, + bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = parts + row * n + column
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(source + part * part_stride, mask=column < n, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
    target = out + row * out_stride + column
    tl.store(target, total.to(out.dtype.element_ty), mask=column < n)


def decode_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
    apart: bool | None = None,
) -> Tensor:
    """x [M, K] and weight [N, K] of inner stride 1; see `hybridengine.kernels.decode_linear`.

    tiles, apart: None chooses them by M and N; the result has the same bits.
    out: [M, N] of out_dtype and of inner stride 1, to write to; None: a new tensor.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(rows, n, dtype=out_dtype)
    if out.numel() == 0:
        return out
    tiles = tiles or choose_tiles(rows, x.dtype)
    num_tiles = ceil_div(rows, tiles.block_m) * ceil_div(n, tiles.block_n)
    part = part_of(k)
    parts = ceil_div(k, part)
    if apart is None:
        apart = parts > 1 and num_tiles < FEW_TILES
    target = x.new_empty(parts, rows, n, dtype=torch.float32) if apart else out
    launch(
        linear_kernel,
        (num_tiles, parts if apart else 1),
        x,
        weight,
        None if apart else bias,
        target,
        rows,
        n,
        k,
        x.stride(0),
        weight.stride(0),
        target.stride(-2),
        part,
        target.stride(0) if apart else 0,
        HAS_BIAS=bias is not None and not apart,
        ALL_OF_K=k % tiles.block_k == 0,
        APART=apart,
        GROUP=GROUP,
        **tiles.arguments,
    )
    if apart:
        grid = (rows, ceil_div(n, JOIN_BLOCK))
        strides = (out.stride(0), target.stride(0))
        constants = {"HAS_BIAS": bias is not None, "PARTS": parts, "BLOCK": JOIN_BLOCK}
        launch(join_kernel, grid, target, bias, out, rows, n, *strides, **constants)
    return out
