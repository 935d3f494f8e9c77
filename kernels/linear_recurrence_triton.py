"""linear_recurrence in Triton, forwards: the chunked form of the recurrence.

A chunk is CHUNK tokens of one segment, G the sum of its g up to and with a token, S the state that
it starts from. The delta rule's updates U of a chunk solve a triangular system (Yang et al. 2024,
arXiv 2412.06464, section 3.3):

    A_ij = k_i . (exp(G_i - G_j) k_j), j < i        U = (I + diag(beta) A)^-1 R
    B_ij = scale q_i . (exp(G_i - G_j) k_j), j <= i    R = diag(beta) (V - (exp(G) K) S)
    out = scale (exp(G) Q) S + B U                  next S = exp(G_last) S + (exp(G_last - G) K)^T U

Without the delta rule U = diag(beta) V. Scores and inverses are computed for all chunks at once.
States follow one another: a program computes one tile of all states of a tree, a segment after its
parent. Exponents are differences that are not positive: with a decay per channel, rows and columns
of scores are scaled relative to a row between them, and pairs of one block of ROWS rows one by one.

The host launches T // CHUNK + S chunks: segment s has those from its begin // CHUNK + s on, which
are at least as many as its tokens need (grouped_linear_triton does so with tiles).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch, next_power_of_2

ROWS = 16  # of a block of scores
NUM_WARPS = 8
NORM_EPS = tl.constexpr(1e-6)  # of flash-linear-attention's l2norm


@triton.jit
def chunk_bounds(ends, owners, chunk, CHUNK: tl.constexpr):
    """Return the chunk's first token, and the end of its segment."""
    segment = tl.load(owners + chunk)
    begin = tl.load(ends + segment)
    return begin + (chunk - begin // CHUNK - segment) * CHUNK, tl.load(ends + segment + 1)


@triton.jit
def load_rows(
    x, row, has, head, row_stride, head_stride, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the columns of a head from `first` on, in float32; 0 where there are none."""
    column = first + tl.arange(0, BLOCK)
    source = x + row.to(tl.int64)[:, None] * row_stride + head * head_stride + column[None, :]
    return tl.load(source, mask=has[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_keys(
    x,
    row,
    has,
    head,
    row_stride,
    head_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2_NORM: tl.constexpr,
):
    """Return rows of q or k, normed if L2_NORM."""
    rows = load_rows(x, row, has, head, row_stride, head_stride, 0, K, BLOCK_K)
    if L2_NORM:
        rows *= tl.rsqrt(tl.sum(rows * rows, 1) + NORM_EPS)[:, None]
    return rows


@triton.jit
def load_decays(
    decays,
    row,
    has,
    head,
    heads,
    first,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return G of rows, [rows, BLOCK_K] with a decay per channel, else [rows, 1]."""
    at = row.to(tl.int64) * heads + head
    if CHANNELS:
        column = first + tl.arange(0, BLOCK_K)
        source = decays + at[:, None] * K + column[None, :]
        sums = tl.load(source, mask=has[:, None] & (column < K)[None, :], other=0.0)
    else:
        sums = tl.load(decays + at, mask=has, other=0.0)[:, None]
    return sums


@triton.jit
def load_decay(
    decays, row, head, heads, first, CHANNELS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return G of one row, [BLOCK_K] or [1]."""
    at = row.to(tl.int64) * heads + head
    if CHANNELS:
        column = first + tl.arange(0, BLOCK_K)
        sums = tl.load(decays + at * K + column, mask=column < K, other=0.0)
    else:
        sums = tl.load(decays + at + tl.arange(0, 1))
    return sums


@triton.jit
def decay_of(difference):
    """Return exp of a difference of G that is not positive; 1 where it is of no pair."""
    return tl.exp(tl.minimum(difference.to(tl.float32), 0.0))


@triton.jit
def load_betas(beta, row, has, head, heads, HAS_BETA: tl.constexpr):
    if HAS_BETA:
        betas = tl.load(beta + row.to(tl.int64) * heads + head, mask=has, other=0.0)
    else:
        betas = tl.where(has, 1.0, 0.0)
    return betas


@triton.jit
def load_square(squares, chunk, head, heads, CHUNK: tl.constexpr):
    """Return the [CHUNK, CHUNK] matrix of a chunk and a head."""
    i = tl.arange(0, CHUNK)
    at = (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    return tl.load(squares + at + i[:, None] * CHUNK + i[None, :])


@triton.jit
def state_tile(
    states,
    index,
    head,
    heads,
    first_k,
    first_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return the addresses of a tile of a state [K, V], and which of them exist."""
    i = first_k + tl.arange(0, BLOCK_K)
    j = first_v + tl.arange(0, BLOCK_V)
    at = (index.to(tl.int64) * heads + head) * (K * V)
    return states + at + i[:, None] * V + j[None, :], (i < K)[:, None] & (j < V)[None, :]


@triton.jit
def decays_kernel(
    g,
    decays,
    ends,
    owners,
    heads,
    CHANNELS: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """decays: G, of the shape of g. A program per chunk and head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    row = start + tl.arange(0, CHUNK)
    has = row < end
    sums = load_decays(g, row, has, head, heads, 0, CHANNELS, K, BLOCK_K).to(
        decays.dtype.element_ty
    )
    sums = tl.cumsum(sums, 0)
    at = row.to(tl.int64)[:, None] * heads + head
    if CHANNELS:
        column = tl.arange(0, BLOCK_K)
        tl.store(decays + at * K + column[None, :], sums, mask=has[:, None] & (column < K)[None, :])
    else:
        tl.store(decays + at, sums, mask=has[:, None])


@triton.jit
def scores_kernel(
    q,
    k,
    decays,
    ends,
    owners,
    squares,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    scale,
    heads,
    shared,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    L2_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """squares [1 or 2, chunks, H, CHUNK, CHUNK]: B, then A. A program per ROWS rows of a chunk."""
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    first = start + block * ROWS
    row, column = first + tl.arange(0, ROWS), start + tl.arange(0, CHUNK)
    has_row, has_column = row < end, column < end
    key_head = head // shared
    q_i = load_keys(q, row, has_row, key_head, q_stride, q_head_stride, K, BLOCK_K, L2_NORM)
    k_i = load_keys(k, row, has_row, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM)
    k_j = load_keys(k, column, has_column, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM)
    g_i = load_decays(decays, row, has_row, head, heads, 0, CHANNELS, K, BLOCK_K)
    g_j = load_decays(decays, column, has_column, head, heads, 0, CHANNELS, K, BLOCK_K)
    of_keys = tl.zeros((ROWS, CHUNK), tl.float32)
    if CHANNELS:
        nearest = tl.minimum(first, end - 1)
        between = load_decay(decays, nearest, head, heads, 0, CHANNELS, K, BLOCK_K)[None, :]
        left = decay_of(g_i - between)
        right = tl.where((column < first)[:, None], k_j * decay_of(between - g_j), 0.0)
        of_queries = tl.dot(q_i * left, tl.trans(right), input_precision=PRECISION)
        if DELTA:
            of_keys = tl.dot(k_i * left, tl.trans(right), input_precision=PRECISION)
        other = first
        while other < tl.minimum(first + ROWS, end):
            one = other + tl.arange(0, 1)
            key = load_keys(
                k, one, one < end, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM
            )
            key *= decay_of(
                g_i - load_decay(decays, other, head, heads, 0, CHANNELS, K, BLOCK_K)[None, :]
            )
            here = (column == other)[None, :]
            of_queries = tl.where(here, tl.sum(q_i * key, 1)[:, None], of_queries)
            if DELTA:
                of_keys = tl.where(here, tl.sum(k_i * key, 1)[:, None], of_keys)
            other += 1
    else:
        between = decay_of(g_i - tl.trans(g_j))
        of_queries = tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION) * between
        if DELTA:
            of_keys = tl.dot(k_i, tl.trans(k_j), input_precision=PRECISION) * between
    lower = (row[:, None] >= column[None, :]) & has_row[:, None]
    at = (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    target = squares + at + (row - start)[:, None] * CHUNK + (column - start)[None, :]
    tl.store(target, tl.where(lower, of_queries * scale, 0.0))
    if DELTA:
        lower &= row[:, None] > column[None, :]
        target += tl.num_programs(0).to(tl.int64) * heads * (CHUNK * CHUNK)
        tl.store(target, tl.where(lower, of_keys, 0.0))


@triton.jit
def inverse_kernel(
    scores, beta, ends, owners, inverses, heads, HAS_BETA: tl.constexpr, CHUNK: tl.constexpr
):
    """inverses: (I + diag(beta) A)^-1, by substitution. A program per chunk and head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    i = tl.arange(0, CHUNK)
    at = (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, tl.minimum(CHUNK, end - start)):
        factors = tl.load(scores + at + row * CHUNK + i)
        if HAS_BETA:
            factors *= tl.load(beta + (start + row).to(tl.int64) * heads + head)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == row, inverse - solved[None, :], inverse)
    tl.store(inverses + at + i[:, None] * CHUNK + i[None, :], inverse)


@triton.jit
def roots_kernel(parents, roots):
    """roots [S]: the first segment of each segment's path. A program per segment."""
    root = tl.program_id(0)
    parent = tl.load(parents + root)
    while parent >= 0:
        root = parent
        parent = tl.load(parents + root)
    tl.store(roots + tl.program_id(0), root)


@triton.jit
def states_kernel(
    k,
    v,
    decays,
    beta,
    ends,
    parents,
    roots,
    initial,
    inverses,
    states,
    updates,
    finals,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    segments,
    heads,
    shared,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    L2_NORM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_FINALS: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """states [chunks, H, K, V] before each chunk, updates U [T, H, V] and finals [S, H, K, V].

    A program per root, head and tile of columns.
    """
    root, head, first_v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    last = root + 1
    if HAS_PARENTS:
        last = tl.where(tl.load(parents + root) < 0, segments, root)
    key_head = head // shared
    segment = root
    while segment < last:
        is_of_tree = True
        if HAS_PARENTS:
            is_of_tree = tl.load(roots + segment) == root
        if is_of_tree:
            state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            if HAS_STATE:
                source, has_entry = state_tile(
                    initial, segment, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                )
                state = tl.load(source, mask=has_entry, other=0.0)
            if HAS_PARENTS:
                parent = tl.load(parents + segment)
                if parent >= 0:
                    source, has_entry = state_tile(
                        finals, parent, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                    )
                    state = tl.load(source, mask=has_entry, other=0.0)
            begin, end = tl.load(ends + segment), tl.load(ends + segment + 1)
            chunk = begin // CHUNK + segment
            start = begin
            while start < end:
                target, has_entry = state_tile(
                    states, chunk, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                )
                tl.store(target, state, mask=has_entry)
                row = start + tl.arange(0, CHUNK)
                has = row < end
                keys = load_keys(
                    k, row, has, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM
                )
                values = load_rows(v, row, has, head, v_stride, v_head_stride, first_v, V, BLOCK_V)
                sums = load_decays(decays, row, has, head, heads, 0, CHANNELS, K, BLOCK_K)
                if DELTA:
                    values -= tl.dot(keys * decay_of(sums), state, input_precision=PRECISION)
                values *= load_betas(beta, row, has, head, heads, HAS_BETA)[:, None]
                if DELTA:
                    inverse = load_square(inverses, chunk, head, heads, CHUNK)
                    values = tl.dot(inverse, values, input_precision=PRECISION)
                column = first_v + tl.arange(0, BLOCK_V)
                at = (row.to(tl.int64) * heads + head)[:, None] * V + column[None, :]
                tl.store(updates + at, values, mask=has[:, None] & (column < V)[None, :])
                newest = tl.minimum(start + CHUNK, end) - 1
                total = load_decay(decays, newest, head, heads, 0, CHANNELS, K, BLOCK_K)
                keys *= decay_of(total[None, :] - sums)
                state *= decay_of(total)[:, None]
                state = tl.dot(tl.trans(keys), values, state, input_precision=PRECISION)
                start += CHUNK
                chunk += 1
            if HAS_FINALS:
                target, has_entry = state_tile(
                    finals, segment, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                )
                tl.store(target, state, mask=has_entry)
                tl.debug_barrier()  # before children of the segment read it
        segment += 1


@triton.jit
def out_kernel(
    q,
    decays,
    ends,
    owners,
    squares,
    states,
    updates,
    out,
    q_stride,
    q_head_stride,
    scale,
    heads,
    shared,
    CHANNELS: tl.constexpr,
    L2_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """out [T, H, V]. A program per chunk, head and tile of columns."""
    chunk, head, first_v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    row = start + tl.arange(0, CHUNK)
    has = row < end
    queries = load_keys(q, row, has, head // shared, q_stride, q_head_stride, K, BLOCK_K, L2_NORM)
    queries *= decay_of(load_decays(decays, row, has, head, heads, 0, CHANNELS, K, BLOCK_K)) * scale
    source, has_entry = state_tile(states, chunk, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V)
    state = tl.load(source, mask=has_entry, other=0.0)
    result = tl.dot(queries, state, input_precision=PRECISION)
    values = load_rows(updates, row, has, head, heads * V, V, first_v, V, BLOCK_V)
    square = load_square(squares, chunk, head, heads, CHUNK)
    result = tl.dot(square, values, result, input_precision=PRECISION)
    column = first_v + tl.arange(0, BLOCK_V)
    target = out + (row.to(tl.int64) * heads + head)[:, None] * V + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=has[:, None] & (column < V)[None, :])


class Tables(NamedTuple):
    """What forward and backward compute of all chunks before states follow one another."""

    owners: Tensor  # [chunks] int32: the segment of each chunk
    roots: Tensor | None  # [S] int32
    decays: Tensor  # G, of the shape of g; float64 for one decay per head
    squares: Tensor  # [1 or 2, chunks, H, CHUNK, CHUNK]: B, A
    inverses: Tensor | None  # [chunks, H, CHUNK, CHUNK]
    constants: dict[str, Any]  # of all kernels


def sizes(key_width: int, value_width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return sizes and tiles of all kernels for keys and values of so many channels."""
    block_k = max(16, next_power_of_2(key_width))
    # Float32 operands are three products each of tensor cores, which is as exact as float32.
    is_wide = block_k > 128 or dtype == torch.float32
    tile = 16 if is_wide else 32
    return {
        "K": key_width,
        "V": value_width,
        "CHUNK": tile,
        "ROWS": ROWS,
        "BLOCK_K": block_k,
        "BLOCK_V": min(tile, max(16, next_power_of_2(value_width))),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }


def run(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    constants: dict[str, Any],
    num_warps: int = 8,
) -> None:
    """Launch a kernel with those of the constants that it has."""
    taken = {name: x for name, x in constants.items() if name in kernel.arg_names}
    launch(kernel, grid, *arguments, **taken, num_warps=NUM_WARPS)


def make_tables(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    scale: float,
    delta_rule: bool,
    l2_norm: bool,
) -> Tables:
    heads, segments = v.shape[1], ends.shape[0] - 1
    constants = sizes(q.shape[2], v.shape[2], q.dtype) | {
        "CHANNELS": g.dim() == 3,
        "DELTA": delta_rule,
        "L2_NORM": l2_norm,
        "HAS_BETA": beta is not None,
        "HAS_PARENTS": parents is not None,
    }
    size = constants["CHUNK"]
    chunks = q.shape[0] // size + segments
    index = torch.arange(chunks, device=q.device, dtype=torch.int32)
    first = ends[:-1] // size + index[:segments]
    owners = torch.searchsorted(first, index, right=True, out_int32=True) - 1
    roots = None
    if parents is not None:
        roots = torch.empty_like(parents)
        launch(roots_kernel, (segments,), parents, roots)
    decays = torch.empty_like(g, dtype=torch.float32 if g.dim() == 3 else torch.float64)
    grid = (chunks, heads)
    arguments: tuple[Any, ...] = (g, decays, ends, owners, heads)
    run(decays_kernel, grid, *arguments, constants=constants)
    squares = g.new_empty(1 + delta_rule, chunks, heads, size, size)
    strides = (*q.stride()[:2], *k.stride()[:2])
    arguments = (q, k, decays, ends, owners, squares, *strides, scale, heads, heads // q.shape[1])
    run(scores_kernel, (*grid, size // ROWS), *arguments, constants=constants)
    inverses = None
    if delta_rule:
        inverses = torch.empty_like(squares[1])
        arguments = (squares[1], beta, ends, owners, inverses, heads)
        run(inverse_kernel, grid, *arguments, constants=constants)
    return Tables(owners, roots, decays, squares, inverses, constants)


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    delta_rule: bool,
    l2_norm: bool,
    keep_states: bool,
    wants_final: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, states before each chunk, or none of them, last states, or none of them)."""
    segments, (heads, width) = ends.shape[0] - 1, v.shape[1:]
    state_shape = (heads, q.shape[2], width)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    empty = g.new_empty(0, *state_shape)
    if segments == 0:
        return out, empty, empty
    tables = make_tables(q, k, v, g, beta, ends, parents, scale, delta_rule, l2_norm)
    chunks, shared = tables.owners.shape[0], heads // q.shape[1]
    states, updates = g.new_empty(chunks, *state_shape), g.new_empty(v.shape)
    has_finals = wants_final or parents is not None
    finals = g.new_empty(segments, *state_shape) if has_finals else empty
    constants = tables.constants | {
        "HAS_STATE": initial_state is not None,
        "HAS_FINALS": has_finals,
    }
    tiles = ceil_div(width, constants["BLOCK_V"])
    run(
        states_kernel,
        (segments, heads, tiles),
        k,
        v,
        tables.decays,
        beta,
        ends,
        parents,
        tables.roots,
        initial_state,
        tables.inverses,
        states,
        updates,
        finals,
        *k.stride()[:2],
        *v.stride()[:2],
        segments,
        heads,
        shared,
        constants=constants,
    )
    run(
        out_kernel,
        (chunks, heads, tiles),
        q,
        tables.decays,
        ends,
        tables.owners,
        tables.squares,
        states,
        updates,
        out,
        *q.stride()[:2],
        scale,
        heads,
        shared,
        constants=constants,
    )
    return out, states if keep_states else empty, finals if wants_final else empty
