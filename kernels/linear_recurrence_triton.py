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
# Products of float32 in one sum of tensor cores, which cut sums toward zero: over all of 128 the
# errors are up to 5.5 times those of float32 (emulated, docs/notes.md), so 1.3 times.
PART = tl.constexpr(16)
NORM_EPS = tl.constexpr(1e-6)  # of flash-linear-attention's l2norm


class Problem(NamedTuple):
    """The arguments of both passes; rows of q, k and v have inner stride 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    ends: Tensor
    parents: Tensor | None
    initial_state: Tensor | None
    scale: float
    delta_rule: bool
    l2_norm: bool


class Inputs(NamedTuple):
    """What the kernels read; None is absent. q, k, v, grad_out: (tensor, strides of row, head)."""

    q: Any
    k: Any
    v: Any
    grad_out: Any
    decays: Any  # G, of the shape of g; float64 for one decay per head
    beta: Any
    ends: Any
    owners: Any  # [chunks] int32: the segment of each chunk
    parents: Any
    roots: Any  # [S] int32
    squares: Any  # [1 or 2, chunks, H, CHUNK, CHUNK]: B, A
    inverses: Any  # [chunks, H, CHUNK, CHUNK]
    scale: Any
    segments: Any
    heads: Any
    shared: Any  # heads of v that share one of q and k


class Form(NamedTuple):
    """The constants of all kernels."""

    K: int
    V: int
    CHUNK: int
    BLOCK_K: int
    BLOCK_V: int
    PRECISION: str
    ROWS: int = ROWS
    CHANNELS: bool = False  # a decay per channel
    DELTA: bool = False
    L2_NORM: bool = False


@triton.jit
def zeros(rows: tl.constexpr, columns: tl.constexpr):
    return tl.zeros((rows, columns), tl.float32)


@triton.jit
def dot(a, b, form: tl.constexpr):
    """Return a b; of float32 operands as sums of PART products each, added in float32."""
    if form.PRECISION == "tf32x3" and a.shape[1] > PART:
        PARTS: tl.constexpr = a.shape[1] // PART
        of_a = tl.permute(tl.reshape(a, (a.shape[0], PARTS, PART)), (1, 0, 2))
        of_b = tl.reshape(b, (PARTS, PART, b.shape[1]))
        result = tl.sum(tl.dot(of_a, of_b, input_precision=form.PRECISION), 0)
    else:
        result = tl.dot(a, b, input_precision=form.PRECISION)
    return result


@triton.jit
def add_dot(total, a, b, form: tl.constexpr):
    if form.PRECISION == "tf32x3":
        result = total + dot(a, b, form)
    else:
        result = tl.dot(a, b, total, input_precision=form.PRECISION)
    return result


@triton.jit
def chunk_bounds(inputs, chunk, form: tl.constexpr):
    """Return the chunk's first token, and the end of its segment."""
    segment = tl.load(inputs.owners + chunk)
    begin = tl.load(inputs.ends + segment)
    start = begin + (chunk - begin // form.CHUNK - segment) * form.CHUNK
    return start, tl.load(inputs.ends + segment + 1)


@triton.jit
def load_rows(x, row, has, head, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the columns of a head from `first` on, in float32; 0 where there are none.

    x: (tensor, strides of row and head).
    """
    column = first + tl.arange(0, BLOCK)
    source = x[0] + row.to(tl.int64)[:, None] * x[1] + head * x[2] + column[None, :]
    return tl.load(source, mask=has[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_keys(x, row, has, head, form: tl.constexpr):
    """Return rows of q or k, normed if L2_NORM."""
    rows = load_rows(x, row, has, head, 0, form.K, form.BLOCK_K)
    if form.L2_NORM:
        rows *= tl.rsqrt(tl.sum(rows * rows, 1) + NORM_EPS)[:, None]
    return rows


@triton.jit
def load_decays(decays, row, has, head, heads, first, form: tl.constexpr):
    """Return G of rows, [rows, BLOCK_K] with a decay per channel, else [rows, 1]."""
    at = row.to(tl.int64) * heads + head
    if form.CHANNELS:
        column = first + tl.arange(0, form.BLOCK_K)
        source = decays + at[:, None] * form.K + column[None, :]
        sums = tl.load(source, mask=has[:, None] & (column < form.K)[None, :], other=0.0)
    else:
        sums = tl.load(decays + at, mask=has, other=0.0)[:, None]
    return sums


@triton.jit
def load_decay(inputs, row, head, first, form: tl.constexpr):
    """Return G of one row, [BLOCK_K] or [1]."""
    at = row.to(tl.int64) * inputs.heads + head
    if form.CHANNELS:
        column = first + tl.arange(0, form.BLOCK_K)
        sums = tl.load(inputs.decays + at * form.K + column, mask=column < form.K, other=0.0)
    else:
        sums = tl.load(inputs.decays + at + tl.arange(0, 1))
    return sums


@triton.jit
def decay_of(difference):
    """Return exp of a difference of G that is not positive; 1 where it is of no pair."""
    return tl.exp(tl.minimum(difference.to(tl.float32), 0.0))


@triton.jit
def load_betas(inputs, row, has, head):
    if inputs.beta is not None:
        at = row.to(tl.int64) * inputs.heads + head
        betas = tl.load(inputs.beta + at, mask=has, other=0.0)
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
def state_tile(states, index, head, heads, first_k, first_v, form: tl.constexpr):
    """Return the addresses of a tile of a state [K, V], and which of them exist."""
    i = first_k + tl.arange(0, form.BLOCK_K)
    j = first_v + tl.arange(0, form.BLOCK_V)
    at = (index.to(tl.int64) * heads + head) * (form.K * form.V)
    exists = (i < form.K)[:, None] & (j < form.V)[None, :]
    return states + at + i[:, None] * form.V + j[None, :], exists


@triton.jit
def load_state(states, index, head, heads, first_k, first_v, form: tl.constexpr):
    source, exists = state_tile(states, index, head, heads, first_k, first_v, form)
    return tl.load(source, mask=exists, other=0.0)


@triton.jit
def store_state(states, index, head, heads, first_v, state, form: tl.constexpr):
    target, exists = state_tile(states, index, head, heads, 0, first_v, form)
    tl.store(target, state, mask=exists)


@triton.jit
def value_tile(row, has, head, heads, first_v, form: tl.constexpr):
    """Return where the columns of rows are in a tensor [T, H, V], and which of them exist."""
    column = first_v + tl.arange(0, form.BLOCK_V)
    at = (row.to(tl.int64) * heads + head)[:, None] * form.V + column[None, :]
    return at, has[:, None] & (column < form.V)[None, :]


@triton.jit
def decays_kernel(g, inputs, form: tl.constexpr):
    """decays: G, of the shape of g. A program per chunk and head."""
    chunk, head, heads, decays = tl.program_id(0), tl.program_id(1), inputs.heads, inputs.decays
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    row = start + tl.arange(0, form.CHUNK)
    has = row < end
    sums = load_decays(g, row, has, head, heads, 0, form).to(decays.dtype.element_ty)
    sums = tl.cumsum(sums, 0)
    at = row.to(tl.int64)[:, None] * heads + head
    if form.CHANNELS:
        column = tl.arange(0, form.BLOCK_K)
        inside = has[:, None] & (column < form.K)[None, :]
        tl.store(decays + at * form.K + column[None, :], sums, mask=inside)
    else:
        tl.store(decays + at, sums, mask=has[:, None])


@triton.jit
def scores_kernel(squares, inputs, form: tl.constexpr):
    """squares: B, then A. A program per ROWS rows of a chunk."""
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    heads, decays, first = inputs.heads, inputs.decays, start + block * form.ROWS
    row, column = first + tl.arange(0, form.ROWS), start + tl.arange(0, form.CHUNK)
    has_row, has_column = row < end, column < end
    key_head = head // inputs.shared
    q_i = load_keys(inputs.q, row, has_row, key_head, form)
    k_i = load_keys(inputs.k, row, has_row, key_head, form)
    k_j = load_keys(inputs.k, column, has_column, key_head, form)
    g_i = load_decays(decays, row, has_row, head, heads, 0, form)
    g_j = load_decays(decays, column, has_column, head, heads, 0, form)
    of_keys = zeros(form.ROWS, form.CHUNK)
    if form.CHANNELS:
        between = load_decay(inputs, tl.minimum(first, end - 1), head, 0, form)[None, :]
        left = decay_of(g_i - between)
        right = tl.where((column < first)[:, None], k_j * decay_of(between - g_j), 0.0)
        of_queries = dot(q_i * left, tl.trans(right), form)
        if form.DELTA:
            of_keys = dot(k_i * left, tl.trans(right), form)
        other = first
        while other < tl.minimum(first + form.ROWS, end):
            one = other + tl.arange(0, 1)
            key = load_keys(inputs.k, one, one < end, key_head, form)
            key *= decay_of(g_i - load_decay(inputs, other, head, 0, form)[None, :])
            here = (column == other)[None, :]
            of_queries = tl.where(here, tl.sum(q_i * key, 1)[:, None], of_queries)
            if form.DELTA:
                of_keys = tl.where(here, tl.sum(k_i * key, 1)[:, None], of_keys)
            other += 1
    else:
        between = decay_of(g_i - tl.trans(g_j))
        of_queries = dot(q_i, tl.trans(k_j), form) * between
        if form.DELTA:
            of_keys = dot(k_i, tl.trans(k_j), form) * between
    lower = (row[:, None] >= column[None, :]) & has_row[:, None]
    at = (chunk.to(tl.int64) * heads + head) * (form.CHUNK * form.CHUNK)
    target = squares + at + (row - start)[:, None] * form.CHUNK + (column - start)[None, :]
    tl.store(target, tl.where(lower, of_queries * inputs.scale, 0.0))
    if form.DELTA:
        lower &= row[:, None] > column[None, :]
        target += tl.num_programs(0).to(tl.int64) * heads * (form.CHUNK * form.CHUNK)
        tl.store(target, tl.where(lower, of_keys, 0.0))


@triton.jit
def inverse_kernel(scores, inputs, form: tl.constexpr):
    """inverses: (I + diag(beta) A)^-1, by substitution. A program per chunk and head."""
    chunk, head, heads = tl.program_id(0), tl.program_id(1), inputs.heads
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    i = tl.arange(0, form.CHUNK)
    at = (chunk.to(tl.int64) * heads + head) * (form.CHUNK * form.CHUNK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, tl.minimum(form.CHUNK, end - start)):
        factors = tl.load(scores + at + row * form.CHUNK + i)
        if inputs.beta is not None:
            factors *= tl.load(inputs.beta + (start + row).to(tl.int64) * heads + head)
        solved = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == row, inverse - solved[None, :], inverse)
    tl.store(inputs.inverses + at + i[:, None] * form.CHUNK + i[None, :], inverse)


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
def is_of_tree(inputs, segment, root):
    """Whether the path of a segment begins with `root`."""
    result = True
    if inputs.roots is not None:
        result = tl.load(inputs.roots + segment) == root
    return result


@triton.jit
def states_kernel(inputs, initial, states, updates, finals, form: tl.constexpr):
    """states [chunks, H, K, V] before each chunk, updates U [T, H, V] and finals [S, H, K, V].

    A program per root, head and tile of columns.
    """
    root, head, first_v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * form.BLOCK_V
    heads, parents, last = inputs.heads, inputs.parents, root + 1
    if parents is not None:
        last = tl.where(tl.load(parents + root) < 0, inputs.segments, root)
    key_head = head // inputs.shared
    segment = root
    while segment < last:
        if is_of_tree(inputs, segment, root):
            state = zeros(form.BLOCK_K, form.BLOCK_V)
            if initial is not None:
                state = load_state(initial, segment, head, heads, 0, first_v, form)
            if parents is not None:
                parent = tl.load(parents + segment)
                if parent >= 0:
                    state = load_state(finals, parent, head, heads, 0, first_v, form)
            begin, end = tl.load(inputs.ends + segment), tl.load(inputs.ends + segment + 1)
            chunk = begin // form.CHUNK + segment
            start = begin
            while start < end:
                store_state(states, chunk, head, heads, first_v, state, form)
                row = start + tl.arange(0, form.CHUNK)
                has = row < end
                keys = load_keys(inputs.k, row, has, key_head, form)
                values = load_rows(inputs.v, row, has, head, first_v, form.V, form.BLOCK_V)
                sums = load_decays(inputs.decays, row, has, head, heads, 0, form)
                if form.DELTA:
                    values -= dot(keys * decay_of(sums), state, form)
                values *= load_betas(inputs, row, has, head)[:, None]
                if form.DELTA:
                    inverse = load_square(inputs.inverses, chunk, head, heads, form.CHUNK)
                    values = dot(inverse, values, form)
                at, inside = value_tile(row, has, head, heads, first_v, form)
                tl.store(updates + at, values, mask=inside)
                newest = tl.minimum(start + form.CHUNK, end) - 1
                total = load_decay(inputs, newest, head, 0, form)
                keys *= decay_of(total[None, :] - sums)
                state *= decay_of(total)[:, None]
                state = add_dot(state, tl.trans(keys), values, form)
                start += form.CHUNK
                chunk += 1
            if finals is not None:
                store_state(finals, segment, head, heads, first_v, state, form)
                tl.debug_barrier()  # before children of the segment read it
        segment += 1


@triton.jit
def out_kernel(inputs, states, updates, out, form: tl.constexpr):
    """out [T, H, V]. A program per chunk, head and tile of columns."""
    chunk, head, first_v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * form.BLOCK_V
    start, end = chunk_bounds(inputs, chunk, form)
    if start >= end:
        return
    heads, row = inputs.heads, start + tl.arange(0, form.CHUNK)
    has = row < end
    queries = load_keys(inputs.q, row, has, head // inputs.shared, form)
    queries *= decay_of(load_decays(inputs.decays, row, has, head, heads, 0, form)) * inputs.scale
    result = dot(queries, load_state(states, chunk, head, heads, 0, first_v, form), form)
    source = (updates, heads * form.V, form.V)
    values = load_rows(source, row, has, head, first_v, form.V, form.BLOCK_V)
    square = load_square(inputs.squares, chunk, head, heads, form.CHUNK)
    result = add_dot(result, square, values, form)
    at, inside = value_tile(row, has, head, heads, first_v, form)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def form_of(key_width: int, value_width: int, dtype: torch.dtype, **flags: bool) -> Form:
    """Return sizes and tiles of all kernels for keys and values of so many channels."""
    block_k = max(16, next_power_of_2(key_width))
    # Float32 operands are three products each of tensor cores.
    is_wide = block_k > 128 or dtype == torch.float32
    tile = 16 if is_wide else 32
    block_v = min(tile, max(16, next_power_of_2(value_width)))
    precision = "tf32x3" if dtype == torch.float32 else "tf32"
    return Form(key_width, value_width, tile, block_k, block_v, precision, **flags)


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, form: Form) -> None:
    launch(kernel, grid, *arguments, form=form, num_warps=NUM_WARPS)


def strided(x: Tensor) -> tuple[Any, ...]:
    """Return rows [T, heads, ...] with their strides, as `load_rows` takes them."""
    return (x, *x.stride()[:2])


def make_inputs(problem: Problem, grad_out: Tensor | None = None) -> tuple[Inputs, Form]:
    """Compute what forward and backward need of all chunks before states follow one another."""
    q, k, v, g, beta, ends, parents, _, scale, delta_rule, l2_norm = problem
    heads, segments = v.shape[1], ends.shape[0] - 1
    flags = {"CHANNELS": g.dim() == 3, "DELTA": delta_rule, "L2_NORM": l2_norm}
    form = form_of(q.shape[2], v.shape[2], q.dtype, **flags)
    chunks = q.shape[0] // form.CHUNK + segments
    index = torch.arange(chunks, device=q.device, dtype=torch.int32)
    first = ends[:-1] // form.CHUNK + index[:segments]
    owners = torch.searchsorted(first, index, right=True, out_int32=True) - 1
    roots = None
    if parents is not None:
        roots = torch.empty_like(parents)
        launch(roots_kernel, (segments,), parents, roots)
    squares = g.new_empty(1 + delta_rule, chunks, heads, form.CHUNK, form.CHUNK)
    inputs = Inputs(
        q=strided(q),
        k=strided(k),
        v=strided(v),
        grad_out=None if grad_out is None else strided(grad_out),
        decays=torch.empty_like(g, dtype=torch.float32 if g.dim() == 3 else torch.float64),
        beta=beta,
        ends=ends,
        owners=owners,
        parents=parents,
        roots=roots,
        squares=squares,
        inverses=torch.empty_like(squares[1]) if delta_rule else None,
        scale=scale,
        segments=segments,
        heads=heads,
        shared=heads // q.shape[1],
    )
    run(decays_kernel, (chunks, heads), g, inputs, form=form)
    run(scores_kernel, (chunks, heads, form.CHUNK // ROWS), squares, inputs, form=form)
    if delta_rule:
        run(inverse_kernel, (chunks, heads), squares[1], inputs, form=form)
    return inputs, form


def linear_recurrence(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, states before each chunk, or none of them, last states, or none of them).

    arguments: those of a Problem, keep_states and wants_final.
    """
    *given, keep_states, wants_final = arguments
    problem = Problem(*given)
    q, _, v, g, _, ends, parents, initial_state, *_ = problem
    segments, (heads, width) = ends.shape[0] - 1, v.shape[1:]
    state_shape = (heads, q.shape[2], width)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    empty = g.new_empty(0, *state_shape)
    if segments == 0:
        return out, empty, empty
    inputs, form = make_inputs(problem)
    chunks = inputs.owners.shape[0]
    states, updates = g.new_empty(chunks, *state_shape), g.new_empty(v.shape)
    has_finals = wants_final or parents is not None
    finals = g.new_empty(segments, *state_shape) if has_finals else None
    tiles = ceil_div(width, form.BLOCK_V)
    of_states = (inputs, initial_state, states, updates, finals)
    run(states_kernel, (segments, heads, tiles), *of_states, form=form)
    run(out_kernel, (chunks, heads, tiles), inputs, states, updates, out, form=form)
    final = finals if finals is not None and wants_final else empty
    return out, states if keep_states else empty, final
