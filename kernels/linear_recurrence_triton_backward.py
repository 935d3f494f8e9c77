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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div
from .linear_recurrence_triton import (
    NORM_EPS,
    Problem,
    add_dot,
    chunk_bounds,
    decay_of,
    dot,
    is_of_tree,
    load_betas,
    load_decay,
    load_decays,
    load_keys,
    load_rows,
    load_square,
    load_state,
    make_inputs,
    run,
    state_tile,
    store_state,
    value_tile,
    zeros,
)


@triton.jit
def state_grads_kernel(
    inputs, grad_finals, grad_states, grad_updates, grad_initial, form: tl.constexpr
):
    """grad_states [chunks, H, K, V]: dS after each chunk; grad_updates [T, H, V]: dR.

    grad_finals: [S, H, K, V], to which the gradients of children are added. A program per root,
    head and tile of columns.
    """
    root, head, first_v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * form.BLOCK_V
    heads, parents, segment = inputs.heads, inputs.parents, root
    if parents is not None:
        segment = tl.where(tl.load(parents + root) < 0, inputs.segments - 1, root - 1)
    key_head = head // inputs.shared
    while segment >= root:
        if is_of_tree(inputs, segment, root):
            grad = zeros(form.BLOCK_K, form.BLOCK_V)
            if grad_finals is not None:
                grad = load_state(grad_finals, segment, head, heads, 0, first_v, form)
            begin, end = tl.load(inputs.ends + segment), tl.load(inputs.ends + segment + 1)
            count = tl.cdiv(end - begin, form.CHUNK)
            while count > 0:
                count -= 1
                chunk = begin // form.CHUNK + segment + count
                start = begin + count * form.CHUNK
                store_state(grad_states, chunk, head, heads, first_v, grad, form)
                row = start + tl.arange(0, form.CHUNK)
                has = row < end
                keys = load_keys(inputs.k, row, has, key_head, form)
                sums = load_decays(inputs.decays, row, has, head, heads, 0, form)
                newest = tl.minimum(start + form.CHUNK, end) - 1
                total = load_decay(inputs, newest, head, 0, form)
                of_out = load_rows(inputs.grad_out, row, has, head, first_v, form.V, form.BLOCK_V)
                of_updates = dot(keys * decay_of(total[None, :] - sums), grad, form)
                square = load_square(inputs.squares, chunk, head, heads, form.CHUNK)
                of_updates = add_dot(of_updates, tl.trans(square), of_out, form)
                if form.DELTA:
                    inverse = load_square(inputs.inverses, chunk, head, heads, form.CHUNK)
                    of_updates = dot(tl.trans(inverse), of_updates, form)
                at, inside = value_tile(row, has, head, heads, first_v, form)
                tl.store(grad_updates + at, of_updates, mask=inside)
                grad *= decay_of(total)[:, None]
                queries = load_keys(inputs.q, row, has, key_head, form)
                queries *= decay_of(sums) * inputs.scale
                grad = add_dot(grad, tl.trans(queries), of_out, form)
                if form.DELTA:
                    of_updates *= load_betas(inputs, row, has, head)[:, None]
                    keys *= decay_of(sums)
                    grad -= dot(tl.trans(keys), of_updates, form)
            if parents is not None:
                parent = tl.load(parents + segment)
                if parent >= 0:
                    target, exists = state_tile(grad_finals, parent, head, heads, 0, first_v, form)
                    grad += tl.load(target, mask=exists, other=0.0)
                    tl.store(target, grad, mask=exists)
                    tl.debug_barrier()  # before it is read for the parent
                    grad = zeros(form.BLOCK_K, form.BLOCK_V)
            if grad_initial is not None:
                store_state(grad_initial, segment, head, heads, first_v, grad, form)
        segment -= 1


