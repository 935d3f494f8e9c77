"""Log-probs and the gradient of the logits up to a factor per row, in one read of the logits.

With E_j = exp(z_j - m) and S = sum_j E_j the gradient of a row's log-prob is

    d log p / d y = -(factor / S) u,    u_j = E_j,    u_token = -(S - E_token)

for any m. So u is written while the sums are taken, and the factor follows when S is known. m is
the maximum of the token's logit and of the first columns. S is below 2^32 then (the row's maximum
is at most 22 / factor above m, and an exponential has a relative error of 7e-7), or the row is read
again with its own maximum. bfloat16 has the exponents of float32, so that u, too, keeps its full
relative precision; float16 would not. One program per row. Formulas: csrc/logprob/row_math.h.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch
from .options import RowOptions
from .triton import _LN2, _LOG2E, _clamped, _factor, _finish_row, _load_y, _unbiased, inputs_of

NUM_WARPS = 8
# Columns of an iteration, without and with a mask or a soft-cap, which need more registers.
# 4096: three programs of 80 registers on a multiprocessor, with 64 bytes of loads per thread.
BLOCKS = (4096, 2048)
_LIMIT = tl.constexpr(2.0**32)


@triton.jit
def _cap_slope(y, scale, softcap):
    """d y / d x of the soft-cap; 0 for removed entries."""
    t = y / softcap
    return tl.where(y == -float("inf"), 0.0, (1.0 - t * t) * scale)


@triton.jit
def _max_of(top, inputs, row, end, readable, BLOCK: tl.constexpr):
    """The maximum of top and of the columns below `end`."""
    columns = tl.arange(0, BLOCK)
    for begin in range(0, end, BLOCK):
        offsets = begin + columns
        y = _load_y(inputs, row, offsets, offsets < readable)
        top = tl.maximum(top, tl.max(y, 0))
    return top


@triton.jit
def _write_row(inputs, row, out, token, top, factor2, readable, BLOCK: tl.constexpr):
    """Write u of every column but the token's; return the sums of E and of E log E without it."""
    columns = tl.arange(0, BLOCK)
    shift = tl.where(top == -float("inf"), 0.0, top)
    e = tl.zeros((BLOCK,), tl.float32)
    e_d = tl.zeros((BLOCK,), tl.float32)  # d in units of log 2
    for begin in range(0, inputs.vocab, BLOCK):
        offsets = begin + columns
        y = _load_y(inputs, row, offsets, offsets < readable)
        d = _clamped((y - shift) * factor2)
        value = tl.exp2(d)
        if (token >= begin) & (token < begin + BLOCK):
            value = tl.where(offsets == token, 0.0, value)
        e += value
        e_d += value * d
        if inputs.softcap is not None:
            value *= _cap_slope(y, inputs.scale, inputs.softcap)
        tl.store(out + offsets, value.to(out.dtype.element_ty), mask=offsets < inputs.vocab)
    return tl.sum(e.to(tl.float64), 0), tl.sum(e_d.to(tl.float64), 0) * _LN2


@triton.jit
def unscaled_kernel(inputs, results, bad_label, out, out_stride, BLOCK: tl.constexpr):
    """results: log_probs, entropy and row_scale."""
    log_probs, entropy, row_scale = results
    vocab = inputs.vocab
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(inputs.token_ids + row)
    ignored = label == inputs.ignore_index
    bad = (label != inputs.ignore_index) & ((label < 0) | (label >= vocab))
    here = (ignored == 0) & (bad == 0)
    token = tl.where(here, label, -1).to(tl.int32)
    factor = _factor(inputs, row)
    factor2 = factor * _LOG2E
    out += row * out_stride
    token_y = _load_y(inputs, row, tl.where(here, token, 0), here)
    token_y = tl.where(here, token_y, -float("inf"))
    readable = tl.where(ignored, 0, vocab)  # an ignored row is not read: it may hold NaN
    top = token_y
    others = tl.zeros((), tl.float64)
    others_d = tl.zeros((), tl.float64)
    search = tl.minimum(readable, BLOCK)  # columns whose maximum is taken
    again = search >= 0
    while again:
        top = _max_of(top, inputs, row, search, readable, BLOCK)
        others, others_d = _write_row(inputs, row, out, token, top, factor2, readable, BLOCK)
        again = (search < readable) & (((others < _LIMIT) == 0) | (top == -float("inf")))
        search = readable
    others, others_d = _unbiased(others, others_d, factor, factor2)
    if bad:
        token_y = token_y * float("nan")
        tl.store(bad_label, 1)
    log_prob, row_entropy, log_sum, _ = _finish_row(top, others, others_d, 0.0, token_y, factor)
    tl.store(log_probs + row, tl.where(ignored, 0.0, log_prob).to(tl.float32))
    tl.store(entropy + row, tl.where(ignored, 0.0, row_entropy).to(tl.float32))
    tl.store(row_scale + row, tl.where(ignored, 0.0, -factor / tl.exp(log_sum)).to(tl.float32))
    entry = -others.to(tl.float32)
    if inputs.softcap is not None:
        entry *= _cap_slope(token_y, inputs.scale, inputs.softcap)
    if inputs.vocab_mask is not None:
        entry = tl.where(token_y == -float("inf"), 0.0, entry)
    tl.debug_barrier()  # another thread stored the token's column before
    tl.store(out + token, entry.to(out.dtype.element_ty), mask=here)


def unscaled_gradient(
    logits: Tensor, out: Tensor, token_ids: Tensor, options: RowOptions, bad_label: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log_probs, entropy and row_scale, see `rows_unscaled_gradient`."""
    rows = len(logits)
    results = torch.empty(3, rows, dtype=torch.float32, device=logits.device).unbind()
    inputs = inputs_of(logits, token_ids, options)
    block = BLOCKS[inputs.vocab_mask is not None or inputs.softcap is not None]
    if rows:
        arguments = (inputs, results, bad_label, out, out.stride(0))
        launch(unscaled_kernel, (rows,), *arguments, BLOCK=block, num_warps=NUM_WARPS)
    log_probs, entropy, row_scale = results
    return log_probs, entropy, row_scale
