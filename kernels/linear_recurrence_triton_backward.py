"""linear_recurrence in Triton, backwards: from the states before chunks, which the forward kept.

Gradients of states follow one another from the last chunk to the first, those of children added to
their parent's in descending order. All else is computed for all chunks at once, with the symbols of
linear_recurrence_triton and dX the gradient of X:

    dU = B^T dO + (exp(G_last - G) K) dS       dR = (I + diag(beta) A)^-T dU
    dB = scale dO U^T, j <= i                  dA = -diag(beta) dR U^T, j < i
    dV = diag(beta) dR                         dS before = exp(G_last) dS + scale (exp(G) Q)^T dO
                                                           - (exp(G) K)^T diag(beta) dR

k has a gradient as a row, where it comes with exp(G), and as a column, where it comes with
exp(-G): so dG = q dq + k (dk of rows - dk of columns), and g has the sum of dG from its token on.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div
from .linear_recurrence_triton import (
    NORM_EPS,
    chunk_bounds,
    decay_of,
    load_betas,
    load_decay,
    load_decays,
    load_keys,
    load_rows,
    load_square,
    make_tables,
    run,
    state_tile,
)


@triton.jit
def state_grads_kernel(
    q,
    k,
    grad_out,
    decays,
    beta,
    ends,
    parents,
    roots,
    squares,
    inverses,
    grad_finals,
    grad_states,
    grad_updates,
    grad_initial,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    grad_stride,
    grad_head_stride,
    scale,
    segments,
    heads,
    shared,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    L2_NORM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    HAS_FINALS: tl.constexpr,
    WANT_INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """grad_states [chunks, H, K, V]: dS after each chunk; grad_updates [T, H, V]: dR.

    grad_finals: [S, H, K, V], to which the gradients of children are added. A program per root,
    head and tile of columns.
    """
    root, head, first_v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    segment = root
    if HAS_PARENTS:
        segment = tl.where(tl.load(parents + root) < 0, segments - 1, root - 1)
    key_head = head // shared
    while segment >= root:
        is_of_tree = True
        if HAS_PARENTS:
            is_of_tree = tl.load(roots + segment) == root
        if is_of_tree:
            grad = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            if HAS_FINALS:
                source, has_entry = state_tile(
                    grad_finals, segment, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                )
                grad = tl.load(source, mask=has_entry, other=0.0)
            begin, end = tl.load(ends + segment), tl.load(ends + segment + 1)
            count = tl.cdiv(end - begin, CHUNK)
            while count > 0:
                count -= 1
                chunk = begin // CHUNK + segment + count
                start = begin + count * CHUNK
                target, has_entry = state_tile(
                    grad_states, chunk, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                )
                tl.store(target, grad, mask=has_entry)
                row = start + tl.arange(0, CHUNK)
                has = row < end
                keys = load_keys(
                    k, row, has, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM
                )
                sums = load_decays(decays, row, has, head, heads, 0, CHANNELS, K, BLOCK_K)
                newest = tl.minimum(start + CHUNK, end) - 1
                total = load_decay(decays, newest, head, heads, 0, CHANNELS, K, BLOCK_K)
                of_out = load_rows(
                    grad_out, row, has, head, grad_stride, grad_head_stride, first_v, V, BLOCK_V
                )
                of_updates = tl.dot(
                    keys * decay_of(total[None, :] - sums), grad, input_precision=PRECISION
                )
                square = load_square(squares, chunk, head, heads, CHUNK)
                of_updates = tl.dot(tl.trans(square), of_out, of_updates, input_precision=PRECISION)
                if DELTA:
                    inverse = load_square(inverses, chunk, head, heads, CHUNK)
                    of_updates = tl.dot(tl.trans(inverse), of_updates, input_precision=PRECISION)
                column = first_v + tl.arange(0, BLOCK_V)
                at = (row.to(tl.int64) * heads + head)[:, None] * V + column[None, :]
                tl.store(grad_updates + at, of_updates, mask=has[:, None] & (column < V)[None, :])
                grad *= decay_of(total)[:, None]
                queries = load_keys(
                    q, row, has, key_head, q_stride, q_head_stride, K, BLOCK_K, L2_NORM
                )
                queries *= decay_of(sums) * scale
                grad = tl.dot(tl.trans(queries), of_out, grad, input_precision=PRECISION)
                if DELTA:
                    of_updates *= load_betas(beta, row, has, head, heads, HAS_BETA)[:, None]
                    keys *= decay_of(sums)
                    grad -= tl.dot(tl.trans(keys), of_updates, input_precision=PRECISION)
            if HAS_PARENTS:
                parent = tl.load(parents + segment)
                if parent >= 0:
                    target, has_entry = state_tile(
                        grad_finals, parent, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                    )
                    grad += tl.load(target, mask=has_entry, other=0.0)
                    tl.store(target, grad, mask=has_entry)
                    tl.debug_barrier()  # before it is read for the parent
                    grad = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
            if WANT_INITIAL:
                target, has_entry = state_tile(
                    grad_initial, segment, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
                )
                tl.store(target, grad, mask=has_entry)
        segment -= 1


@triton.jit
def value_grads_kernel(
    k,
    v,
    grad_out,
    decays,
    beta,
    ends,
    owners,
    squares,
    inverses,
    states,
    grad_updates,
    updates,
    grad_v,
    grad_beta,
    grad_squares,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    grad_stride,
    grad_head_stride,
    scale,
    heads,
    shared,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    L2_NORM: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """updates U and grad_v [T, H, V], grad_beta [T, H], grad_squares as squares: dB, dA.

    A program per chunk and head.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    row = start + tl.arange(0, CHUNK)
    has = row < end
    betas = load_betas(beta, row, has, head, heads, HAS_BETA)
    keys = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    if DELTA:
        keys = load_keys(k, row, has, head // shared, k_stride, k_head_stride, K, BLOCK_K, L2_NORM)
        keys *= decay_of(load_decays(decays, row, has, head, heads, 0, CHANNELS, K, BLOCK_K))
    of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_betas = tl.zeros((CHUNK,), tl.float32)
    for first_v in range(0, V, BLOCK_V):
        column = first_v + tl.arange(0, BLOCK_V)
        at = (row.to(tl.int64) * heads + head)[:, None] * V + column[None, :]
        inside = has[:, None] & (column < V)[None, :]
        values = load_rows(v, row, has, head, v_stride, v_head_stride, first_v, V, BLOCK_V)
        if DELTA:
            source, has_entry = state_tile(
                states, chunk, head, heads, 0, first_v, K, V, BLOCK_K, BLOCK_V
            )
            state = tl.load(source, mask=has_entry, other=0.0)
            values -= tl.dot(keys, state, input_precision=PRECISION)
        of_updates = tl.load(grad_updates + at, mask=inside, other=0.0)
        of_betas += tl.sum(of_updates * values, 1)
        of_values = of_updates * betas[:, None]
        tl.store(grad_v + at, of_values.to(grad_v.dtype.element_ty), mask=inside)
        values *= betas[:, None]
        if DELTA:
            inverse = load_square(inverses, chunk, head, heads, CHUNK)
            values = tl.dot(inverse, values, input_precision=PRECISION)
            of_keys = tl.dot(of_updates, tl.trans(values), of_keys, input_precision=PRECISION)
        tl.store(updates + at, values, mask=inside)
        of_out = load_rows(
            grad_out, row, has, head, grad_stride, grad_head_stride, first_v, V, BLOCK_V
        )
        of_queries = tl.dot(of_out, tl.trans(values), of_queries, input_precision=PRECISION)
    i = tl.arange(0, CHUNK)
    square = (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    square += i[:, None] * CHUNK + i[None, :]
    of_queries = tl.where(i[:, None] >= i[None, :], of_queries * scale, 0.0)
    tl.store(grad_squares + square, of_queries)
    if DELTA:
        square += tl.num_programs(0).to(tl.int64) * heads * (CHUNK * CHUNK)
        of_keys = tl.where(i[:, None] > i[None, :], -of_keys, 0.0)
        of_betas += tl.sum(of_keys * tl.load(squares + square), 1)
        tl.store(grad_squares + square, of_keys * betas[:, None])
    tl.store(grad_beta + row.to(tl.int64) * heads + head, of_betas, mask=has)


@triton.jit
def key_grads_kernel(
    grad_out,
    decays,
    beta,
    ends,
    owners,
    states,
    grad_states,
    updates,
    grad_updates,
    parts,
    totals,
    tokens,
    grad_stride,
    grad_head_stride,
    scale,
    heads,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """What reaches keys and queries through the states before and after their chunk.

    parts: [3, T, H, K], of queries, and of keys as columns and as rows. totals: [chunks, H, K], of
    G_last through the state before the chunk. A program per chunk, head and tile of channels.
    """
    chunk, head, first_k = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_K
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    row = start + tl.arange(0, CHUNK)
    has = row < end
    betas = load_betas(beta, row, has, head, heads, HAS_BETA)
    of_queries = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    of_columns = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    of_rows = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    of_total = tl.zeros((BLOCK_K,), tl.float32)
    for first_v in range(0, V, BLOCK_V):
        source, has_entry = state_tile(
            states, chunk, head, heads, first_k, first_v, K, V, BLOCK_K, BLOCK_V
        )
        state = tl.load(source, mask=has_entry, other=0.0)
        source, has_entry = state_tile(
            grad_states, chunk, head, heads, first_k, first_v, K, V, BLOCK_K, BLOCK_V
        )
        grad = tl.load(source, mask=has_entry, other=0.0)
        of_total += tl.sum(state * grad, 1)
        of_out = load_rows(
            grad_out, row, has, head, grad_stride, grad_head_stride, first_v, V, BLOCK_V
        )
        of_queries = tl.dot(of_out, tl.trans(state), of_queries, input_precision=PRECISION)
        values = load_rows(updates, row, has, head, heads * V, V, first_v, V, BLOCK_V)
        of_columns = tl.dot(values, tl.trans(grad), of_columns, input_precision=PRECISION)
        if DELTA:
            of_updates = load_rows(grad_updates, row, has, head, heads * V, V, first_v, V, BLOCK_V)
            of_updates *= betas[:, None]
            of_rows = tl.dot(of_updates, tl.trans(state), of_rows, input_precision=PRECISION)
    sums = load_decays(decays, row, has, head, heads, first_k, CHANNELS, K, BLOCK_K)
    newest = tl.minimum(start + CHUNK, end) - 1
    total = load_decay(decays, newest, head, heads, first_k, CHANNELS, K, BLOCK_K)
    column = first_k + tl.arange(0, BLOCK_K)
    at = (row.to(tl.int64) * heads + head)[:, None] * K + column[None, :]
    inside = has[:, None] & (column < K)[None, :]
    size = tokens.to(tl.int64) * heads * K
    tl.store(parts + at, of_queries * decay_of(sums) * scale, mask=inside)
    tl.store(parts + size + at, of_columns * decay_of(total[None, :] - sums), mask=inside)
    if DELTA:
        tl.store(parts + 2 * size + at, -of_rows * decay_of(sums), mask=inside)
    target = totals + (chunk.to(tl.int64) * heads + head) * K + column
    tl.store(target, of_total * decay_of(total), mask=column < K)


@triton.jit
def _norm_grad(
    x, grad, row, has, head, row_stride, head_stride, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the gradient of rows from that of the normed rows."""
    rows = load_rows(x, row, has, head, row_stride, head_stride, 0, K, BLOCK_K)
    inverse = tl.rsqrt(tl.sum(rows * rows, 1) + NORM_EPS)[:, None]
    rows *= inverse
    return (grad - rows * tl.sum(rows * grad, 1)[:, None]) * inverse


@triton.jit
def score_grads_kernel(
    q,
    k,
    decays,
    ends,
    owners,
    grad_squares,
    parts,
    totals,
    grad_q,
    grad_k,
    grad_g,
    tokens,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
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
    """grad_q, grad_k [T, H, K] and grad_g, from `parts` and what reaches them through the scores.

    A program per chunk and head goes through blocks of ROWS rows from the last one on.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = chunk_bounds(ends, owners, chunk, CHUNK)
    if start >= end:
        return
    key_head = head // shared
    row = start + tl.arange(0, CHUNK)
    has = row < end
    channel = tl.arange(0, BLOCK_K)
    size = tokens.to(tl.int64) * heads * K
    square = grad_squares + (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    of_keys = tl.num_programs(0).to(tl.int64) * heads * (CHUNK * CHUNK)

    keys = load_keys(k, row, has, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM)
    sums = load_decays(decays, row, has, head, heads, 0, CHANNELS, K, BLOCK_K)
    columns = load_rows(parts + size, row, has, head, heads * K, K, 0, K, BLOCK_K)
    total = totals + (chunk.to(tl.int64) * heads + head) * K + channel
    later = tl.load(total, mask=channel < K, other=0.0) + tl.sum(keys * columns, 0)
    if not CHANNELS:
        later = tl.sum(later[None, :], 1)
    later = later[None, :]  # the sum of dG after the block, [1, BLOCK_K] or [1, 1]

    first = start + (tl.minimum(end - start, CHUNK) - 1) // ROWS * ROWS
    while first >= start:
        i = first + tl.arange(0, ROWS)
        has_i = i < end
        newest = tl.minimum(first + ROWS, end) - 1
        g_i = load_decays(decays, i, has_i, head, heads, 0, CHANNELS, K, BLOCK_K)
        at = (i.to(tl.int64) * heads + head)[:, None]
        inside = has_i[:, None] & (channel < K)[None, :]
        across = square + (i - start)[:, None] * CHUNK + (row - start)[None, :]
        down = square + (i - start)[:, None] + (row - start)[None, :] * CHUNK
        # As rows of the scores: from the keys of tokens before.
        dq = load_rows(parts, i, has_i, head, heads * K, K, 0, K, BLOCK_K)
        dk_row = tl.zeros((ROWS, BLOCK_K), tl.float32)
        if DELTA:
            dk_row = load_rows(parts + 2 * size, i, has_i, head, heads * K, K, 0, K, BLOCK_K)
        keys = load_keys(k, row, has, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM)
        if CHANNELS:
            between = load_decay(decays, first, head, heads, 0, CHANNELS, K, BLOCK_K)[None, :]
            keys = tl.where((row < first)[:, None], keys * decay_of(between - sums), 0.0)
            scaled = decay_of(g_i - between)
            dq += scaled * tl.dot(tl.load(across), keys, input_precision=PRECISION)
            if DELTA:
                of_rows = tl.dot(tl.load(across + of_keys), keys, input_precision=PRECISION)
                dk_row += scaled * of_rows
            other = first
            while other <= newest:
                one = other + tl.arange(0, 1)
                key = load_keys(
                    k, one, one < end, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM
                )
                g_one = load_decay(decays, other, head, heads, 0, CHANNELS, K, BLOCK_K)[None, :]
                key *= decay_of(g_i - g_one)
                column = square + (i - start) * CHUNK + other - start
                dq += tl.load(column)[:, None] * key
                if DELTA:
                    dk_row += tl.load(column + of_keys)[:, None] * key
                other += 1
        else:
            decay = decay_of(g_i - tl.trans(sums))
            dq = tl.dot(tl.load(across) * decay, keys, dq, input_precision=PRECISION)
            if DELTA:
                scores = tl.load(across + of_keys) * decay
                dk_row = tl.dot(scores, keys, dk_row, input_precision=PRECISION)
        q_i = load_keys(q, i, has_i, key_head, q_stride, q_head_stride, K, BLOCK_K, L2_NORM)
        of_sums = q_i * dq
        if not CHANNELS:
            of_sums = tl.sum(of_sums, 1)[:, None]
        if L2_NORM:
            dq = _norm_grad(q, dq, i, has_i, key_head, q_stride, q_head_stride, K, BLOCK_K)
        tl.store(grad_q + at * K + channel[None, :], dq, mask=inside)
        # As columns of the scores: from the queries and keys of tokens after.
        dk = load_rows(parts + size, i, has_i, head, heads * K, K, 0, K, BLOCK_K)
        queries = load_keys(q, row, has, key_head, q_stride, q_head_stride, K, BLOCK_K, L2_NORM)
        if CHANNELS:
            between = load_decay(decays, newest, head, heads, 0, CHANNELS, K, BLOCK_K)[None, :]
            after = tl.where((row > newest)[:, None], decay_of(sums - between), 0.0)
            of_columns = tl.dot(tl.load(down), queries * after, input_precision=PRECISION)
            if DELTA:
                keys = load_keys(
                    k, row, has, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM
                )
                scores = tl.load(down + of_keys)
                of_columns = tl.dot(scores, keys * after, of_columns, input_precision=PRECISION)
            dk += decay_of(between - g_i) * of_columns
            other = first
            while other <= newest:
                one = other + tl.arange(0, 1)
                g_one = load_decay(decays, other, head, heads, 0, CHANNELS, K, BLOCK_K)[None, :]
                decay = decay_of(g_one - g_i)
                query = load_keys(
                    q, one, one < end, key_head, q_stride, q_head_stride, K, BLOCK_K, L2_NORM
                )
                line = square + (other - start) * CHUNK + i - start
                dk += tl.load(line)[:, None] * query * decay
                if DELTA:
                    key = load_keys(
                        k, one, one < end, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM
                    )
                    dk += tl.load(line + of_keys)[:, None] * key * decay
                other += 1
        else:
            decay = decay_of(tl.trans(sums) - g_i)
            dk = tl.dot(tl.load(down) * decay, queries, dk, input_precision=PRECISION)
            if DELTA:
                scores = tl.load(down + of_keys) * decay
                dk = tl.dot(scores, keys, dk, input_precision=PRECISION)
        k_i = load_keys(k, i, has_i, key_head, k_stride, k_head_stride, K, BLOCK_K, L2_NORM)
        if CHANNELS:
            of_sums += k_i * (dk_row - dk)
        else:
            of_sums += tl.sum(k_i * (dk_row - dk), 1)[:, None]
        dk += dk_row
        if L2_NORM:
            dk = _norm_grad(k, dk, i, has_i, key_head, k_stride, k_head_stride, K, BLOCK_K)
        tl.store(grad_k + at * K + channel[None, :], dk, mask=inside)
        if CHANNELS:
            dg = tl.cumsum(of_sums, 0, reverse=True) + later
            tl.store(grad_g + at * K + channel[None, :], dg, mask=inside)
            later += tl.sum(of_sums, 0)[None, :]
        else:
            dg = tl.cumsum(of_sums, 0, reverse=True) + later
            tl.store(grad_g + at, dg, mask=has_i[:, None])
            later += tl.sum(of_sums, 0)[None, :]
        first -= ROWS


def key_tile(block_k: int) -> int:
    """Return how many channels a program of `key_grads_kernel` takes."""
    return min(64, block_k)


def linear_recurrence_backward(
    grad_out: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
    scale: float,
    delta_rule: bool,
    l2_norm: bool,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q and k for every head of v, and of v, g, beta and initial_state."""
    segments, (heads, width) = ends.shape[0] - 1, v.shape[1:]
    wants_q, wants_k, _, wants_g, _, wants_initial = wanted
    grad_v = torch.empty_like(v, memory_format=torch.contiguous_format)
    grad_q = g.new_empty(q.shape[0], heads, q.shape[2])
    grad_k, grad_g = torch.empty_like(grad_q), torch.empty_like(g)
    grad_beta = g.new_empty(q.shape[0], heads)
    grad_initial = None
    if wants_initial and initial_state is not None:
        grad_initial = torch.empty_like(initial_state)

    def asked() -> tuple[Tensor | None, ...]:
        grads = (grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial)
        return tuple(x if want else None for x, want in zip(grads, wanted, strict=True))

    if segments == 0:
        return asked()
    tables = make_tables(q, k, v, g, beta, ends, parents, scale, delta_rule, l2_norm)
    chunks, shared = states.shape[0], heads // q.shape[1]
    grad_states, grad_updates, updates = torch.empty_like(states), *g.new_empty(2, *v.shape)
    grad_finals = grad_final
    if parents is not None:  # gradients of children are added
        zeros = (segments, heads, q.shape[2], width)
        grad_finals = g.new_zeros(zeros) if grad_final is None else grad_final.clone()
    constants = tables.constants | {
        "HAS_FINALS": grad_finals is not None,
        "WANT_INITIAL": wants_initial,
    }
    run(
        state_grads_kernel,
        (segments, heads, ceil_div(width, constants["BLOCK_V"])),
        q,
        k,
        grad_out,
        tables.decays,
        beta,
        ends,
        parents,
        tables.roots,
        tables.squares,
        tables.inverses,
        grad_finals,
        grad_states,
        grad_updates,
        grad_initial,
        *q.stride()[:2],
        *k.stride()[:2],
        *grad_out.stride()[:2],
        scale,
        segments,
        heads,
        shared,
        constants=constants,
    )
    grad_squares = torch.empty_like(tables.squares)
    run(
        value_grads_kernel,
        (chunks, heads),
        k,
        v,
        grad_out,
        tables.decays,
        beta,
        ends,
        tables.owners,
        tables.squares,
        tables.inverses,
        states,
        grad_updates,
        updates,
        grad_v,
        grad_beta,
        grad_squares,
        *k.stride()[:2],
        *v.stride()[:2],
        *grad_out.stride()[:2],
        scale,
        heads,
        shared,
        constants=constants,
    )
    if not (wants_q or wants_k or wants_g):
        return asked()
    parts = g.new_empty(2 + delta_rule, *grad_q.shape)
    totals = g.new_empty(chunks, heads, q.shape[2])
    block_k = key_tile(constants["BLOCK_K"])
    run(
        key_grads_kernel,
        (chunks, heads, ceil_div(q.shape[2], block_k)),
        grad_out,
        tables.decays,
        beta,
        ends,
        tables.owners,
        states,
        grad_states,
        updates,
        grad_updates,
        parts,
        totals,
        q.shape[0],
        *grad_out.stride()[:2],
        scale,
        heads,
        constants=constants | {"BLOCK_K": block_k},
    )
    run(
        score_grads_kernel,
        (chunks, heads),
        q,
        k,
        tables.decays,
        ends,
        tables.owners,
        grad_squares,
        parts,
        totals,
        grad_q,
        grad_k,
        grad_g,
        q.shape[0],
        *q.stride()[:2],
        *k.stride()[:2],
        heads,
        shared,
        constants=constants,
    )
    return asked()
