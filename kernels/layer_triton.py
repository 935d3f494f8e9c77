"""Norms and gated_activation in Triton, batch-invariant: the algorithms of csrc/layer.

The order in which a row is summed depends on the row's width alone: it fixes the tile of a program,
and `_one_layout` the alignment, by which Triton chooses how a tile lies in the threads.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import ceil_div, launch, next_power_of_2

TILE = 4096  # elements of a program, of several rows if they are narrow
PARTIAL_ROWS = 128  # rows of a partial sum of the weight's gradient
GATED_BLOCK = 1024
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)
_DENSITY = tl.constexpr(0.3989423)  # 1 / sqrt(2 pi)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    weight,
    bias,
    out,
    inverse_rms,
    rows,
    width,
    x_stride,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    CENTERED: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    values = values.to(tl.float32)
    if CENTERED:
        values = tl.where(inside, values - (tl.sum(values, 1) / width)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 1) / width + eps)
    normed = values * inverse[:, None]
    if ROUND_FIRST:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    result = normed * factor[None, :]
    if bias is not None:
        added = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
        result += added[None, :]
    result = result.to(out.dtype.element_ty)
    tl.store(out + row[:, None] * width + column[None, :], result, mask=inside)
    if KEEP:
        tl.store(inverse_rms + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    grad,
    x,
    weight,
    inverse_rms,
    grad_x,
    partials,
    bias_partials,
    rows,
    width,
    grad_stride,
    x_stride,
    offset,
    CENTERED: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_x, and in `partials` the gradients of weight and bias of PARTIAL_ROWS rows."""
    column = tl.arange(0, BLOCK)
    has_column = column < width
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0).to(tl.int64) * PARTIAL_ROWS
    for start in range(0, PARTIAL_ROWS, ROWS):
        row = first + start + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & has_column[None, :]
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        given = tl.load(grad + row[:, None] * grad_stride + column[None, :], inside, 0.0)
        inverse = tl.load(inverse_rms + row, mask=row < rows, other=0.0)
        values = values.to(tl.float32)
        given = given.to(tl.float32)
        if CENTERED:
            values = tl.where(inside, values - (tl.sum(values, 1) / width)[:, None], 0.0)
            bias_sums += given
        normed = values * inverse[:, None]
        sums += given * normed
        # Here, not before the loop: few registers are left in wide rows.
        factor = tl.load(weight + column, mask=has_column, other=0.0).to(tl.float32) + offset
        given *= factor[None, :]
        mean = tl.sum(given * normed, 1) / width
        result = given - normed * mean[:, None]
        if CENTERED:
            result -= (tl.sum(given, 1) / width)[:, None]
        result = inverse[:, None] * result
        target = grad_x + row[:, None] * width + column[None, :]
        tl.store(target, result.to(grad_x.dtype.element_ty), mask=inside)
    target = partials + tl.program_id(0).to(tl.int64) * width + column
    tl.store(target, tl.sum(sums, 0), mask=has_column)
    if CENTERED:
        target = bias_partials + tl.program_id(0).to(tl.int64) * width + column
        tl.store(target, tl.sum(bias_sums, 0), mask=has_column)


