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
    begin_rows,
    first_blocks,
    key_block,
    load_key_rows,
    load_positions,
    load_rows,
    load_value_rows,
    mask,
    of_head,
    previous_block,
    run_begin,
    scores_of,
    store_rows,
)
from .triton_tables import MAX_POSITION, MIN_POSITION, QUERY_END, VARYING

_HIGHEST = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(inputs, out, delta, tokens, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr):
    """delta [H, T]: grad_out . out of each token and head."""
    head, width = tl.program_id(0).to(tl.int64), inputs.value_width
    start = tl.program_id(1) * BLOCK
    of_grad = of_head(inputs.grad_out, head)
    grad = load_rows(of_grad, start, tokens, width, BLOCK, BLOCK_V, False, False)
    of_out = (out + head * width, tl.num_programs(0) * width)
    o = load_rows(of_out, start, tokens, width, BLOCK, BLOCK_V, False, False)
    rows = start + tl.arange(0, BLOCK)
    sums = tl.sum(grad.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + head * tokens + rows, sums, mask=rows < tokens)


@triton.jit
def _load_query_rows(inputs, lse, delta, head, row_start, rows, tokens, form: tl.constexpr):
    """row_data of a block of queries; beyond the last token P is 0."""
    ALL: tl.constexpr = form.ALL_COLUMNS
    BLOCK_M: tl.constexpr = form.BLOCK_M
    query, grad_out = of_head(inputs.query, head), of_head(inputs.grad_out, head)
    q = load_rows(query, row_start, tokens, inputs.width, BLOCK_M, form.BLOCK_D, False, ALL)
    width = inputs.value_width
    grad = load_rows(grad_out, row_start, tokens, width, BLOCK_M, form.BLOCK_V, False, ALL)
    at = head * tokens + rows
    row_lse = tl.load(lse + at, mask=rows < tokens, other=float("inf"))
    return q, grad, row_lse * LOG2E, tl.load(delta + at, mask=rows < tokens, other=0.0)


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
    inputs,
    ALL_KEYS: tl.constexpr,
    form: tl.constexpr,
):
    """Add dS k of the keys from `start` on."""
    query, grad, lse, delta = row_data
    _, _, tokens, _ = forest
    k = load_key_rows(keys, inputs, start, tokens, ALL_KEYS, form)
    v = load_value_rows(keys, inputs, start, tokens, ALL_KEYS, form)
    products = tl.dot(query, k.T, input_precision="ieee")
    scores = scores_of(products, inputs.cap_scale, form.HAS_CAP)
    grad_p = tl.dot(grad, v.T, input_precision="ieee")
    p = tl.exp2(scores * inputs.factor - lse[:, None])
    if partial:
        columns, position = start + tl.arange(0, form.BLOCK_N)[None, :], row_position[:, None]
        p = mask(p, 0.0, rows[:, None], columns, position, forest, form.HAS_WINDOW)
    grad_scores = p * (grad_p - delta[:, None])
    if form.HAS_CAP:
        grad_scores *= 1.0 - scores * scores
    return tl.dot(grad_scores.to(k.dtype), k, sums, input_precision="ieee")


