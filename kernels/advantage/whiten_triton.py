"""whiten in Triton, in float64: moments of every block, moments of all blocks, and the result."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch

BLOCK = 2048
JOIN_BLOCK = 256


@triton.jit
def moments_kernel(values, mask, moments, size, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """moments [blocks, 3]: (count, mean, sum of squared deviations) of every block of values."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    unmasked = offsets < size
    if HAS_MASK:
        unmasked = unmasked & (tl.load(mask + offsets, mask=unmasked, other=0) != 0)
    value = tl.load(values + offsets, mask=unmasked, other=0.0).to(tl.float64)
    count = tl.sum(tl.where(unmasked, 1, 0)).to(tl.float64)
    mean = tl.sum(value) / tl.maximum(count, 1.0)
    deviation = tl.where(unmasked, value - mean, 0.0)
    tl.store(moments + block * 3, count)
    tl.store(moments + block * 3 + 1, mean)
    tl.store(moments + block * 3 + 2, tl.sum(deviation * deviation))


@triton.jit
def _joined(moments, rows, BLOCK: tl.constexpr):
    """Return (count, mean, sum of squared deviations) of all rows of moments [rows, 3]."""
    counts = tl.zeros([BLOCK], tl.float64)
    totals = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        count = tl.load(moments + row * 3, mask=row < rows, other=0.0)
        counts += count
        totals += count * tl.load(moments + row * 3 + 1, mask=row < rows, other=0.0)
    count_all = tl.sum(counts)
    mean_all = tl.sum(totals) / tl.maximum(count_all, 1.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        count = tl.load(moments + row * 3, mask=row < rows, other=0.0)
        apart = tl.load(moments + row * 3 + 1, mask=row < rows, other=0.0) - mean_all
        squares += tl.load(moments + row * 3 + 2, mask=row < rows, other=0.0)
        squares += tl.where(row < rows, count * apart * apart, 0.0)
    return count_all, mean_all, tl.sum(squares)


@triton.jit
def join_kernel(moments, rows, out, BLOCK: tl.constexpr):
    """out [3]: the moments of all rows of moments [rows, 3]. One program."""
    count, mean, squares = _joined(moments, rows, BLOCK)
    tl.store(out, count)
    tl.store(out + 1, mean)
    tl.store(out + 2, squares)


@triton.jit
def apply_kernel(
    values,
    mask,
    moments,
    out,
    size,
    ranks,
    epsilon,
    SHIFT_MEAN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    JOIN_BLOCK: tl.constexpr,
):
    """out: values, whitened by the joint moments of moments [ranks, 3]; 0 where masked."""
    count, mean, squares = _joined(moments, ranks, JOIN_BLOCK)
    scale = 1.0 / tl.sqrt(squares / tl.maximum(count - 1.0, 1.0) + epsilon)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    unmasked = inside
    if HAS_MASK:
        unmasked = unmasked & (tl.load(mask + offsets, mask=inside, other=0) != 0)
    value = tl.load(values + offsets, mask=unmasked, other=0.0).to(tl.float64)
    whitened = (value - mean) * scale
    if not SHIFT_MEAN:
        whitened += mean
    whitened = tl.where(unmasked, whitened, 0.0)
    tl.store(out + offsets, whitened.to(out.dtype.element_ty), mask=inside)


def moments_triton(values: Tensor, mask: Tensor | None) -> Tensor:
    """Compute (count, mean, sum of squared deviations) of the unmasked entries, float64 [3]."""
    blocks = ceil_div(values.numel(), BLOCK)
    moments = values.new_empty(blocks, 3, dtype=torch.float64)
    if blocks:
        launch(
            moments_kernel,
            (blocks,),
            values,
            mask,
            moments,
            values.numel(),
            HAS_MASK=mask is not None,
            BLOCK=BLOCK,
        )
    joined = values.new_empty(3, dtype=torch.float64)
    launch(join_kernel, (1,), moments, blocks, joined, BLOCK=JOIN_BLOCK)
    return joined


def apply_triton(
    values: Tensor, mask: Tensor | None, moments: Tensor, shift_mean: bool, epsilon: float
) -> Tensor:
    """Whiten contiguous values by moments [W, 3] of the ranks."""
    out = torch.empty_like(values)
    if values.numel():
        launch(
            apply_kernel,
            (ceil_div(values.numel(), BLOCK),),
            values,
            mask,
            moments,
            out,
            values.numel(),
            moments.shape[0],
            epsilon,
            SHIFT_MEAN=shift_mean,
            HAS_MASK=mask is not None,
            BLOCK=BLOCK,
            JOIN_BLOCK=JOIN_BLOCK,
        )
    return out
