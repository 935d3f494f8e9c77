"""token_log_probs in Triton, for GPUs that the CUDA build does not cover: the same algorithm.

Forward: one program per row, an online softmax with sums per lane. Backward: one program per row
and block. csrc/logprob/row_math.h has the formulas, and says why the token's own entry is separate.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch
from .options import RowOptions

FORWARD_BLOCK = 2048
BACKWARD_BLOCK = 2048
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# Arguments of exp2 are clamped to this, where it gives 0: an infinite one would give 0 * inf.
_LOWEST = tl.constexpr(-200.0)


@triton.jit
def _tanh(x):
    """tanh, by a polynomial near 0, where 1 - 2 / (e^2x + 1) loses its leading digits."""
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    magnitude = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(magnitude, 9.1)) + 1.0)
    return tl.where(magnitude < 0.625, p * square * x + x, tl.where(x < 0, -large, large))


class Inputs(NamedTuple):
    """What the kernels read of rows; None is absent."""

    logits: Any
    vocab_mask: Any  # uint8
    token_ids: Any
    temperatures: Any
    vocab_range: Any  # of a slice of the vocabulary
    row_stride: Any
    mask_stride: Any
    vocab: Any
    ignore_index: Any
    temperature: Any
    scale: Any
    softcap: Any
    negate: Any  # 1: log_probs and their gradients are the negative ones


@triton.jit
def _load_y(inputs, row, offsets, inside):
    """y of the columns of a row; -inf outside the row and for masked entries."""
    at = row * inputs.row_stride + offsets
    x = tl.load(inputs.logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    if inputs.softcap is not None:
        capped = inputs.softcap * _tanh(inputs.scale * x / inputs.softcap)
        x = tl.where(inside, capped, -float("inf"))
    if inputs.vocab_mask is not None:
        at = row * inputs.mask_stride + offsets
        kept = tl.load(inputs.vocab_mask + at, mask=inside, other=0) != 0
        x = tl.where(kept, x, -float("inf"))
    return x


@triton.jit
def _factor(inputs, row):
    temperature = inputs.temperature
    if inputs.temperatures is not None:
        temperature = tl.load(inputs.temperatures + row)
    if inputs.softcap is not None:
        return 1.0 / temperature
    else:
        return inputs.scale / temperature


@triton.jit
def _vocab_range(inputs):
    """The first id of this slice of the vocabulary, and the size of the full vocabulary."""
    if inputs.vocab_range is not None:
        return tl.load(inputs.vocab_range), tl.load(inputs.vocab_range + 1)
    else:
        return tl.zeros((), tl.int64), tl.zeros((), tl.int64) + inputs.vocab


@triton.jit
def _clamped(x):
    """max(x, _LOWEST) in one instruction that keeps NaN."""
    return tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log1p(x):
    """log(1 + x) in float64, exact for small x."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _unbiased(e, e_d, factor, factor2):
    """Correct the sums for the rounding of factor2: `unbiased` in csrc/logprob/row_math.h."""
    off = factor.to(tl.float64) * _LOG2E / factor2.to(tl.float64) - 1.0
    square = tl.where(e > 0, e_d * e_d / tl.where(e > 0, e, 1.0), 0.0)
    return e + off * e_d, e_d + off * (e_d + square)


@triton.jit
def _finish_row(top, others, others_d, others_e, token_y, factor):
    """Compute log_prob, entropy, log_sum and sum_p_squared from the sums without the token."""
    d = (token_y.to(tl.float64) - top) * factor
    own = tl.exp(d)
    total = others + own
    log_sum = tl.where(d == 0, _log1p(others), tl.log(total))
    own_d = tl.where(own > 0, own * d, 0.0)
    entropy = log_sum - (others_d + own_d) / total
    return d - log_sum, entropy, log_sum, (others_e + own * own) / (total * total)