@triton.jit(do_not_specialize=VARYING)
def query_grad_kernel(
    inputs, lse, delta, trees, grad_query, tokens, blocks, window_size, form: tl.constexpr
):
    """grad_query [T, H, D]; programs and their key blocks as in forward_kernel."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_D: tl.constexpr = form.BLOCK_D
    ends, positions, tables = trees
    forest = (ends, positions, tokens, window_size)
    head, row_start, rows, row_position, keys = begin_rows(inputs, forest, form)
    row_end, highest = tl.minimum(row_start + BLOCK_M, tokens), tl.max(row_position, 0)
    row_data = _load_query_rows(inputs, lse, delta, head, row_start, rows, tokens, form)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(row_start, row_end, form.BLOCK_N):
        sums = _query_grad_block(
            sums, row_data, keys, start, True, rows, row_position, forest, inputs, False, form
        )
    block, begin = first_blocks(tables, blocks, row_start // form.BLOCK_N, form.HAS_WINDOW)
    while block >= begin:
        run = run_begin(tables, blocks, block, begin)
        for other in range(run, block + 1):
            first, partial = key_block(tables, blocks, other, row_end, highest, forest, form)
            sums = _query_grad_block(
                sums, row_data, keys, first, partial, rows, row_position, forest, inputs, True, form
            )
        block = previous_block(tables, blocks, run)
    grads = sums * inputs.scale
    store_rows(grad_query, head, row_start, tokens, inputs.width, grads, BLOCK_M, BLOCK_D)


@triton.jit
def _key_grad_block(
    sums, value_sums, row_data, k, v, partial, rows, columns, forest, inputs, form: tl.constexpr
):
    """Add dS^T q and P^T grad_out of a block of queries."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    HAS_WINDOW: tl.constexpr = form.HAS_WINDOW
    q, grad, lse, delta = row_data
    _, positions, tokens, _ = forest
    products = tl.dot(k, q.T, input_precision="ieee")
    scores = scores_of(products, inputs.cap_scale, form.HAS_CAP)
    p = tl.exp2(scores * inputs.factor - lse[None, :])
    if partial:
        row = rows[None, :]
        row_position = load_positions(positions, row, tokens, HAS_WINDOW)
        p = mask(p, 0.0, row, columns[:, None], row_position, forest, HAS_WINDOW)
    value_sums = tl.dot(p.to(grad.dtype), grad, value_sums, input_precision="ieee")
    # The sum begins with -delta, which next to it would take registers.
    grad_p = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) - delta[None, :]
    grad_scores = p * tl.dot(v, grad.T, grad_p, input_precision="ieee")
    if form.HAS_CAP:
        grad_scores *= 1.0 - scores * scores
    return tl.dot(grad_scores.to(q.dtype), q, sums, input_precision="ieee"), value_sums


@triton.jit(do_not_specialize=VARYING)
def key_grad_kernel(
    inputs, lse, delta, trees, grads, tokens, blocks, heads, window_size, form: tl.constexpr
):
    """grad_key [T, H / heads, D] and grad_value [T, H / heads, D_v]: sums over `heads` query heads.

    Programs [H / heads, T / BLOCK_N]. The queries of a key block are contiguous: from its first
    token to its largest subtree end. All heads are one loop, which stays pipelined.
    """
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_D: tl.constexpr = form.BLOCK_D
    BLOCK_V: tl.constexpr = form.BLOCK_V
    ends, positions, tables = trees
    grad_key, grad_value = grads
    part = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_N
    kv_head = part * heads // inputs.group
    keys = (of_head(inputs.key, kv_head), of_head(inputs.value, kv_head))
    forest = (ends, positions, tokens, window_size)
    k = load_key_rows(keys, inputs, start, tokens, False, form)
    v = load_value_rows(keys, inputs, start, tokens, False, form)
    columns = start + tl.arange(0, BLOCK_N)
    end = tl.load(ends + columns, mask=columns < tokens, other=0)
    all_end = tl.min(tl.where(columns < tokens, end, _HIGHEST), 0)
    query_end = tl.minimum(tl.max(end, 0), tokens)
    if form.HAS_WINDOW:
        query_end = tl.load(tables + QUERY_END * blocks + start // BLOCK_N)
        lowest = tl.load(tables + MIN_POSITION * blocks + start // BLOCK_N)
    sums = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    value_sums = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    count = tl.cdiv(query_end - start, BLOCK_M)
    for step in range(count * heads):
        head = part * heads + step // count
        row_start = start + step % count * BLOCK_M
        rows = row_start + tl.arange(0, BLOCK_M)
        row_data = _load_query_rows(inputs, lse, delta, head, row_start, rows, tokens, form)
        partial = (row_start < start + BLOCK_N) | (row_start + BLOCK_M > all_end)
        if form.HAS_WINDOW:
            highest = tl.load(tables + MAX_POSITION * blocks + row_start // BLOCK_N)
            partial = partial | (highest - lowest >= window_size)
        sums, value_sums = _key_grad_block(
            sums, value_sums, row_data, k, v, partial, rows, columns, forest, inputs, form
        )
    sums *= inputs.scale
    store_rows(grad_key, part, start, tokens, inputs.width, sums, BLOCK_N, BLOCK_D)
    store_rows(grad_value, part, start, tokens, inputs.value_width, value_sums, BLOCK_N, BLOCK_V)
