"""tree_attention in Triton, backward: P is recomputed from the log-sum-exp.

One kernel for the gradient of the query, one for those of key and value; there are no atomics, so
every sum has a fixed order (Dao 2023, arXiv 2307.08691, algorithm 2). Tuples of arguments as in
triton_forward.py; `row_data` is (query, grad_out, lse in base 2, delta) of a block of queries.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_forward import (
    LOG2E,
    first_blocks,
    is_partial,
    load_keys,
    load_positions,
    load_rows,
    mask,
    previous_block,
    run_begin,
    scores_of,
    store_rows,
)
from .triton_tables import MAX_POSITION, MIN_POSITION, QUERY_END, VARYING

_HIGHEST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    grad_out,
    out,
    delta,
    tokens,
    grad_stride,
    grad_head_stride,
    value_width,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """delta [H, T]: grad_out . out of each token and head."""
    head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    grad = load_rows(
        grad_out + head * grad_head_stride,
        start,
        grad_stride,
        tokens,
        value_width,
        BLOCK,
        BLOCK_V,
        False,
        False,
    )
    o = load_rows(
        out + head * value_width,
        start,
        tl.num_programs(0) * value_width,
        tokens,
        value_width,
        BLOCK,
        BLOCK_V,
        False,
        False,
    )
    rows = start + tl.arange(0, BLOCK)
    sums = tl.sum(grad.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + head * tokens + rows, sums, mask=rows < tokens)


@triton.jit
def _load_query_rows(
    query,
    grad_out,
    lse,
    delta,
    row_start,
    rows,
    tokens,
    query_stride,
    grad_stride,
    width,
    value_width,
    ALL_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """row_data of a block of queries; beyond the last token P is 0."""
    q = load_rows(
        query, row_start, query_stride, tokens, width, BLOCK_M, BLOCK_D, False, ALL_COLUMNS
    )
    grad = load_rows(
        grad_out, row_start, grad_stride, tokens, value_width, BLOCK_M, BLOCK_V, False, ALL_COLUMNS
    )
    row_lse = tl.load(lse + rows, mask=rows < tokens, other=float("inf"))
    return q, grad, row_lse * LOG2E, tl.load(delta + rows, mask=rows < tokens, other=0.0)


@triton.jit
def _query_grad_block(
    sums,
    row_data,
    keys,
    start,
    partial,
    rows,
    row_position,
    forest,
    factor,
    cap_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add dS k of the keys from `start` on."""
    query, grad, lse, delta = row_data
    _, _, tokens, _ = forest
    k, v = load_keys(keys, start, tokens, ALL_KEYS, ALL_COLUMNS, BLOCK_N, BLOCK_D, BLOCK_V)
    scores = scores_of(tl.dot(query, k.T, input_precision="ieee"), cap_scale, HAS_CAP)
    grad_p = tl.dot(grad, v.T, input_precision="ieee")
    p = tl.exp2(scores * factor - lse[:, None])
    if partial:
        columns = start + tl.arange(0, BLOCK_N)[None, :]
        p = mask(p, 0.0, rows[:, None], columns, row_position[:, None], forest, HAS_WINDOW)
    grad_scores = p * (grad_p - delta[:, None])
    if HAS_CAP:
        grad_scores *= 1.0 - scores * scores
    return tl.dot(grad_scores.to(k.dtype), k, sums, input_precision="ieee")


