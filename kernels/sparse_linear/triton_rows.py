"""The distribution over the kept entries of each row and its gradient in Triton, in float64.

A program per row, one launch for each pass; the formulas are those of `op.py`, which has them in
torch. Every sum runs in a fixed order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import launch
from ..logprob.options import RowOptions

BLOCK = 128  # entries at a time


@triton.jit
def _wide(high, low):
    """Return the float64 of two float32 numbers: a launch passes numbers as float32."""
    return tl.zeros((), tl.float64) + high + low


@triton.jit
def _entries(logits, ids, at, end, transform, vocab, factor):
    """Return ids, z and d z / d logit of the entries `at`; z is -inf after the end.

    transform: logit_scale, softcap and 1 / temperature as two numbers each, and then the
        temperatures and the vocab_range of RowOptions. None is absent.
    """
    inside = at < end
    entry_ids = tl.load(ids + at, inside, -1).to(tl.int64)
    x = tl.load(logits + at, inside, 0.0).to(tl.float64)
    scale = _wide(transform[0], transform[1])
    y = tl.where((entry_ids < 0) | (entry_ids >= vocab), float("nan"), x) * scale
    slope = tl.zeros_like(y) + scale
    if transform[2] is not None:
        softcap = _wide(transform[2], transform[3])
        t = tl.exp(-2.0 * tl.abs(y / softcap))
        tanh = (1.0 - t) / (1.0 + t)
        y = softcap * tl.where(y < 0, -tanh, tanh)
        slope *= 4.0 * t / ((1.0 + t) * (1.0 + t))
    return entry_ids, tl.where(inside, y * factor, -float("inf")), slope * factor


@triton.jit
def _row(transform, weight_rows, row):
    """Return the size of the vocabulary and the inverse temperature of a row."""
    vocab = weight_rows
    if transform[7] is not None:
        vocab = tl.load(transform[7] + 1)
    if transform[6] is not None:
        factor = 1.0 / tl.load(transform[6] + row).to(tl.float64)
    else:
        factor = _wide(transform[4], transform[5])
    return vocab, factor


@triton.jit
def _log_sum(logits, ids, begin, end, transform, vocab, factor, BLOCK: tl.constexpr):
    """Return the largest z and the logarithm of the sum of exp(z - largest)."""
    top = tl.full((), -float("inf"), tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, z, _ = _entries(logits, ids, at, end, transform, vocab, factor)
        top = tl.maximum(top, tl.max(z, 0))
    total = tl.zeros((), tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _, z, _ = _entries(logits, ids, at, end, transform, vocab, factor)
        total += tl.sum(tl.where(at < end, tl.exp(z - top), 0.0), 0)
    return top, tl.log(total)


@triton.jit
def forward_kernel(
    logits,
    ids,
    ends,
    token_ids,
    transform,
    weight_rows,
    ignore_index,
    log_probs,
    entropy,
    kept_log_probs,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(ends + row), tl.load(ends + row + 1)
    token = tl.load(token_ids + row).to(tl.int64)
    vocab, factor = _row(transform, weight_rows, row)
    top, log_total = _log_sum(logits, ids, begin, end, transform, vocab, factor, BLOCK)
    selected, of_row = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    found = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        entry_ids, z, _ = _entries(logits, ids, at, end, transform, vocab, factor)
        log_p = z - top - log_total
        p = tl.exp(log_p)
        is_token = (entry_ids == token) & (at < end)
        selected += tl.sum(tl.where(is_token, log_p, 0.0), 0)
        found += tl.sum(is_token.to(tl.int32), 0)
        of_row -= tl.sum(tl.where((p == 0) | (at >= end), 0.0, p * log_p), 0)
        tl.store(kept_log_probs + at, log_p.to(tl.float32), at < end)
    empty, ignored = begin >= end, token == ignore_index
    selected = tl.where(found > 0, selected, -float("inf"))
    selected = tl.where(ignored, 0.0, tl.where(empty, float("nan"), selected))
    of_row = tl.where(ignored, 0.0, tl.where(empty, float("nan"), of_row))
    tl.store(log_probs + row, selected.to(tl.float32))
    tl.store(entropy + row, of_row.to(tl.float32))


@triton.jit
def backward_kernel(
    logits,
    ids,
    ends,
    token_ids,
    transform,
    weight_rows,
    ignore_index,
    entropy,
    grad_log_probs,
    grad_entropy,
    grad_kept,
    grad_logits,
    BLOCK: tl.constexpr,
):
    """grad_logits: zeros; only entries of rows with a gradient are written."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(ends + row), tl.load(ends + row + 1)
    token = tl.load(token_ids + row).to(tl.int64)
    of_log_prob, of_entropy = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if grad_log_probs is not None:
        of_log_prob += tl.load(grad_log_probs + row).to(tl.float64)
    if grad_entropy is not None:
        of_entropy += tl.load(grad_entropy + row).to(tl.float64)
    of_kept, kept_sum = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if grad_kept is not None:
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            kept = tl.load(grad_kept + at, at < end, 0.0).to(tl.float64)
            of_kept += tl.sum(kept, 0)
            kept_sum += tl.sum(tl.abs(kept), 0)
    active = (of_log_prob != 0) | (of_entropy != 0) | (kept_sum != 0)
    active &= token != ignore_index
    end = tl.where(active, end, begin)
    vocab, factor = _row(transform, weight_rows, row)
    top, log_total = _log_sum(logits, ids, begin, end, transform, vocab, factor, BLOCK)
    mean = tl.load(entropy + row).to(tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        entry_ids, z, slope = _entries(logits, ids, at, end, transform, vocab, factor)
        log_p = z - top - log_total
        p = tl.exp(log_p)
        grad = tl.zeros_like(p)
        if grad_log_probs is not None:
            grad += of_log_prob * ((entry_ids == token).to(tl.float64) - p)
        if grad_entropy is not None:
            grad -= of_entropy * p * (tl.where(p == 0, 0.0, log_p) + mean)
        if grad_kept is not None:
            grad += tl.load(grad_kept + at, at < end, 0.0).to(tl.float64) - p * of_kept
        tl.store(grad_logits + at, (grad * slope).to(tl.float32), at < end)


@triton.jit
def index_kernel(ends, rows, BLOCK: tl.constexpr):
    """rows [K]: zeros; the entries of row t become t."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row + 1)
    for start in range(tl.load(ends + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(rows + at, row, at < end)


def _pair(value: float) -> tuple[float, float]:
    high = float(np.float32(value))
    return high, value - high


def _arguments(
    logits: Tensor, ids: Tensor, ends: Tensor, token_ids: Tensor, options: RowOptions, vocab: int
) -> tuple:
    transform = (
        *_pair(options.logit_scale),
        *(_pair(options.softcap) if options.softcap else (None, None)),
        *_pair(1.0 / options.temperature),
        options.temperatures,
        options.vocab_range,
    )
    return logits, ids, ends, token_ids, transform, vocab, options.ignore_index


def row_index(ends: Tensor, entries: int) -> Tensor:
    """As `_per_token.row_index`, in one launch; 0 for entries of no row."""
    rows = torch.zeros(entries, dtype=torch.int64, device=ends.device)
    if entries and len(ends) > 1:
        launch(index_kernel, (len(ends) - 1,), ends, rows, BLOCK)
    return rows


def forward(
    logits: Tensor, ids: Tensor, ends: Tensor, token_ids: Tensor, options: RowOptions, vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs and entropy [T], log-probs [K], float32. ids: int32 [K]. ends: int32 [T + 1]."""
    log_probs, entropy = (logits.new_empty(len(token_ids)) for _ in range(2))
    kept = torch.zeros_like(logits)
    if len(token_ids):
        arguments = _arguments(logits, ids, ends, token_ids, options, vocab)
        launch(forward_kernel, (len(token_ids),), *arguments, log_probs, entropy, kept, BLOCK)
    return log_probs, entropy, kept


def backward(
    logits: Tensor,
    ids: Tensor,
    ends: Tensor,
    token_ids: Tensor,
    options: RowOptions,
    vocab: int,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_kept: Tensor | None,
) -> Tensor:
    """The gradient of the logits, float32 [K]."""
    grad = torch.zeros_like(logits)
    if len(token_ids):
        arguments = _arguments(logits, ids, ends, token_ids, options, vocab)
        incoming = (grad_log_probs, grad_entropy, grad_kept)
        grads = [None if g is None else g.contiguous() for g in incoming]
        launch(backward_kernel, (len(token_ids),), *arguments, entropy, *grads, grad, BLOCK)
    return grad
