"""causal_conv1d in Triton: one pass over x forwards, one over x and the gradient backwards.

Tokens of a segment read rows of x that lie before them. The first W - 1 tokens also read rows of
the segment's path: `heads` [S, W - 1] names them, j = 0 the last one. Rows count the tokens, then
the rows of initial_state, then one that is absent. Backwards a row gathers the gradients of the
tokens that read it, those of other segments in ascending order, so nothing is added atomically.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch

BLOCK_T, BLOCK_C = 32, 64
TILE = {"BLOCK_T": BLOCK_T, "BLOCK_C": BLOCK_C}
NUM_WARPS = 4, 8  # forwards and backwards


@triton.jit
def heads_kernel(
    ends,
    parents,
    heads,
    tokens,
    HAS_PARENTS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """heads [S, WIDTH - 1]: the rows before each segment. A program per segment."""
    segment = tl.program_id(0)
    for j in tl.static_range(WIDTH - 1):
        root, row = segment, tokens + tl.num_programs(0) * (WIDTH - 1)
        missing = segment * 0 + j + 1  # rows that the ancestors looked at do not have
        if HAS_PARENTS:
            ancestor = tl.load(parents + segment)
            while ancestor >= 0:
                begin, end = tl.load(ends + ancestor), tl.load(ends + ancestor + 1)
                has_row = missing <= end - begin
                row = tl.where(has_row, end - missing, row)
                missing = tl.where(has_row, 0, missing - (end - begin))
                root = ancestor
                ancestor = tl.where(has_row, -1, tl.load(parents + ancestor))
        if HAS_STATE:
            of_state = tokens + root * (WIDTH - 1) + WIDTH - 1 - missing
            row = tl.where(missing > 0, of_state, row)
        tl.store(heads + segment * (WIDTH - 1) + j, row)


class Inputs(NamedTuple):
    """What the kernels read; None is absent. heads, and the sizes, are those of `_inputs`."""

    x: Any  # [T, C] of inner stride 1
    taps: Any  # [WIDTH, C], float32
    bias: Any  # [C], float32
    ends: Any
    segment_ids: Any  # [T], the segment of each token
    heads: Any
    state: Any
    tokens: Any
    segments: Any
    channels: Any
    stride: Any  # of a row of x


@triton.jit
def _segment_of(inputs, token):
    segment = tl.load(inputs.segment_ids + token, mask=token < inputs.tokens, other=0)
    return tl.minimum(segment, inputs.segments - 1)


@triton.jit
def _rows_back(
    inputs, token, segment, begin, channel, has, back: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the rows that lie `back` before the tokens, on their paths, in float32."""
    x, heads, row = inputs.x, inputs.heads, token - back
    inside = (row >= begin)[:, None] & has
    source = x + row.to(tl.int64)[:, None] * inputs.stride + channel[None, :]
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if heads is not None and back > 0:
        outside = (row < begin)[:, None] & has
        if tl.max(outside.to(tl.int32)) > 0:
            before = tl.minimum(tl.maximum(begin - row - 1, 0), WIDTH - 2)
            head = tl.load(heads + segment * (WIDTH - 1) + before)
            of_x = outside & (head < inputs.tokens)[:, None]
            source = x + head.to(tl.int64)[:, None] * inputs.stride + channel[None, :]
            from_x = tl.load(source, mask=of_x, other=0.0).to(tl.float32)
            value = tl.where(of_x, from_x, value)
            if inputs.state is not None:
                index = head - inputs.tokens
                of_state = (index >= 0) & (index < inputs.segments * (WIDTH - 1))
                of_state = outside & of_state[:, None]
                at = index.to(tl.int64)[:, None] * inputs.channels + channel[None, :]
                from_state = tl.load(inputs.state + at, mask=of_state, other=0.0).to(tl.float32)
                value = tl.where(of_state, from_state, value)
    return value


@triton.jit
def _sums(inputs, token, segment, begin, channel, has, WIDTH: tl.constexpr):
    """Return the tokens' sums, those before the activation, in float32."""
    sums = tl.zeros(has.shape, tl.float32)
    for j in tl.static_range(WIDTH):
        value = _rows_back(inputs, token, segment, begin, channel, has, WIDTH - 1 - j, WIDTH)
        at = j * inputs.channels + channel
        sums += value * tl.load(inputs.taps + at, mask=channel < inputs.channels, other=0.0)
    if inputs.bias is not None:
        sums += tl.load(inputs.bias + channel, mask=channel < inputs.channels, other=0.0)
    return sums