@triton.jit(do_not_specialize=VARYING)
def query_grad_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    ends,
    positions,
    tables,
    grad_query,
    tokens,
    blocks,
    group,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    grad_stride,
    grad_head_stride,
    width,
    value_width,
    window_size,
    scale,
    factor,
    cap_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """grad_query [T, H, D]; programs and their key blocks as in forward_kernel."""
    head = tl.program_id(0).to(tl.int64)
    row_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    row_end = tl.minimum(row_start + BLOCK_M, tokens)
    key += head // group * key_head_stride
    value += head // group * value_head_stride
    keys = (key, value, key_stride, value_stride, width, value_width)
    forest = (ends, positions, tokens, window_size)
    rows = row_start + tl.arange(0, BLOCK_M)
    row_position = load_positions(positions, rows, tokens, HAS_WINDOW)
    highest = tl.max(row_position, 0)
    row_data = _load_query_rows(
        query + head * query_head_stride,
        grad_out + head * grad_head_stride,
        lse + head * tokens,
        delta + head * tokens,
        row_start,
        rows,
        tokens,
        query_stride,
        grad_stride,
        width,
        value_width,
        ALL_COLUMNS,
        BLOCK_M,
        BLOCK_D,
        BLOCK_V,
    )
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(row_start, row_end, BLOCK_N):
        sums = _query_grad_block(
            sums,
            row_data,
            keys,
            start,
            True,
            rows,
            row_position,
            forest,
            factor,
            cap_scale,
            HAS_WINDOW,
            HAS_CAP,
            False,
            ALL_COLUMNS,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
        )
    block, begin = first_blocks(tables, blocks, row_start // BLOCK_N, HAS_WINDOW)
    while block >= begin:
        run = run_begin(tables, blocks, block, begin)
        for other in range(run, block + 1):
            partial = is_partial(tables, blocks, other, row_end, highest, forest, HAS_WINDOW)
            sums = _query_grad_block(
                sums,
                row_data,
                keys,
                other * BLOCK_N,
                partial,
                rows,
                row_position,
                forest,
                factor,
                cap_scale,
                HAS_WINDOW,
                HAS_CAP,
                True,
                ALL_COLUMNS,
                BLOCK_N,
                BLOCK_D,
                BLOCK_V,
            )
        block = previous_block(tables, blocks, run)
    store_rows(
        grad_query + head * width,
        row_start,
        tl.num_programs(0) * width,
        tokens,
        width,
        sums * scale,
        BLOCK_M,
        BLOCK_D,
    )


@triton.jit
def _key_grad_block(
    sums,
    value_sums,
    row_data,
    k,
    v,
    partial,
    rows,
    columns,
    forest,
    factor,
    cap_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add dS^T q and P^T grad_out of a block of queries."""
    q, grad, lse, delta = row_data
    _, positions, tokens, _ = forest
    scores = scores_of(tl.dot(k, q.T, input_precision="ieee"), cap_scale, HAS_CAP)
    p = tl.exp2(scores * factor - lse[None, :])
    if partial:
        row = rows[None, :]
        row_position = load_positions(positions, row, tokens, HAS_WINDOW)
        p = mask(p, 0.0, row, columns[:, None], row_position, forest, HAS_WINDOW)
    value_sums = tl.dot(p.to(grad.dtype), grad, value_sums, input_precision="ieee")
    # The sum begins with -delta, which next to it would take registers.
    grad_p = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) - delta[None, :]
    grad_scores = p * tl.dot(v, grad.T, grad_p, input_precision="ieee")
    if HAS_CAP:
        grad_scores *= 1.0 - scores * scores
    return tl.dot(grad_scores.to(q.dtype), q, sums, input_precision="ieee"), value_sums


@triton.jit(do_not_specialize=VARYING)
def key_grad_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    ends,
    positions,
    tables,
    grad_key,
    grad_value,
    tokens,
    blocks,
    group,
    heads,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    grad_stride,
    grad_head_stride,
    width,
    value_width,
    window_size,
    scale,
    factor,
    cap_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """grad_key [T, H / heads, D] and grad_value [T, H / heads, D_v]: sums over `heads` query heads.

    Programs [H / heads, T / BLOCK_N]. The queries of a key block are contiguous: from its first
    token to its largest subtree end. All heads are one loop, which stays pipelined.
    """
    part = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_N
    key += part * heads // group * key_head_stride
    value += part * heads // group * value_head_stride
    keys = (key, value, key_stride, value_stride, width, value_width)
    forest = (ends, positions, tokens, window_size)
    k, v = load_keys(keys, start, tokens, False, ALL_COLUMNS, BLOCK_N, BLOCK_D, BLOCK_V)
    columns = start + tl.arange(0, BLOCK_N)
    end = tl.load(ends + columns, mask=columns < tokens, other=0)
    all_end = tl.min(tl.where(columns < tokens, end, _HIGHEST), 0)
    query_end = tl.minimum(tl.max(end, 0), tokens)
    if HAS_WINDOW:
        query_end = tl.load(tables + QUERY_END * blocks + start // BLOCK_N)
        lowest = tl.load(tables + MIN_POSITION * blocks + start // BLOCK_N)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_sums = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    count = tl.cdiv(query_end - start, BLOCK_M)
    for step in range(count * heads):
        head = part * heads + step // count
        row_start = start + step % count * BLOCK_M
        rows = row_start + tl.arange(0, BLOCK_M)
        row_data = _load_query_rows(
            query + head * query_head_stride,
            grad_out + head * grad_head_stride,
            lse + head * tokens,
            delta + head * tokens,
            row_start,
            rows,
            tokens,
            query_stride,
            grad_stride,
            width,
            value_width,
            ALL_COLUMNS,
            BLOCK_M,
            BLOCK_D,
            BLOCK_V,
        )
        partial = (row_start < start + BLOCK_N) | (row_start + BLOCK_M > all_end)
        if HAS_WINDOW:
            highest = tl.load(tables + MAX_POSITION * blocks + row_start // BLOCK_N)
            partial = partial | (highest - lowest >= window_size)
        sums, value_sums = _key_grad_block(
            sums,
            value_sums,
            row_data,
            k,
            v,
            partial,
            rows,
            columns,
            forest,
            factor,
            cap_scale,
            HAS_WINDOW,
            HAS_CAP,
            BLOCK_M,
            BLOCK_N,
        )
    stride = tl.num_programs(0)
    store_rows(
        grad_key + part * width,
        start,
        stride * width,
        tokens,
        width,
        sums * scale,
        BLOCK_N,
        BLOCK_D,
    )
    store_rows(
        grad_value + part * value_width,
        start,
        stride * value_width,
        tokens,
        value_width,
        value_sums,
        BLOCK_N,
        BLOCK_V,
    )