@triton.jit
def value_grads_kernel(
    inputs, states, grad_updates, updates, grad_v, grad_beta, grad_squares, form: tl.constexpr
):
    """updates U and grad_v [T, H, V], grad_beta [T, H], grad_squares as squares: dB, dA.

    A program per chunk and head.
    """
    chunk, head, heads = tl.program_id(0), tl.program_id(1), inputs.heads
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    row = start + tl.arange(0, form.CHUNK)
    has = row < end
    betas = load_betas(inputs, row, has, head)
    keys = zeros(form.CHUNK, form.BLOCK_K)
    if form.DELTA:
        keys = load_keys(inputs.k, row, has, head // inputs.shared, form)
        keys *= decay_of(load_decays(inputs.decays, row, has, head, heads, 0, form))
        inverse = load_square(inputs.inverses, chunk, head, heads, form.CHUNK)
    of_queries, of_keys = zeros(form.CHUNK, form.CHUNK), zeros(form.CHUNK, form.CHUNK)
    of_betas = tl.zeros_like(betas)
    for first_v in range(0, form.V, form.BLOCK_V):
        at, inside = value_tile(row, has, head, heads, first_v, form)
        values = load_rows(inputs.v, row, has, head, first_v, form.V, form.BLOCK_V)
        if form.DELTA:
            values -= dot(keys, load_state(states, chunk, head, heads, 0, first_v, form), form)
        of_updates = tl.load(grad_updates + at, mask=inside, other=0.0)
        of_betas += tl.sum(of_updates * values, 1)
        of_values = of_updates * betas[:, None]
        tl.store(grad_v + at, of_values.to(grad_v.dtype.element_ty), mask=inside)
        values *= betas[:, None]
        if form.DELTA:
            values = dot(inverse, values, form)
            of_keys = add_dot(of_keys, of_updates, tl.trans(values), form)
        tl.store(updates + at, values, mask=inside)
        of_out = load_rows(inputs.grad_out, row, has, head, first_v, form.V, form.BLOCK_V)
        of_queries = add_dot(of_queries, of_out, tl.trans(values), form)
    i = tl.arange(0, form.CHUNK)
    square = (chunk.to(tl.int64) * heads + head) * (form.CHUNK * form.CHUNK)
    square += i[:, None] * form.CHUNK + i[None, :]
    of_queries = tl.where(i[:, None] >= i[None, :], of_queries * inputs.scale, 0.0)
    tl.store(grad_squares + square, of_queries)
    if form.DELTA:
        square += tl.num_programs(0).to(tl.int64) * heads * (form.CHUNK * form.CHUNK)
        of_keys = tl.where(i[:, None] > i[None, :], -of_keys, 0.0)
        of_betas += tl.sum(of_keys * tl.load(inputs.squares + square), 1)
        tl.store(grad_squares + square, of_keys * betas[:, None])
    tl.store(grad_beta + row.to(tl.int64) * heads + head, of_betas, mask=has)


@triton.jit
def key_grads_kernel(
    inputs, states, grad_states, updates, grad_updates, parts, totals, tokens, form: tl.constexpr
):
    """What reaches keys and queries through the states before and after their chunk.

    parts: [3, T, H, K], of queries, and of keys as columns and as rows. totals: [chunks, H, K], of
    G_last through the state before the chunk. A program per chunk, head and tile of channels.
    """
    BLOCK_K: tl.constexpr = form.BLOCK_K
    chunk, head, first_k = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_K
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    heads, row = inputs.heads, start + tl.arange(0, form.CHUNK)
    has = row < end
    betas = load_betas(inputs, row, has, head)
    of_queries, of_columns = zeros(form.CHUNK, BLOCK_K), zeros(form.CHUNK, BLOCK_K)
    of_rows = zeros(form.CHUNK, BLOCK_K)
    of_total = tl.zeros((BLOCK_K,), tl.float32)
    for first_v in range(0, form.V, form.BLOCK_V):
        state = load_state(states, chunk, head, heads, first_k, first_v, form)
        grad = load_state(grad_states, chunk, head, heads, first_k, first_v, form)
        of_total += tl.sum(state * grad, 1)
        of_out = load_rows(inputs.grad_out, row, has, head, first_v, form.V, form.BLOCK_V)
        of_queries = add_dot(of_queries, of_out, tl.trans(state), form)
        source = (updates, heads * form.V, form.V)
        values = load_rows(source, row, has, head, first_v, form.V, form.BLOCK_V)
        of_columns = add_dot(of_columns, values, tl.trans(grad), form)
        if form.DELTA:
            source = (grad_updates, heads * form.V, form.V)
            of_updates = load_rows(source, row, has, head, first_v, form.V, form.BLOCK_V)
            of_updates *= betas[:, None]
            of_rows = add_dot(of_rows, of_updates, tl.trans(state), form)
    sums = load_decays(inputs.decays, row, has, head, heads, first_k, form)
    newest = tl.minimum(start + form.CHUNK, end) - 1
    total = load_decay(inputs, newest, head, first_k, form)
    column = first_k + tl.arange(0, BLOCK_K)
    at = (row.to(tl.int64) * heads + head)[:, None] * form.K + column[None, :]
    inside = has[:, None] & (column < form.K)[None, :]
    size = tokens.to(tl.int64) * heads * form.K
    tl.store(parts + at, of_queries * decay_of(sums) * inputs.scale, mask=inside)
    tl.store(parts + size + at, of_columns * decay_of(total[None, :] - sums), mask=inside)
    if form.DELTA:
        tl.store(parts + 2 * size + at, -of_rows * decay_of(sums), mask=inside)
    target = totals + (chunk.to(tl.int64) * heads + head) * form.K + column
    tl.store(target, of_total * decay_of(total), mask=column < form.K)


@triton.jit
def _norm_grad(x, grad, row, has, head, form: tl.constexpr):
    """Return the gradient of rows from that of the normed rows."""
    rows = load_rows(x, row, has, head, 0, form.K, form.BLOCK_K)
    inverse = tl.rsqrt(tl.sum(rows * rows, 1) + NORM_EPS)[:, None]
    rows *= inverse
    return (grad - rows * tl.sum(rows * grad, 1)[:, None]) * inverse


@triton.jit
def _load_part(part, row, has, head, heads, form: tl.constexpr):
    source = (part, heads * form.K, form.K)
    return load_rows(source, row, has, head, 0, form.K, form.BLOCK_K)


@triton.jit
def score_grads_kernel(
    inputs, grad_squares, parts, totals, grad_q, grad_k, grad_g, tokens, form: tl.constexpr
):
    """grad_q, grad_k [T, H, K] and grad_g, from `parts` and what reaches them through the scores.

    A program per chunk and head goes through blocks of ROWS rows from the last one on.
    """
    CHANNELS: tl.constexpr = form.CHANNELS
    DELTA: tl.constexpr = form.DELTA
    CHUNK: tl.constexpr = form.CHUNK
    q, k, heads, decays = inputs.q, inputs.k, inputs.heads, inputs.decays
    chunk, head = tl.program_id(0), tl.program_id(1)
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    key_head = head // inputs.shared
    row = start + tl.arange(0, CHUNK)
    has = row < end
    channel = tl.arange(0, form.BLOCK_K)
    size = tokens.to(tl.int64) * heads * form.K
    square = grad_squares + (chunk.to(tl.int64) * heads + head) * (CHUNK * CHUNK)
    of_keys = tl.num_programs(0).to(tl.int64) * heads * (CHUNK * CHUNK)

    keys = load_keys(k, row, has, key_head, form)
    sums = load_decays(decays, row, has, head, heads, 0, form)
    columns = _load_part(parts + size, row, has, head, heads, form)
    total = totals + (chunk.to(tl.int64) * heads + head) * form.K + channel
    later = tl.load(total, mask=channel < form.K, other=0.0) + tl.sum(keys * columns, 0)
    if not CHANNELS:
        later = tl.sum(later[None, :], 1)
    later = later[None, :]  # the sum of dG after the block, [1, BLOCK_K] or [1, 1]

    first = start + (tl.minimum(end - start, CHUNK) - 1) // form.ROWS * form.ROWS
    while first >= start:
        i = first + tl.arange(0, form.ROWS)
        has_i = i < end
        newest = tl.minimum(first + form.ROWS, end) - 1
        g_i = load_decays(decays, i, has_i, head, heads, 0, form)
        at = (i.to(tl.int64) * heads + head)[:, None]
        inside = has_i[:, None] & (channel < form.K)[None, :]
        across = square + (i - start)[:, None] * CHUNK + (row - start)[None, :]
        down = square + (i - start)[:, None] + (row - start)[None, :] * CHUNK
        # As rows of the scores: from the keys of tokens before.
        dq = _load_part(parts, i, has_i, head, heads, form)
        dk_row = zeros(form.ROWS, form.BLOCK_K)
        if DELTA:
            dk_row = _load_part(parts + 2 * size, i, has_i, head, heads, form)
        keys = load_keys(k, row, has, key_head, form)
        if CHANNELS:
            between = load_decay(inputs, first, head, 0, form)[None, :]
            keys = tl.where((row < first)[:, None], keys * decay_of(between - sums), 0.0)
            scaled = decay_of(g_i - between)
            dq += scaled * dot(tl.load(across), keys, form)
            if DELTA:
                of_rows = dot(tl.load(across + of_keys), keys, form)
                dk_row += scaled * of_rows
            other = first
            while other <= newest:
                one = other + tl.arange(0, 1)
                key = load_keys(k, one, one < end, key_head, form)
                g_one = load_decay(inputs, other, head, 0, form)[None, :]
                key *= decay_of(g_i - g_one)
                column = square + (i - start) * CHUNK + other - start
                dq += tl.load(column)[:, None] * key
                if DELTA:
                    dk_row += tl.load(column + of_keys)[:, None] * key
                other += 1
        else:
            decay = decay_of(g_i - tl.trans(sums))
            dq = add_dot(dq, tl.load(across) * decay, keys, form)
            if DELTA:
                scores = tl.load(across + of_keys) * decay
                dk_row = add_dot(dk_row, scores, keys, form)
        q_i = load_keys(q, i, has_i, key_head, form)
        of_sums = q_i * dq
        if not CHANNELS:
            of_sums = tl.sum(of_sums, 1)[:, None]
        if form.L2_NORM:
            dq = _norm_grad(q, dq, i, has_i, key_head, form)
        tl.store(grad_q + at * form.K + channel[None, :], dq, mask=inside)
        # As columns of the scores: from the queries and keys of tokens after.
        dk = _load_part(parts + size, i, has_i, head, heads, form)
        queries = load_keys(q, row, has, key_head, form)
        if CHANNELS:
            between = load_decay(inputs, newest, head, 0, form)[None, :]
            after = tl.where((row > newest)[:, None], decay_of(sums - between), 0.0)
            of_columns = dot(tl.load(down), queries * after, form)
            if DELTA:
                keys = load_keys(k, row, has, key_head, form)
                scores = tl.load(down + of_keys)
                of_columns = add_dot(of_columns, scores, keys * after, form)
            dk += decay_of(between - g_i) * of_columns
            other = first
            while other <= newest:
                one = other + tl.arange(0, 1)
                g_one = load_decay(inputs, other, head, 0, form)[None, :]
                decay = decay_of(g_one - g_i)
                query = load_keys(q, one, one < end, key_head, form)
                line = square + (other - start) * CHUNK + i - start
                dk += tl.load(line)[:, None] * query * decay
                if DELTA:
                    key = load_keys(k, one, one < end, key_head, form)
                    dk += tl.load(line + of_keys)[:, None] * key * decay
                other += 1
        else:
            decay = decay_of(tl.trans(sums) - g_i)
            dk = add_dot(dk, tl.load(down) * decay, queries, form)
            if DELTA:
                scores = tl.load(down + of_keys) * decay
                dk = add_dot(dk, scores, keys, form)
        k_i = load_keys(k, i, has_i, key_head, form)
        if CHANNELS:
            of_sums += k_i * (dk_row - dk)
        else:
            of_sums += tl.sum(k_i * (dk_row - dk), 1)[:, None]
        dk += dk_row
        if form.L2_NORM:
            dk = _norm_grad(k, dk, i, has_i, key_head, form)
        tl.store(grad_k + at * form.K + channel[None, :], dk, mask=inside)
        if CHANNELS:
            dg = tl.cumsum(of_sums, 0, reverse=True) + later
            tl.store(grad_g + at * form.K + channel[None, :], dg, mask=inside)
        else:  # of vectors: Triton 3.6 does not compile the scan of a matrix with one column
            dg = tl.cumsum(tl.sum(of_sums, 1), 0, reverse=True)[:, None] + later
            tl.store(grad_g + at, dg, mask=has_i[:, None])
        later += tl.sum(of_sums, 0)[None, :]
        first -= form.ROWS


def key_tile(block_k: int) -> int:
    """Return how many channels a program of `key_grads_kernel` takes."""
    return min(64, block_k)


def linear_recurrence_backward(
    grad_out: Tensor, grad_final: Tensor | None, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q and k for every head of v, and of v, g, beta and initial_state.

    arguments: those of a Problem, with the states before its scale, and `wanted`.
    """
    *operands, states, scale, delta_rule, l2_norm, wanted = arguments
    problem = Problem._make([*operands, scale, delta_rule, l2_norm])
    q, _, v, g, _, ends, parents, initial_state, *_ = problem
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
    inputs, form = make_inputs(problem, grad_out)
    grad_states, grad_updates, updates = torch.empty_like(states), *g.new_empty(2, *v.shape)
    grad_finals = grad_final
    if parents is not None:  # gradients of children are added
        of_finals = (segments, heads, q.shape[2], width)
        grad_finals = g.new_zeros(of_finals) if grad_final is None else grad_final.clone()
    grid: tuple[int, ...] = (segments, heads, ceil_div(width, form.BLOCK_V))
    of_states = (inputs, grad_finals, grad_states, grad_updates, grad_initial)
    run(state_grads_kernel, grid, *of_states, form=form)
    grad_squares, grid = torch.empty_like(inputs.squares), (states.shape[0], heads)
    of_values = (inputs, states, grad_updates, updates, grad_v, grad_beta, grad_squares)
    run(value_grads_kernel, grid, *of_values, form=form)
    if not (wants_q or wants_k or wants_g):
        return asked()
    parts = g.new_empty(2 + delta_rule, *grad_q.shape)
    totals = g.new_empty(*grid, q.shape[2])
    block_k = key_tile(form.BLOCK_K)
    of_keys = (inputs, states, grad_states, updates, grad_updates, parts, totals, q.shape[0])
    tiles = ceil_div(q.shape[2], block_k)
    run(key_grads_kernel, (*grid, tiles), *of_keys, form=form._replace(BLOCK_K=block_k))
    of_scores = (inputs, grad_squares, parts, totals, grad_q, grad_k, grad_g, q.shape[0])
    run(score_grads_kernel, grid, *of_scores, form=form)
    return asked()
