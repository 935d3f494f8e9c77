"""causal_conv1d in Triton: one pass over x forwards, one over x and the gradient backwards.

Tokens of a segment read rows of x that lie before them. The first W - 1 tokens also read rows of
the segment's path: `heads` [S, W - 1] names them, j = 0 the last one. Rows count the tokens, then
the rows of initial_state, then one that is absent. Backwards a row gathers the gradients of the
tokens that read it, those of other segments in ascending order, so nothing is added atomically.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch

BLOCK_T, BLOCK_C = 32, 64
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


@triton.jit
def _rows_back(
    x,
    state,
    heads,
    token,
    segment,
    begin,
    channel,
    has,
    tokens,
    segments,
    channels,
    stride,
    back: tl.constexpr,
    HAS_HEADS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the rows that lie `back` before the tokens, on their paths, in float32."""
    row = token - back
    inside = (row >= begin)[:, None] & has
    value = tl.load(
        x + row.to(tl.int64)[:, None] * stride + channel[None, :], mask=inside, other=0.0
    )
    value = value.to(tl.float32)
    if HAS_HEADS and back > 0:
        outside = (row < begin)[:, None] & has
        if tl.max(outside.to(tl.int32)) > 0:
            before = tl.minimum(tl.maximum(begin - row - 1, 0), WIDTH - 2)
            head = tl.load(heads + segment * (WIDTH - 1) + before)
            of_x = outside & (head < tokens)[:, None]
            source = x + head.to(tl.int64)[:, None] * stride + channel[None, :]
            from_x = tl.load(source, mask=of_x, other=0.0).to(tl.float32)
            value = tl.where(of_x, from_x, value)
            if HAS_STATE:
                index = head - tokens
                of_state = (index >= 0) & (index < segments * (WIDTH - 1))
                of_state = outside & of_state[:, None]
                source = state + index.to(tl.int64)[:, None] * channels + channel[None, :]
                from_state = tl.load(source, mask=of_state, other=0.0).to(tl.float32)
                value = tl.where(of_state, from_state, value)
    return value


@triton.jit
def forward_kernel(
    x,
    taps,
    bias,
    ends,
    segment_ids,
    heads,
    state,
    out,
    tokens,
    segments,
    channels,
    stride,
    HAS_BIAS: tl.constexpr,
    HAS_HEADS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out [T, C] from x [T, C] and taps [WIDTH, C]; a program per tile."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has = (token < tokens)[:, None] & (channel < channels)[None, :]
    segment = tl.load(segment_ids + token, mask=token < tokens, other=0)
    segment = tl.minimum(segment, segments - 1)
    begin = tl.load(ends + segment)
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for j in tl.static_range(WIDTH):
        value = _rows_back(
            x,
            state,
            heads,
            token,
            segment,
            begin,
            channel,
            has,
            tokens,
            segments,
            channels,
            stride,
            WIDTH - 1 - j,
            HAS_HEADS,
            HAS_STATE,
            WIDTH,
        )
        sums += value * tl.load(taps + j * channels + channel, mask=channel < channels, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=channel < channels, other=0.0)
    if SILU:
        sums = sums * tl.sigmoid(sums)
    target = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=has)


