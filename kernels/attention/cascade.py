"""Attention over a forest by FlashAttention: one call per level, both passes, exact.

The keys of a token are those of its own node up to itself, and all those of each ancestor. One
causal call attends within the nodes; for each depth one more attends to the inner nodes of that
depth (`cascade_tables.py`). A prompt with its responses takes two calls. Results are joined by
their log-sum-exp, as those of split keys (Juravsky et al. 2024, "Hydragen", arXiv 2402.05099). In
the backward (Dao 2023, arXiv 2307.08691, algorithm 2) P and delta are those of the full row where a
call gets the joined output and log-sum-exp; the gradients of the calls then add up.

Results are joined in float32, in a fixed order. A backward of FlashAttention adds the gradients of
queries in the order in which blocks finish, unless `torch.use_deterministic_algorithms` is on.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch, next_power_of_2
from .._per_token import unit_inner_stride
from .cascade_tables import Cascade
from .flash import FlashPair
from .reference import Heads
from .triton_forward import LOWEST

ROWS = 32  # of a program that joins


def cascade_forward(
    heads: Heads, softmax_scale: float, cascade: Cascade, pair: FlashPair
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and the log-sum-exp of scores, [H, T] float32."""
    query, key, value = map(unit_inner_stride, heads)
    own_out, own_lse = pair.forward(query, key, value, cascade.own_runs(softmax_scale))
    if not cascade.levels:
        return own_out, own_lse
    parts = []
    for level in cascade.levels:
        q, k, v = query[level.rows], key[level.keys], value[level.keys]
        parts.append(pair.forward(q, k, v, level.runs(softmax_scale)))
    (tokens, count, width), lse = own_out.shape, torch.empty_like(own_lse)
    out = own_out.new_empty(own_out.shape)
    launch(
        join_kernel,
        (count, ceil_div(tokens, ROWS)),
        (own_out, own_lse),
        tuple(parts),
        *(cascade.row_levels, cascade.row_ranges, out, lse, tokens, width),
        BLOCK=ROWS,
        BLOCK_D=next_power_of_2(width),
    )
    return out, lse


def cascade_backward(
    grad_out: Tensor,
    heads: Heads,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    cascade: Cascade,
    pair: FlashPair,
) -> Heads:
    """Return the gradients of query, key and value."""
    query, key, value = map(unit_inner_stride, heads)
    runs = cascade.own_runs(softmax_scale)
    own = pair.backward(grad_out, query, key, value, out, lse, runs)
    if not cascade.levels:
        return Heads(*own)
    parts = []
    for level in cascade.levels:
        rows, keys = level.rows, level.keys
        q, k, v = query[rows], key[keys], value[keys]
        row_lse, runs = lse[:, rows].contiguous(), level.runs(softmax_scale)
        parts.append(pair.backward(grad_out[rows], q, k, v, out[rows], row_lse, runs))
    of_query, of_key, of_value = zip(*parts, strict=True)
    of_rows = cascade.row_levels, cascade.row_ranges
    of_keys = cascade.key_levels, cascade.key_ranges
    return Heads(
        _sum_parts(own[0], of_query, *of_rows),
        _sum_parts(own[1], of_key, *of_keys),
        _sum_parts(own[2], of_value, *of_keys),
    )


def _sum_parts(own: Tensor, parts: tuple[Tensor, ...], levels: Tensor, ranges: Tensor) -> Tensor:
    """Return own [T, heads, D] with the parts of the levels that each row takes part in."""
    tokens, count, width = own.shape
    total = own.new_empty(own.shape)
    launch(
        sum_kernel,
        (count, ceil_div(tokens, ROWS)),
        *(own.contiguous(), tuple(part.contiguous() for part in parts)),
        *(levels, ranges, total, tokens, width),
        BLOCK=ROWS,
        BLOCK_D=next_power_of_2(width),
    )
    return total


@triton.jit
def _rows_of(row, head, heads, width, mask, BLOCK_D: tl.constexpr):
    """Offsets and mask of rows of one head in a contiguous [rows, heads, width]."""
    column = tl.arange(0, BLOCK_D)[None, :]
    offset = (row.to(tl.int64) * heads + head)[:, None] * width + column
    return offset, mask[:, None] & (column < width)


@triton.jit(do_not_specialize=["tokens"])
def join_kernel(
    own, parts, levels, ranges, out, lse, tokens, width, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """out [T, H, D] and lse [H, T] of all keys; programs [H, T / BLOCK].

    own, parts: pairs of out and lse, own of all rows, parts of those of their range.
    """
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tokens
    own_out, own_lse = own
    bits = tl.load(levels + row, mask=inside, other=0)
    own_sum = tl.load(own_lse + head * tokens + row, mask=inside, other=0.0)
    top = tl.maximum(own_sum, LOWEST)
    for i in tl.static_range(len(parts)):
        first, count = tl.load(ranges + 2 * i), tl.load(ranges + 2 * i + 1)
        has = ((bits >> i) & 1) != 0
        part = tl.load(parts[i][1] + head * count + row - first, mask=has, other=-float("inf"))
        top = tl.maximum(top, part)
    offset, mask = _rows_of(row, head, heads, width, inside, BLOCK_D)
    weight = tl.exp(own_sum - top)
    total = weight
    sums = tl.load(own_out + offset, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
    for i in tl.static_range(len(parts)):
        first, count = tl.load(ranges + 2 * i), tl.load(ranges + 2 * i + 1)
        has = ((bits >> i) & 1) != 0
        part = tl.load(parts[i][1] + head * count + row - first, mask=has, other=-float("inf"))
        weight = tl.exp(part - top)
        total += weight
        at, there = _rows_of(row - first, head, heads, width, has, BLOCK_D)
        values = tl.load(parts[i][0] + at, mask=there, other=0.0)
        sums += values.to(tl.float32) * weight[:, None]
    total = tl.where(total == 0, 1.0, total)
    tl.store(out + offset, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * tokens + row, top + tl.log(total), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(
    own, parts, levels, ranges, out, tokens, width, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """out [T, heads, D]: own and the parts of a row's levels; programs [heads, T / BLOCK]."""
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < tokens
    bits = tl.load(levels + row, mask=inside, other=0)
    offset, mask = _rows_of(row, head, heads, width, inside, BLOCK_D)
    sums = tl.load(own + offset, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(len(parts)):
        first = tl.load(ranges + 2 * i)
        has = ((bits >> i) & 1) != 0
        at, there = _rows_of(row - first, head, heads, width, has, BLOCK_D)
        sums += tl.load(parts[i] + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + offset, sums.to(out.dtype.element_ty), mask=mask)
