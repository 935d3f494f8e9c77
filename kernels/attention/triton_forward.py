"""tree_attention in Triton, forward: one program per block of queries and head.

Online softmax in base 2 (Dao 2023, arXiv 2307.08691, algorithm 1), first over the query block's own
tokens, then over earlier key blocks (triton_tables.py). Only partially visible blocks are masked.
Tuples of arguments: `keys` are key and value of a head, each its first row and the stride of rows,
`trees` is (ends, positions, tables), `forest` is (ends, positions, tokens, window_size).
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
def of_head(x, head):
    """The first row of a head, and the stride of its rows. x: as in `Inputs`."""
    return x[0] + head * x[2], x[1]


@triton.jit
def load_rows(
    x,
    first,
    end,
    width,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
):
    """Load rows [first, first + ROWS) of a matrix; 0 from row `end` and column `width` on.

    x: its first row and the stride of rows.
    """
    base, stride = x
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
def store_rows(out, head, first, end, width, values, ROWS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Write rows of `head` of out [T, heads, width], with a program in grid dimension 0 each."""
    base, stride = out + head * width, tl.num_programs(0) * width
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_W)[None, :]
    address = base + (tl.zeros((), tl.int64) + first) * stride + (row * stride + column)
    values = values.to(base.dtype.element_ty)
    tl.store(address, values, mask=(first + row < end) & (column < width))


@triton.jit
def load_key_rows(keys, inputs, start, tokens, ALL_ROWS: tl.constexpr, form: tl.constexpr):
    ROWS: tl.constexpr = form.BLOCK_N
    return load_rows(
        keys[0], start, tokens, inputs.width, ROWS, form.BLOCK_D, ALL_ROWS, form.ALL_COLUMNS
    )


@triton.jit
def load_value_rows(keys, inputs, start, tokens, ALL_ROWS: tl.constexpr, form: tl.constexpr):
    ROWS: tl.constexpr = form.BLOCK_N
    return load_rows(
        keys[1], start, tokens, inputs.value_width, ROWS, form.BLOCK_V, ALL_ROWS, form.ALL_COLUMNS
    )


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
def begin_rows(inputs, forest, form: tl.constexpr):
    """The head, the first row, rows and positions of a program's queries, and keys of the head."""
    _, positions, tokens, _ = forest
    head = tl.program_id(0).to(tl.int64)
    row_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * form.BLOCK_M
    rows = row_start + tl.arange(0, form.BLOCK_M)
    row_position = load_positions(positions, rows, tokens, form.HAS_WINDOW)
    kv_head = head // inputs.group
    keys = (of_head(inputs.key, kv_head), of_head(inputs.value, kv_head))
    return head, row_start, rows, row_position, keys


@triton.jit
def key_block(tables, blocks, block, row_end, highest, forest, form: tl.constexpr):
    """Where an earlier key block begins, and whether a query before row_end misses some of it."""
    partial = tl.load(tables + MIN_END * blocks + block) < row_end
    if form.HAS_WINDOW:
        _, _, _, window_size = forest
        lowest = tl.load(tables + MIN_POSITION * blocks + block)
        partial = partial | (highest - lowest >= window_size)
    return block * form.BLOCK_N, partial


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
def begin_softmax(sinks, head, BLOCK_M: tl.constexpr):
    """Total and maximum of rows that have seen no key yet, but the sink of their head.

    head: of all rows, or of each row.
    """
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), LOWEST, tl.float32)
    if sinks is not None:
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
    queries,
    keys,
    start,
    partial,
    forest,
    inputs,
    ALL_KEYS: tl.constexpr,
    form: tl.constexpr,
):
    """Add the keys from `start` on to the online softmax."""
    query, rows, row_position = queries
    _, _, tokens, _ = forest
    k = load_key_rows(keys, inputs, start, tokens, ALL_KEYS, form)
    products = tl.dot(query, k.T, input_precision="ieee")
    scores = scores_of(products, inputs.cap_scale, form.HAS_CAP)
    if partial:
        columns, position = start + tl.arange(0, form.BLOCK_N)[None, :], row_position[:, None]
        lowest = -float("inf")
        scores = mask(scores, lowest, rows[:, None], columns, position, forest, form.HAS_WINDOW)
    p, shrink, total, top = softmax_step(scores, total, top, inputs.factor)
    # Here, not next to k: the compiler then needs fewer registers.
    v = load_value_rows(keys, inputs, start, tokens, ALL_KEYS, form)
    sums = tl.dot(p.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return sums, total, top


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(inputs, sinks, trees, out, lse, tokens, blocks, window_size, form: tl.constexpr):
    """out [T, H, D_v] and lse [H, T]; programs [H, T / BLOCK_M], those with most keys first."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_V: tl.constexpr = form.BLOCK_V
    ends, positions, tables = trees
    forest = (ends, positions, tokens, window_size)
    head, row_start, rows, row_position, keys = begin_rows(inputs, forest, form)
    row_end, highest = tl.minimum(row_start + BLOCK_M, tokens), tl.max(row_position, 0)
    query, width = of_head(inputs.query, head), inputs.width
    q = load_rows(query, row_start, tokens, width, BLOCK_M, form.BLOCK_D, False, form.ALL_COLUMNS)
    queries = (q, rows, row_position)
    sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    total, top = begin_softmax(sinks, head, BLOCK_M)
    for start in range(row_start, row_end, form.BLOCK_N):
        sums, total, top = _forward_block(
            sums, total, top, queries, keys, start, True, forest, inputs, False, form
        )
    block, begin = first_blocks(tables, blocks, row_start // form.BLOCK_N, form.HAS_WINDOW)
    while block >= begin:
        run = run_begin(tables, blocks, block, begin)
        for other in range(run, block + 1):
            first, partial = key_block(tables, blocks, other, row_end, highest, forest, form)
            sums, total, top = _forward_block(
                sums, total, top, queries, keys, first, partial, forest, inputs, True, form
            )
        block = previous_block(tables, blocks, run)
    total = tl.where(total == 0, 1.0, total)
    results = sums / total[:, None]
    store_rows(out, head, row_start, tokens, inputs.value_width, results, BLOCK_M, BLOCK_V)
    tl.store(lse + head * tokens + rows, (top + tl.log2(total)) * LN2, mask=rows < tokens)