@triton.jit
def _grad_before_activation(
    grad_out,
    x,
    taps,
    bias,
    ends,
    heads,
    state,
    token,
    segment,
    channel,
    has,
    tokens,
    segments,
    channels,
    grad_stride,
    stride,
    HAS_BIAS: tl.constexpr,
    HAS_HEADS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the gradients of the tokens' sums, 0 where not `has`, in float32."""
    source = grad_out + token.to(tl.int64)[:, None] * grad_stride + channel[None, :]
    grad = tl.load(source, mask=has, other=0.0).to(tl.float32)
    if SILU:
        begin = tl.load(ends + segment)
        sums = tl.zeros_like(grad)
        for j in tl.static_range(WIDTH):
            value = _rows_back(
                x,
                state,
                heads,
                token,
                segment,
                begin,
                channel,
                has,
                tokens,
                segments,
                channels,
                stride,
                WIDTH - 1 - j,
                HAS_HEADS,
                HAS_STATE,
                WIDTH,
            )
            tap = tl.load(taps + j * channels + channel, mask=channel < channels, other=0.0)
            sums += value * tap
        if HAS_BIAS:
            sums += tl.load(bias + channel, mask=channel < channels, other=0.0)
        sigmoid = tl.sigmoid(sums)
        # A large negative sum times 1 - sigmoid is large; its product with sigmoid 0 is 0.
        grad = grad * (sigmoid + (sums * sigmoid) * (1.0 - sigmoid))
    return grad


@triton.jit
def first_grads_kernel(
    grad_out,
    x,
    taps,
    bias,
    ends,
    heads,
    state,
    first_grads,
    tokens,
    segments,
    channels,
    grad_stride,
    stride,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """first_grads [S, WIDTH - 1, C]: of the sums of each segment's first tokens, which read heads.

    A program per segment and tile of channels.
    """
    segment = tl.program_id(0)
    offset, channel = tl.arange(0, 4), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    token = tl.load(ends + segment) + offset
    is_token = (token < tl.load(ends + segment + 1)) & (offset < WIDTH - 1)
    grad = _grad_before_activation(
        grad_out,
        x,
        taps,
        bias,
        ends,
        heads,
        state,
        token,
        segment + offset * 0,
        channel,
        is_token[:, None] & (channel < channels)[None, :],
        tokens,
        segments,
        channels,
        grad_stride,
        stride,
        HAS_BIAS,
        True,
        HAS_STATE,
        SILU,
        WIDTH,
    )
    row = segment.to(tl.int64) * (WIDTH - 1) + offset
    target = first_grads + row[:, None] * channels + channel[None, :]
    tl.store(target, grad, mask=(offset < WIDTH - 1)[:, None] & (channel < channels)[None, :])


@triton.jit
def backward_kernel(
    grad_out,
    x,
    taps,
    bias,
    ends,
    segment_ids,
    heads,
    state,
    order,
    run_ends,
    first_grads,
    grad_rows,
    partials,
    first_row,
    rows,
    tokens,
    segments,
    channels,
    grad_stride,
    stride,
    HAS_BIAS: tl.constexpr,
    HAS_HEADS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    WANT_ROWS: tl.constexpr,
    WANT_TAPS: tl.constexpr,
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
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = channel < channels
    has = (row < rows)[:, None] & has_channel[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if OF_TOKENS:
        segment = tl.load(segment_ids + row, mask=row < rows, other=0)
        segment = tl.minimum(segment, segments - 1)
        begin, end = tl.load(ends + segment), tl.load(ends + segment + 1)
        for ahead in tl.static_range(WIDTH if WANT_ROWS else 1):
            grad = _grad_before_activation(
                grad_out,
                x,
                taps,
                bias,
                ends,
                heads,
                state,
                row + ahead,
                segment,
                channel,
                has & (row + ahead < end)[:, None],
                tokens,
                segments,
                channels,
                grad_stride,
                stride,
                HAS_BIAS,
                HAS_HEADS,
                HAS_STATE,
                SILU,
                WIDTH,
            )
            if WANT_ROWS:
                at_tap = (WIDTH - 1 - ahead) * channels + channel
                sums += grad * tl.load(taps + at_tap, mask=has_channel, other=0.0)
            if WANT_TAPS and ahead == 0:
                partial = partials + tl.program_id(0).to(tl.int64) * (WIDTH + 1) * channels
                for j in tl.static_range(WIDTH):
                    value = _rows_back(
                        x,
                        state,
                        heads,
                        row,
                        segment,
                        begin,
                        channel,
                        has,
                        tokens,
                        segments,
                        channels,
                        stride,
                        WIDTH - 1 - j,
                        HAS_HEADS,
                        HAS_STATE,
                        WIDTH,
                    )
                    of_tap = tl.sum(grad * value, 0)
                    tl.store(partial + j * channels + channel, of_tap, mask=has_channel)
                of_bias = tl.sum(grad, 0)
                tl.store(partial + WIDTH * channels + channel, of_bias, mask=has_channel)
    if WANT_ROWS:
        if HAS_HEADS:
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


class _Segments:
    """Where tokens and the rows before segments lie; made on the device, without waiting."""

    def __init__(
        self, x: Tensor, ends: Tensor, parents: Tensor | None, state: Tensor | None, width: int
    ) -> None:
        self.tokens, self.segments = x.shape[0], ends.shape[0] - 1
        token = torch.arange(self.tokens, device=x.device, dtype=torch.int32)
        self.ids = torch.searchsorted(ends[1:], token, right=True, out_int32=True)
        self.flags: dict[str, Any] = {
            "HAS_HEADS": parents is not None or state is not None,
            "HAS_STATE": state is not None,
            "WIDTH": width,
            "BLOCK_T": BLOCK_T,
            "BLOCK_C": BLOCK_C,
        }
        self.heads = None
        if self.flags["HAS_HEADS"] and self.segments:
            self.heads = ends.new_empty(self.segments, width - 1)
            flags = {"HAS_PARENTS": parents is not None, "HAS_STATE": state is not None}
            grid, arguments = (self.segments,), (ends, parents, self.heads, self.tokens)
            launch(heads_kernel, grid, *arguments, **flags, WIDTH=width)


def causal_conv1d(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    state: Tensor | None,
    silu: bool,
) -> Tensor:
    """Return [T, C] from x [T, C] of inner stride 1 and taps [W, C], the oldest first."""
    (tokens, channels), out = x.shape, x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    known = _Segments(x, ends, parents, state, taps.shape[0])
    launch(
        forward_kernel,
        (ceil_div(tokens, BLOCK_T), ceil_div(channels, BLOCK_C)),
        x,
        taps,
        bias,
        ends,
        known.ids,
        known.heads,
        state,
        out,
        tokens,
        known.segments,
        channels,
        x.stride(0),
        HAS_BIAS=bias is not None,
        SILU=silu,
        **known.flags,
    )
    return out


def causal_conv1d_backward(
    grad_out: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    state: Tensor | None,
    silu: bool,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, taps, bias and initial_state, None where not wanted."""
    wants_x, wants_taps, wants_bias, wants_state = wanted
    (tokens, channels), width = x.shape, taps.shape[0]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_x else None
    grad_state = torch.zeros_like(state) if wants_state and state is not None else None
    if x.numel() == 0:
        of_taps = torch.zeros_like(taps) if wants_taps else None
        return grad_x, of_taps, torch.zeros_like(taps[0]) if wants_bias else None, grad_state
    known = _Segments(x, ends, parents, state, width)
    order = run_ends = first_grads = None
    if known.heads is not None:
        first_grads = taps.new_empty(known.segments, width - 1, channels)
        launch(
            first_grads_kernel,
            (known.segments, ceil_div(channels, BLOCK_C)),
            grad_out,
            x,
            taps,
            bias,
            ends,
            known.heads,
            state,
            first_grads,
            tokens,
            known.segments,
            channels,
            grad_out.stride(0),
            x.stride(0),
            HAS_BIAS=bias is not None,
            HAS_STATE=state is not None,
            SILU=silu,
            WIDTH=width,
            BLOCK_C=BLOCK_C,
        )
        named, order = known.heads.flatten().sort(stable=True)
        rows = tokens + known.segments * (width - 1)
        every = torch.arange(rows + 1, device=x.device, dtype=torch.int32)
        run_ends = torch.searchsorted(named, every, out_int32=True)
    tiles, of_weights = ceil_div(tokens, BLOCK_T), wants_taps or wants_bias
    partials = taps.new_empty(tiles, width + 1, channels) if of_weights else None

    def run(grad_rows: Tensor | None, first: int, rows: int, of_tokens: bool) -> None:
        launch(
            backward_kernel,
            (ceil_div(rows, BLOCK_T), ceil_div(channels, BLOCK_C)),
            grad_out,
            x,
            taps,
            bias,
            ends,
            known.ids,
            known.heads,
            state,
            order,
            run_ends,
            first_grads,
            grad_rows,
            partials,
            first,
            rows,
            tokens,
            known.segments,
            channels,
            grad_out.stride(0),
            x.stride(0),
            HAS_BIAS=bias is not None,
            SILU=silu,
            OF_TOKENS=of_tokens,
            WANT_ROWS=grad_rows is not None,
            WANT_TAPS=of_weights,
            num_warps=NUM_WARPS[True],
            **known.flags,
        )

    if wants_x or of_weights:
        run(grad_x, 0, tokens, True)
    if grad_state is not None:
        run(grad_state, tokens, known.segments * (width - 1), False)
    sums = None if partials is None else partials.sum(0)
    grad_taps = sums[:width] if sums is not None and wants_taps else None
    grad_bias = sums[width] if sums is not None and wants_bias else None
    return grad_x, grad_taps, grad_bias, grad_state