@triton.jit
def forward_kernel(
    inputs, results, partial, bad_label, WANT_SQUARES: tl.constexpr, BLOCK: tl.constexpr
):
    """results: log_probs, entropy and row_stats; or only `partial` of a slice."""
    PARALLEL: tl.constexpr = inputs.vocab_range is not None
    vocab, ignore_index = inputs.vocab, inputs.ignore_index
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(inputs.token_ids + row)
    ignored = label == ignore_index
    vocab_start, vocab_total = _vocab_range(inputs)
    bad = (label != ignore_index) & ((label < 0) | (label >= vocab_total))
    here = (label >= vocab_start) & (label - vocab_start < vocab) & (ignored == 0) & (bad == 0)
    token = tl.where(here, label - vocab_start, -1).to(tl.int32)
    factor = _factor(inputs, row)
    factor2 = factor * _LOG2E
    top = -float("inf")
    e = tl.zeros((BLOCK,), tl.float32)
    e_d = tl.zeros((BLOCK,), tl.float32)  # d in units of log 2
    e_e = tl.zeros((BLOCK,), tl.float32)
    columns = tl.arange(0, BLOCK)
    # An ignored row is not read: its loop is empty.
    for begin in range(0, tl.where(ignored, 0, vocab), BLOCK):
        offsets = begin + columns
        y = _load_y(inputs, row, offsets, offsets < vocab)
        block_top = tl.max(y, 0)
        if block_top > top:
            # Nothing to rescale while top is -inf.
            shift = tl.where(top == -float("inf"), 0.0, (top - block_top) * factor2)
            shrink = tl.exp2(tl.maximum(shift, _LOWEST))
            e_d = (e_d + shift * e) * shrink
            e = e * shrink
            if PARALLEL or WANT_SQUARES:
                e_e = e_e * shrink * shrink
            top = block_top
        d = _clamped((y - tl.where(top == -float("inf"), 0.0, top)) * factor2)
        value = tl.exp2(d)
        if (token >= begin) & (token < begin + BLOCK):
            value = tl.where(offsets == token, 0.0, value)
        e += value
        e_d += value * d
        if PARALLEL or WANT_SQUARES:
            e_e += value * value
    others = tl.sum(e.to(tl.float64), 0)
    others_d = tl.sum(e_d.to(tl.float64), 0) * _LN2
    others, others_d = _unbiased(others, others_d, factor, factor2)
    others_e = tl.sum(e_e.to(tl.float64), 0)
    token_y = _load_y(inputs, row, tl.where(here, token, 0), here)
    token_y = tl.where(here, token_y, -float("inf"))
    if bad:
        token_y = token_y * float("nan")
        tl.store(bad_label, 1)
    if ignored:
        top = 0.0
    if PARALLEL:
        out = partial + row * 5
        tl.store(out, top)
        tl.store(out + 1, others.to(tl.float32))
        tl.store(out + 2, others_d.to(tl.float32))
        tl.store(out + 3, token_y)
        tl.store(out + 4, others_e.to(tl.float32))
    else:
        log_prob, row_entropy, log_total, p_squared = _finish_row(
            top, others, others_d, others_e, token_y, factor
        )
        log_probs, entropy, row_stats = results
        if inputs.negate is not None:
            log_prob = -log_prob
        tl.store(log_probs + row, tl.where(ignored, 0.0, log_prob).to(tl.float32))
        tl.store(entropy + row, tl.where(ignored, 0.0, row_entropy).to(tl.float32))
        row_stats += row * (3 if WANT_SQUARES else 2)
        tl.store(row_stats, top)
        tl.store(row_stats + 1, tl.where(ignored, 0.0, log_total).to(tl.float32))
        if WANT_SQUARES:
            tl.store(row_stats + 2, tl.where(ignored, 0.0, p_squared).to(tl.float32))


