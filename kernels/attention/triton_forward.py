"""tree_attention in Triton, forward: one program per block of queries and head.

Online softmax in base 2 (Dao 2023, arXiv 2307.08691, algorithm 1), first over the query block's own
tokens, then over earlier key blocks (triton_tables.py). Only partially visible blocks are masked.
Tuples of arguments: `keys` is (key, value, key_stride, value_stride, width, value_width) of a head,
`forest` is (ends, positions, tokens, window_size).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tables import BEGIN, LAST, MIN_END, MIN_POSITION, PREVIOUS, RUN_BEGIN, VARYING

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite: a difference of two is not NaN


@triton.jit
def load_rows(
    base,
    first,
    stride,
    end,
    width,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
):
    """Load rows [first, first + ROWS) of a matrix; 0 from row `end` and column `width` on."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_W)[None, :]
    address = base + (tl.zeros((), tl.int64) + first) * stride + (row * stride + column)
    if ALL_ROWS and ALL_COLUMNS:
        return tl.load(address)
    elif ALL_COLUMNS:
        return tl.load(address, mask=first + row < end, other=0.0)
    elif ALL_ROWS:
        return tl.load(address, mask=column < width, other=0.0)
    else:
        return tl.load(address, mask=(first + row < end) & (column < width), other=0.0)


@triton.jit
def store_rows(base, first, stride, end, width, values, ROWS: tl.constexpr, BLOCK_W: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_W)[None, :]
    address = base + (tl.zeros((), tl.int64) + first) * stride + (row * stride + column)
    values = values.to(base.dtype.element_ty)
    tl.store(address, values, mask=(first + row < end) & (column < width))


@triton.jit
def load_keys(
    keys,
    start,
    tokens,
    ALL_ROWS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Keys and values of the tokens from `start` on."""
    key, value, key_stride, value_stride, width, value_width = keys
    k = load_rows(key, start, key_stride, tokens, width, ROWS, BLOCK_D, ALL_ROWS, ALL_COLUMNS)
    v = load_rows(
        value, start, value_stride, tokens, value_width, ROWS, BLOCK_V, ALL_ROWS, ALL_COLUMNS
    )
    return k, v


@triton.jit
def scores_of(products, cap_scale, HAS_CAP: tl.constexpr):
    """Scores up to a positive factor: q.k, or tanh(q.k scale / softcap), with a cap_scale of
    2 log2(e) scale / softcap. The error of tanh is absolute, about 2^-24, as scores need it."""
    if HAS_CAP:
        return 1.0 - 2.0 / (tl.exp2(products * cap_scale) + 1.0)
    else:
        return products


@triton.jit
def load_positions(positions, tokens_of_block, tokens, HAS_WINDOW: tl.constexpr):
    """Positions of tokens; anything without a window."""
    if HAS_WINDOW:
        return tl.load(positions + tokens_of_block, mask=tokens_of_block < tokens, other=0)
    else:
        return tokens_of_block


@triton.jit
def mask(values, other, rows, columns, row_position, forest, HAS_WINDOW: tl.constexpr):
    """Replace values by `other` where a query token (rows) does not see a key token (columns).

    rows and columns are two-dimensional; their shapes broadcast to that of values.
    """
    ends, positions, tokens, window_size = forest
    end = tl.load(ends + columns, mask=columns < tokens, other=0)
    visible = (columns <= rows) & (rows < end)
    if HAS_WINDOW:
        position = load_positions(positions, columns, tokens, True)
        visible = visible & (row_position - position < window_size)
    return tl.where(visible, values, other)


@triton.jit
def is_partial(tables, blocks, block, row_end, highest, forest, HAS_WINDOW: tl.constexpr):
    """Whether a query before row_end does not see all of an earlier key block."""
    partial = tl.load(tables + MIN_END * blocks + block) < row_end
    if HAS_WINDOW:
        _, _, _, window_size = forest
        lowest = tl.load(tables + MIN_POSITION * blocks + block)
        partial = partial | (highest - lowest >= window_size)
    return partial


@triton.jit
def first_blocks(tables, blocks, block, HAS_WINDOW: tl.constexpr):
    """The last and the first earlier key block of the queries that begin in `block`."""
    begin = tl.load(tables + BEGIN * blocks + block) if HAS_WINDOW else 0
    return tl.load(tables + LAST * blocks + block), begin


@triton.jit
def run_begin(tables, blocks, block, begin):
    """First block of the run that ends at `block`."""
    return tl.maximum(tl.load(tables + RUN_BEGIN * blocks + block), begin)


@triton.jit
def previous_block(tables, blocks, block):
    """The block to visit after `block`; -1 if there is none."""
    return tl.load(tables + PREVIOUS * blocks + block)


@triton.jit
def begin_softmax(sinks, head, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Total and maximum of rows that have seen no key yet, but the sink of their head.

    head: of all rows, or of each row.
    """
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2E
        top = tl.maximum(top, sink)
        total += tl.exp2(sink - top)
    return total, top


@triton.jit
def softmax_step(scores, total, top, factor):
    """Weights of a block of scores, what earlier sums are multiplied by, new total and maximum."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    p = tl.exp2(scores * factor - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return p, shrink, total * shrink + tl.sum(p, 1), new_top


@triton.jit
def _forward_block(
    sums,
    total,
    top,
    query,
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
    """Add the keys from `start` on to the online softmax."""
    _, _, tokens, _ = forest
    key, value, key_stride, value_stride, width, value_width = keys
    k = load_rows(key, start, key_stride, tokens, width, BLOCK_N, BLOCK_D, ALL_KEYS, ALL_COLUMNS)
    scores = scores_of(tl.dot(query, k.T, input_precision="ieee"), cap_scale, HAS_CAP)
    if partial:
        columns = start + tl.arange(0, BLOCK_N)[None, :]
        scores = mask(
            scores, -float("inf"), rows[:, None], columns, row_position[:, None], forest, HAS_WINDOW
        )
    p, shrink, total, top = softmax_step(scores, total, top, factor)
    v = load_rows(  # here, not next to k: the compiler then needs fewer registers
        value, start, value_stride, tokens, value_width, BLOCK_N, BLOCK_V, ALL_KEYS, ALL_COLUMNS
    )
    sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return sums, total, top


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    query,
    key,
    value,
    sinks,
    ends,
    positions,
    tables,
    out,
    lse,
    tokens,
    blocks,
    group,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    width,
    value_width,
    window_size,
    factor,
    cap_scale,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """out [T, H, D_v] and lse [H, T]; programs [H, T / BLOCK_M], those with most keys first."""
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
    q = load_rows(
        query + head * query_head_stride,
        row_start,
        query_stride,
        tokens,
        width,
        BLOCK_M,
        BLOCK_D,
        False,
        ALL_COLUMNS,
    )
    sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total, top = begin_softmax(sinks, head, HAS_SINKS, BLOCK_M)
    for start in range(row_start, row_end, BLOCK_N):
        sums, total, top = _forward_block(
            sums,
            total,
            top,
            q,
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
            sums, total, top = _forward_block(
                sums,
                total,
                top,
                q,
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
    total = tl.where(total == 0, 1.0, total)
    store_rows(
        out + head * value_width,
        row_start,
        tl.num_programs(0) * value_width,
        tokens,
        value_width,
        sums / total[:, None],
        BLOCK_M,
        BLOCK_V,
    )
    tl.store(lse + head * tokens + rows, (top + tl.log2(total)) * LN2, mask=rows < tokens)