@triton.jit
def forward_kernel(
    inputs,
    out,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out [T, C] from x [T, C] and taps [WIDTH, C]; a program per tile."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has = (token < inputs.tokens)[:, None] & (channel < inputs.channels)[None, :]
    segment = _segment_of(inputs, token)
    begin = tl.load(inputs.ends + segment)
    sums = _sums(inputs, token, segment, begin, channel, has, WIDTH)
    if SILU:
        sums = sums * tl.sigmoid(sums)
    target = out + token.to(tl.int64)[:, None] * inputs.channels + channel[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=has)


@triton.jit
def _grad_before_activation(
    inputs,
    grad_out,
    grad_stride,
    token,
    segment,
    channel,
    has,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the gradients of the tokens' sums, 0 where not `has`, in float32."""
    source = grad_out + token.to(tl.int64)[:, None] * grad_stride + channel[None, :]
    grad = tl.load(source, mask=has, other=0.0).to(tl.float32)
    if SILU:
        begin = tl.load(inputs.ends + segment)
        sums = _sums(inputs, token, segment, begin, channel, has, WIDTH)
        sigmoid = tl.sigmoid(sums)
        # A large negative sum times 1 - sigmoid is large; its product with sigmoid 0 is 0.
        grad = grad * (sigmoid + (sums * sigmoid) * (1.0 - sigmoid))
    return grad


@triton.jit
def first_grads_kernel(
    inputs,
    grad_out,
    grad_stride,
    first_grads,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """first_grads [S, WIDTH - 1, C]: of the sums of each segment's first tokens, which read heads.

    A program per segment and tile of channels.
    """
    segment = tl.program_id(0)
    offset, channel = tl.arange(0, 4), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    token = tl.load(inputs.ends + segment) + offset
    is_token = (token < tl.load(inputs.ends + segment + 1)) & (offset < WIDTH - 1)
    has_channel = (channel < inputs.channels)[None, :]
    owner, has = segment + offset * 0, is_token[:, None] & has_channel
    grad = _grad_before_activation(
        inputs, grad_out, grad_stride, token, owner, channel, has, SILU, WIDTH
    )
    row = segment.to(tl.int64) * (WIDTH - 1) + offset
    target = first_grads + row[:, None] * inputs.channels + channel[None, :]
    tl.store(target, grad, mask=(offset < WIDTH - 1)[:, None] & has_channel)


@triton.jit
def backward_kernel(
    inputs,
    grad_out,
    grad_stride,
    first_grads,
    order,
    run_ends,
    grad_rows,
    partials,
    first_row,
    rows,
    SILU: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradients of `rows` rows from `first_row` on, and partial sums of those of the taps.

    grad_rows: [rows, C], of x if OF_TOKENS, else of initial_state.
    partials: [row tiles, WIDTH + 1, C], of the taps and of the bias.
    order: the entries of `heads`, sorted by the row that they name; those of row r end at
    run_ends[r + 1]. first_grads: of the tokens that read them.
    """
    channels, taps = inputs.channels, inputs.taps
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < channels
    has = (row < rows)[:, None] & has_channel[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if OF_TOKENS:
        segment = _segment_of(inputs, row)
        begin, end = tl.load(inputs.ends + segment), tl.load(inputs.ends + segment + 1)
        for ahead in tl.static_range(WIDTH if grad_rows is not None else 1):
            token, is_token = row + ahead, has & (row + ahead < end)[:, None]
            grad = _grad_before_activation(
                inputs, grad_out, grad_stride, token, segment, channel, is_token, SILU, WIDTH
            )
            if grad_rows is not None:
                at_tap = (WIDTH - 1 - ahead) * channels + channel
                sums += grad * tl.load(taps + at_tap, mask=has_channel, other=0.0)
            if partials is not None and ahead == 0:
                partial = partials + tl.program_id(0).to(tl.int64) * (WIDTH + 1) * channels
                for j in tl.static_range(WIDTH):
                    value = _rows_back(
                        inputs, row, segment, begin, channel, has, WIDTH - 1 - j, WIDTH
                    )
                    of_tap = tl.sum(grad * value, 0)
                    tl.store(partial + j * channels + channel, of_tap, mask=has_channel)
                of_bias = tl.sum(grad, 0)
                tl.store(partial + WIDTH * channels + channel, of_bias, mask=has_channel)
    if grad_rows is not None:
        if inputs.heads is not None:
            run = tl.load(run_ends + first_row + row, mask=row < rows, other=0)
            run_end = tl.load(run_ends + first_row + row + 1, mask=row < rows, other=0)
            for i in range(0, tl.max(run_end - run)):
                inside = run + i < run_end
                entry = tl.load(order + run + i, mask=inside, other=0)
                child, back = entry // (WIDTH - 1), entry % (WIDTH - 1) + 1
                for offset in tl.static_range(WIDTH - 1):
                    reads = (inside & (back + offset < WIDTH))[:, None] & has
                    at_grad = (child * (WIDTH - 1) + offset)[:, None] * channels + channel[None, :]
                    grad_first = tl.load(first_grads + at_grad, mask=reads, other=0.0)
                    at_taps = (WIDTH - 1 - back - offset)[:, None] * channels + channel[None, :]
                    sums += grad_first * tl.load(taps + at_taps, mask=reads, other=0.0)
        target = grad_rows + row.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(target, sums.to(grad_rows.dtype.element_ty), mask=has)


def _inputs(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    state: Tensor | None,
) -> Inputs:
    """Find where tokens and the rows before segments lie, on the device, without waiting."""
    (tokens, channels), width, segments = x.shape, taps.shape[0], ends.shape[0] - 1
    token = torch.arange(tokens, device=x.device, dtype=torch.int32)
    ids = torch.searchsorted(ends[1:], token, right=True, out_int32=True)
    heads = None
    if segments and (parents is not None or state is not None):
        heads = ends.new_empty(segments, width - 1)
        flags = {"HAS_PARENTS": parents is not None, "HAS_STATE": state is not None}
        launch(heads_kernel, (segments,), ends, parents, heads, tokens, **flags, WIDTH=width)
    sizes = (tokens, segments, channels, x.stride(0))
    return Inputs(x, taps, bias, ends, ids, heads, state, *sizes)


def causal_conv1d(*arguments: Any) -> Tensor:
    """Return [T, C] from x [T, C] of inner stride 1 and taps [W, C], the oldest first.

    arguments: those of `_inputs`, and whether the activation is silu.
    """
    *read, silu = arguments
    x, taps, *_ = read
    (tokens, channels), out = x.shape, x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    inputs = _inputs(*read)
    grid = ceil_div(tokens, BLOCK_T), ceil_div(channels, BLOCK_C)
    launch(forward_kernel, grid, inputs, out, SILU=silu, WIDTH=taps.shape[0], **TILE)
    return out


def causal_conv1d_backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, taps, bias and initial_state, None where not wanted.

    arguments: those of `causal_conv1d`, and `wanted`.
    """
    *read, silu, wanted = arguments
    x, taps, _, _, _, state = read
    wants_x, wants_taps, wants_bias, wants_state = wanted
    (tokens, channels), width = x.shape, taps.shape[0]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_x else None
    grad_state = torch.zeros_like(state) if wants_state and state is not None else None
    if x.numel() == 0:
        of_taps = torch.zeros_like(taps) if wants_taps else None
        return grad_x, of_taps, torch.zeros_like(taps[0]) if wants_bias else None, grad_state
    inputs = _inputs(*read)
    segments, options = inputs.segments, {"SILU": silu, "WIDTH": width}
    arguments = (inputs, grad_out, grad_out.stride(0))
    order = run_ends = first_grads = None
    if inputs.heads is not None:
        first_grads = taps.new_empty(segments, width - 1, channels)
        grid = segments, ceil_div(channels, BLOCK_C)
        launch(first_grads_kernel, grid, *arguments, first_grads, **options, BLOCK_C=BLOCK_C)
        named, order = inputs.heads.flatten().sort(stable=True)
        rows = tokens + segments * (width - 1)
        every = torch.arange(rows + 1, device=x.device, dtype=torch.int32)
        run_ends = torch.searchsorted(named, every, out_int32=True)
    tiles, of_weights = ceil_div(tokens, BLOCK_T), wants_taps or wants_bias
    partials = taps.new_empty(tiles, width + 1, channels) if of_weights else None
    options |= {**TILE, "num_warps": NUM_WARPS[True]}

    def run(grad_rows: Tensor | None, first: int, rows: int, of_tokens: bool) -> None:
        grid = ceil_div(rows, BLOCK_T), ceil_div(channels, BLOCK_C)
        tables = (first_grads, order, run_ends, grad_rows, partials, first, rows)
        launch(backward_kernel, grid, *arguments, *tables, OF_TOKENS=of_tokens, **options)

    if wants_x or of_weights:
        run(grad_x, 0, tokens, True)
    if grad_state is not None:
        run(grad_state, tokens, segments * (width - 1), False)
    sums = None if partials is None else partials.sum(0)
    grad_taps = sums[:width] if sums is not None and wants_taps else None
    grad_bias = sums[width] if sums is not None and wants_bias else None
    return grad_x, grad_taps, grad_bias, grad_state