@triton.jit
def backward_kernel(
    inputs,
    results,
    stats_width,
    grad_log_probs,
    grad_entropy,
    row_index,
    out,
    out_stride,
    BLOCK: tl.constexpr,
):
    log_probs, entropy, row_stats = results
    vocab, softcap = inputs.vocab, inputs.softcap
    row = tl.program_id(0).to(tl.int64)
    out_row = tl.load(row_index + row).to(tl.int64) if row_index is not None else row
    if out_row < 0:
        return
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocab
    label = tl.load(inputs.token_ids + row)
    g = tl.load(grad_log_probs + row) if grad_log_probs is not None else 0.0
    h = tl.load(grad_entropy + row) if grad_entropy is not None else 0.0
    # A row with zero gradient is not read: it may hold NaN.
    active = tl.abs(g) + tl.abs(h) != 0.0  # also NaN
    readable = offsets < tl.where(active & (label != inputs.ignore_index), vocab, 0)
    log_prob = tl.load(log_probs + row)
    if inputs.negate is not None:
        log_prob = -log_prob
        g = -g
    row_entropy = tl.load(entropy + row)
    row_stats += row * stats_width
    factor = _factor(inputs, row)
    y = _load_y(inputs, row, offsets, readable)
    # log p in units of log 2, the argument of exp2.
    log2_p = (y - tl.load(row_stats)) * (factor * _LOG2E) - tl.load(row_stats + 1) * _LOG2E
    if grad_entropy is not None:
        log2_p = _clamped(log2_p)
        grad = tl.exp2(log2_p) * (-factor * (g + h * row_entropy) - factor * h * _LN2 * log2_p)
    else:
        grad = tl.exp2(log2_p) * (-factor * g)
    vocab_start, _ = _vocab_range(inputs)
    token = (label - vocab_start) - tl.program_id(1) * BLOCK
    if (token >= 0) & (token < BLOCK):
        # 1 - p as -expm1(log p): exact as p -> 1.
        wide = log_prob.to(tl.float64)
        small = wide * (1.0 + wide * (0.5 + wide / 6.0))
        one_minus_p = tl.where(wide > -1e-5, -small, 1.0 - tl.exp(wide)).to(tl.float32)
        p_token = tl.exp(log_prob)
        entropy_part = tl.where(p_token > 0, p_token * (log_prob + row_entropy), 0.0)
        token_grad = factor * (g * one_minus_p - h * entropy_part)
        grad = tl.where(tl.arange(0, BLOCK) == token.to(tl.int32), token_grad, grad)
    if softcap is not None:
        t = y / softcap
        grad = grad * (1.0 - t * t) * inputs.scale
    if inputs.vocab_mask is not None or softcap is not None:
        grad = tl.where(y == -float("inf"), 0.0, grad)
    grad = tl.where(readable, grad, 0.0)
    tl.store(out + out_row * out_stride + offsets, grad.to(out.dtype.element_ty), mask=inside)


def inputs_of(logits: Tensor, token_ids: Tensor, options: RowOptions) -> Inputs:
    mask = options.vocab_mask
    return Inputs(
        logits,
        None if mask is None else mask.view(torch.uint8),
        token_ids,
        options.temperatures,
        options.vocab_range,
        logits.stride(0),
        0 if mask is None else mask.stride(0),
        logits.shape[1],
        options.ignore_index,
        options.temperature,
        options.logit_scale,
        options.softcap or None,
        1 if options.negate else None,
    )


def forward(
    logits: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    want_squares: bool,
    bad_label: Tensor | None,
) -> list[Tensor]:
    """Compute the results of `rows_forward`.

    With a slice of the vocabulary only [T, 5], as LogProbForward::partial in csrc/logprob/params.h.
    """
    rows = len(logits)
    floats = partial(torch.empty, dtype=torch.float32, device=logits.device)
    results = floats(rows), floats(rows), floats(rows, 3 if want_squares else 2)
    parallel = options.vocab_range is not None
    sums = floats(rows if parallel else 0, 5)
    if rows:
        arguments = (inputs_of(logits, token_ids, options), results, sums, bad_label)
        sizes = {"BLOCK": FORWARD_BLOCK, "num_warps": 8}
        launch(forward_kernel, (rows,), *arguments, WANT_SQUARES=want_squares, **sizes)
    return [sums] if parallel else list(results)


def backward(
    inputs: Inputs, out: Tensor, row_results: list[Tensor], *gradients: Tensor | None
) -> None:
    """Write the gradient of the logits into `out`, see `rows_backward`.

    gradients: grad_log_probs, grad_entropy and row_index.
    """
    grid = len(inputs.token_ids), ceil_div(inputs.vocab, BACKWARD_BLOCK)
    if all(grid):
        width = row_results[2].shape[1]
        arguments = (inputs, tuple(row_results), width, *gradients, out, out.stride(0))
        launch(backward_kernel, grid, *arguments, BLOCK=BACKWARD_BLOCK, num_warps=8)
