"""The products of sparse_linear_token_log_probs in Triton, one program per row of the result.

Every sum runs in a fixed order, so results do not depend on the number of rows or on the device's
scheduling. A gradient of 0 is not multiplied: a masked row may hold NaN.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch, next_power_of_2

BLOCK = 1024  # elements of a row at a time


@triton.jit
def logits_kernel(hidden, weight, ids, row, vocab_range, logits, width, vocab, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    local = tl.load(ids + entry).to(tl.int64)
    if vocab_range is not None:
        local -= tl.load(vocab_range)
    inside = (local >= 0) & (local < vocab)
    a = hidden[0] + tl.load(row + entry).to(tl.int64) * hidden[1]
    b = weight[0] + tl.where(inside, local, 0) * weight[1]
    end = tl.where(inside, width, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(a + columns, columns < end, 0.0).to(tl.float32)
        total += x * tl.load(b + columns, columns < end, 0.0).to(tl.float32)
    tl.store(logits + entry, tl.sum(total, 0))


@triton.jit
def hidden_grad_kernel(
    weight, ids, ends, vocab_range, grad_logits, out, width, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.load(vocab_range) if vocab_range is not None else 0
    for entry in range(tl.load(ends + row), tl.load(ends + row + 1)):
        local = tl.load(ids + entry).to(tl.int64) - first
        grad = tl.load(grad_logits + entry)
        used = (local >= 0) & (local < vocab) & (grad != 0)
        source = weight[0] + tl.where(used, local, 0) * weight[1] + columns
        value = tl.load(source, columns < tl.where(used, width, 0), 0.0).to(tl.float32)
        total += tl.where(used, grad, 0.0) * value
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), columns < width)


@triton.jit
def weight_grad_kernel(
    hidden,
    row,
    order,
    begin,
    grad_logits,
    out,
    width,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    local = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(begin + local), tl.load(begin + local + 1)
    target = out + local * width + columns
    total = tl.zeros([BLOCK], tl.float32)
    end = width
    if ACCUMULATE:
        end = tl.where(first < last, width, 0)  # rows without entries are left alone
        total += tl.load(target, columns < end, 0.0)
    for i in range(first, last):
        entry = tl.load(order + i)
        grad = tl.load(grad_logits + entry)
        source = hidden[0] + tl.load(row + entry).to(tl.int64) * hidden[1] + columns
        value = tl.load(source, columns < tl.where(grad != 0, width, 0), 0.0).to(tl.float32)
        total += grad * value
    tl.store(target, total.to(out.dtype.element_ty), columns < end)


def _block(width: int) -> int:
    return min(BLOCK, next_power_of_2(max(width, 16)))


def logits(
    hidden: Tensor, weight: Tensor, ids: Tensor, row: Tensor, first: Tensor | None
) -> Tensor:
    out = hidden.new_empty(ids.shape[0], dtype=torch.float32)
    if out.numel():
        vocab, width = weight.shape
        operands = ((hidden, hidden.stride(0)), (weight, weight.stride(0)), ids, row, first)
        launch(logits_kernel, (ids.shape[0],), *operands, out, width, vocab, _block(width))
    return out


def hidden_grad(
    hidden: Tensor, weight: Tensor, ids: Tensor, ends: Tensor, first: Tensor | None, grad: Tensor
) -> Tensor:
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    (rows, width), block = hidden.shape, _block(hidden.shape[1])
    if out.numel():
        operands = ((weight, weight.stride(0)), ids, ends, first, grad, out)
        grid = (rows, ceil_div(width, block))
        launch(hidden_grad_kernel, grid, *operands, width, weight.shape[0], block)
    return out


def weight_grad(
    hidden: Tensor, row: Tensor, order: Tensor, begin: Tensor, grad: Tensor, out: Tensor, add: bool
) -> None:
    """order: entries sorted by id, stably. begin: [V + 1], where each id's begin in `order`."""
    (vocab, width), block = out.shape, _block(out.shape[1])
    if out.numel():
        operands = ((hidden, hidden.stride(0)), row, order, begin, grad, out)
        launch(weight_grad_kernel, (vocab, ceil_div(width, block)), *operands, width, add, block)