def norm_tile(width: int) -> dict[str, int]:
    """Return ROWS, BLOCK and num_warps for rows of this width."""
    block = next_power_of_2(width)
    warps = min(max(block // 512, 4), 32)
    return {"ROWS": min(max(1, TILE // block), PARTIAL_ROWS), "BLOCK": block, "num_warps": warps}


def _one_layout(x: Tensor) -> Tensor:
    """Return x [rows, width], a copy if a load of its rows would not be aligned as the width is."""
    stride, width = x.stride(0), x.shape[1]
    aligned = stride % 16 == 0 and x.data_ptr() % 16 == 0
    fits = aligned if width % 16 == 0 else stride == width
    return x if fits and x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the normed rows of x [rows, width], and with `keep` 1 / rms of each."""
    return _norm(x, weight, None, eps, keep, offset, round_first)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the normed rows of x [rows, width], and 1 / (standard deviation) of each."""
    return _norm(x, weight, bias, eps, keep, centered=True)


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    keep: bool,
    offset: float = 0.0,
    round_first: bool = False,
    centered: bool = False,
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    x, weight = _one_layout(x), _one_layout(weight[None])
    bias = None if bias is None else _one_layout(bias[None])
    out, inverse = (
        x.new_empty(rows, width),
        x.new_empty(rows if keep else 0, dtype=torch.float32),
    )
    if out.numel():
        tile = norm_tile(width)
        launch(
            norm_kernel,
            (ceil_div(rows, tile["ROWS"]),),
            *(x, weight, bias, out, inverse, rows, width, x.stride(0), eps, offset),
            ROUND_FIRST=round_first,
            CENTERED=centered,
            KEEP=keep,
            **tile,
        )
    return out, inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, and of the weight in float32.

    The latter is the sum of partial sums over PARTIAL_ROWS rows each, in a fixed order.
    """
    grad_x, partials = _norm_backward(grad, x, weight, inverse_rms, offset, False)
    return grad_x, partials[0]


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, and of weight and bias in float32, as `rms_norm_backward`."""
    grad_x, (grad_weight, grad_bias) = _norm_backward(grad, x, weight, inverse, 0.0, True)
    return grad_x, grad_weight, grad_bias


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, offset: float, centered: bool
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    grad, x, weight = _one_layout(grad), _one_layout(x), _one_layout(weight[None])
    grad_x = x.new_empty(rows, width)
    programs = ceil_div(rows, PARTIAL_ROWS)
    partials = x.new_empty(1 + centered, programs, width, dtype=torch.float32)
    if grad_x.numel():
        launch(
            norm_backward_kernel,
            (programs,),
            *(grad, x, weight, inverse, grad_x, partials[0], partials[-1], rows, width),
            *(grad.stride(0), x.stride(0), offset),
            CENTERED=centered,
            PARTIAL_ROWS=PARTIAL_ROWS,
            **norm_tile(width),
        )
    return grad_x, partials.sum(1)


@triton.jit
def _normal_cdf(value):
    """Phi(value), and exp(-value^2 / 2); csrc/layer/gated_activation_cpu.cpp has the formula."""
    t = 1.0 / (1.0 + 0.31819805 * tl.abs(value))
    bell = tl.exp(-0.5 * value * value)
    p = 0.17739663 - 0.03891822 * t
    p = p * t - 0.27005097
    p = p * t + 0.10323072
    p = p * t + 0.008416286
    p = p * t + 0.10468497
    p = p * t + 0.18000217
    p = p * t + 0.22738381
    p = p * t + 0.25397301
    p = p * t + 0.2538816
    tail = 0.5 * bell * t * p
    return tl.where(value < 0.0, tail, 1.0 - tail), bell


@triton.jit
def _activated(value, ACTIVATION: tl.constexpr):
    """The activation of value, and its derivative.

    GELU by tanh is value * sigmoid(s) with s / 2 = sqrt(2 / pi) (value + c value^3).
    """
    s = value
    if ACTIVATION == "gelu_tanh":
        s = 2 * _SQRT_2_OVER_PI * value * (1.0 + _CUBIC * value * value)
    sigmoid = 1.0 / (1.0 + tl.exp(-s))
    change = sigmoid * (1.0 - sigmoid)
    if ACTIVATION == "sigmoid":
        result = sigmoid
        slope = change
    elif ACTIVATION == "softplus":
        small = tl.exp(-tl.abs(value))
        total = 1.0 + small  # whose rounding is made up for
        log_total = tl.where(total == 1.0, small, tl.log(total) * (small / (total - 1.0)))
        result = tl.where(value < 0.0, 0.0, value) + log_total
        slope = sigmoid
    elif ACTIVATION == "gelu":
        part, bell = _normal_cdf(value)
        result = value * part
        slope = part + _DENSITY * value * bell
    else:
        result = value * sigmoid
        slope = value * 0.0 + 1.0
        if ACTIVATION == "gelu_tanh":
            slope = 2 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * value * value)
        slope = tl.where(change == 0.0, 0.0, slope)  # s and the slope may be infinite there
        slope = sigmoid + value * change * slope
    return result, slope


@triton.jit
def gated_kernel(
    gate, up, out, width, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = _activated(value, ACTIVATION)[0] * factor
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    width,
    grad_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    result, slope = _activated(value, ACTIVATION)
    of_gate = given * factor * slope
    of_up = given * result
    at = row * width + column
    tl.store(grad_gate + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, of_up.to(grad_up.dtype.element_ty), mask=inside)


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate, up: [rows, width] of inner stride 1."""
    return _launch_gated(gated_kernel, (gate, up), 1, activation)[0]


def gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    of_gate, of_up = _launch_gated(gated_backward_kernel, (grad, gate, up), 2, activation)
    return of_gate, of_up


def _launch_gated(
    kernel: Any, inputs: tuple[Tensor, ...], results: int, activation: str
) -> list[Tensor]:
    rows, width = inputs[0].shape
    outputs = [inputs[-1].new_empty(rows, width) for _ in range(results)]
    if rows and width:
        launch(
            kernel,
            (rows, ceil_div(width, GATED_BLOCK)),
            *(*inputs, *outputs, width, *(x.stride(0) for x in inputs)),
            ACTIVATION=activation,
            BLOCK=GATED_BLOCK,
        )
    return outputs
