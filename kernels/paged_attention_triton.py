"""paged_attention in Triton: the loop over keys of attention/triton_paths.py, over a paged cache.

The cache is [num_blocks, H_kv, block_size, D + D_v]: a row is the key of a position, then its
value. A program has a tile of the queries of one sequence, of all query heads that share a
key-value head; sequences take tiles by a search, so that the host waits for nothing.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch
from .attention.triton_finite import is_other
from .attention.triton_forward import begin_softmax
from .attention.triton_paths import add_keys, load_queries, path_tiles, store_results
from .attention.triton_tiles import (
    Inputs,
    block_sizes,
    capability_of,
    form_of,
    scale_arguments,
    strided,
)


@triton.jit(do_not_specialize=["num_slots"])
def write_kernel(
    key,
    value,
    cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    cache_head_stride,
    num_slots,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the key and value of a token and head; programs [T, H_kv]. Slots < 0 are left out.

    Where one is not finite, NaN as the key and 0 as the value: see attention/triton_finite.py.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < num_slots):
        row = cache + slot // SIZE * block_stride + head * cache_head_stride
        row += slot % SIZE * (WIDTH + VALUE_WIDTH)
        column, value_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        source = key + token * key_stride + head * key_head_stride + column
        keys = tl.load(source, mask=column < WIDTH, other=0.0)
        inside = value_column < VALUE_WIDTH
        source = value + token * value_stride + head * value_head_stride + value_column
        values = tl.load(source, mask=inside, other=0.0)
        others = tl.max(is_other(keys).to(tl.int32), 0) + tl.max(is_other(values).to(tl.int32), 0)
        keys = tl.where(others > 0, float("nan"), keys).to(keys.dtype)
        values = tl.where(others > 0, 0.0, values).to(values.dtype)
        tl.store(row + column, keys, mask=column < WIDTH)
        tl.store(row + WIDTH + value_column, values, mask=inside)


@triton.jit(do_not_specialize=["sequences", "window_size"])
def paged_kernel(
    inputs,
    cache,
    sinks,
    tables,
    out,
    out_stride,
    sequences,
    window_size,
    SIZE: tl.constexpr,
    form: tl.constexpr,
):
    """out [T, H, D_v]; programs [T * group / BLOCK_M + S, H_kv].

    The tiles of sequence s begin at query_start_loc[s] * group / BLOCK_M + s: at most one of a
    sequence has no rows.
    """
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_V: tl.constexpr = form.BLOCK_V
    group, width, value_width = inputs.group, inputs.width, inputs.value_width
    block_table, table_stride, query_start_loc, seq_lens = tables
    rows_of_head, block_stride, cache_head_stride = cache
    tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    low, high = tl.full((), 0, tl.int32), sequences
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start_loc + middle) * group // BLOCK_M + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    query_start = tl.load(query_start_loc + low)
    count = tl.load(query_start_loc + low + 1) - query_start
    row_start = (tile - query_start * group // BLOCK_M - low) * BLOCK_M
    if row_start < count * group:
        row = row_start + tl.arange(0, BLOCK_M)
        local, head = row // group, kv_head * group + row % group
        is_row = local < count
        first = tl.load(seq_lens + low) - count  # position of the sequence's first query
        row_position = first + local
        end = first + tl.minimum((row_start + BLOCK_M - 1) // group + 1, count)
        token = (query_start + local).to(tl.int64)
        query, query_stride, query_head_stride = inputs.query
        offsets = token * query_stride + head * query_head_stride
        q = load_queries(query, offsets, width, is_row, form.BLOCK_D)
        sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        total, top = begin_softmax(sinks, head, BLOCK_M)
        rows_of_head += kv_head * cache_head_stride
        block_table += low.to(tl.int64) * table_stride
        begin = tl.full((), 0, tl.int32)
        if form.HAS_WINDOW:
            lowest = first + row_start // group - window_size + 1
            begin = tl.maximum(lowest, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, end, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            is_key = position < end
            block = tl.load(block_table + position // SIZE, mask=is_key, other=0).to(tl.int64)
            rows = block * block_stride + position % SIZE * (width + value_width)
            seen = is_row[:, None] & (position[None, :] <= row_position[:, None])
            if form.HAS_WINDOW:
                seen = seen & (row_position[:, None] - position[None, :] < window_size)
            key_rows = rows_of_head + rows
            sums, total, top = add_keys(
                sums, total, top, q, key_rows, key_rows + width, is_key, seen, inputs, form
            )
        total = tl.where(total == 0, 1.0, total)
        rows = token * out_stride + head * value_width
        store_results(out, rows, value_width, is_row, sums, total, BLOCK_V)


def write_kv_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    (tokens, heads, width), value_width = key.shape, value.shape[2]
    if key.numel() == 0:
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    launch(
        write_kernel,
        (tokens, heads),
        *(key, value, kv_cache, slot_mapping, *key.stride()[:2], *value.stride()[:2]),
        *(*kv_cache.stride()[:2], kv_cache.shape[0] * kv_cache.shape[2]),
        *(kv_cache.shape[2], width, value_width, *block_sizes(width, value_width)),
    )


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    softmax_scale: float,
    window_size: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write the attention of `query` to `out`, see `hybridengine.kernels.paged_attention`.

    sequences: block_table, query_start_loc and seq_lens.
    """
    block_table, *starts = sequences
    (tokens, heads, width), (_, kv_heads, size, _) = query.shape, kv_cache.shape
    value_width, count, group = out.shape[2], len(starts[1]), heads // kv_heads
    if out.numel() == 0:
        return
    query, scores = scale_arguments(query, softmax_scale, softcap)
    tiles = path_tiles(max(width, value_width), query.dtype.itemsize, capability_of(query))
    sizes = (group, width, value_width, softmax_scale)
    inputs = Inputs(strided(query), None, None, None, *sizes, **scores)
    cache, tables = (
        (kv_cache, *kv_cache.stride()[:2]),
        (block_table, block_table.stride(0), *starts),
    )
    launch(
        paged_kernel,
        (tokens * group // tiles.block_m + count, kv_heads),
        *(inputs, cache, sinks, tables, out, out.stride(0), count, window_size or 0),
        SIZE=size,
        form=form_of(width, value_width, window_size, softcap, tiles),
        **tiles.options,
    )
