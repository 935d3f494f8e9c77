"""rollout_correction in Triton: a pass per sequence if any is needed, one per token, and sums."""

# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch
from ..policy_loss.importance import ImportanceBounds
from ..policy_loss.triton import find_sequence, sequence_bounds, unmasked_tokens
from ..policy_loss.triton_terms import clamp, log_ratio
from .reference import MAX_TERM, REJECTION_CRITERIA, Bounds, RolloutTokens

BLOCK = 512
SEQUENCE_BLOCK = 1024
SUM_BLOCK = 128
NUM_SUMS = 8  # of a block: those of the metrics, in their order, and the number of tokens
_NUM_METRICS = NUM_SUMS - 1
_FIRST_OF_SEQUENCES = 3  # of REJECTION_CRITERIA
_MAX_TERM = tl.constexpr(MAX_TERM)


@triton.jit
def _k3(x):
    """Return exp(x) - 1 - x, from its series where that would cancel."""
    s = 1 / 120.0 + x * (1 / 720.0 + x * (1 / 5040.0 + x * (1 / 40320.0)))
    series = x * x * (0.5 + x * (1 / 6.0 + x * (1 / 24.0 + x * s)))
    return tl.where((x < 0.5) & (x > -0.5), series, tl.exp(x) - 1 - x)


@triton.jit
def _within(accepted, divergence, bounds, CRITERIA: tl.constexpr, INDEX: tl.constexpr):
    """Return `accepted` without what a criterion rejects, if its bit of CRITERIA is set."""
    if CRITERIA & (1 << INDEX):
        low = bounds[2 * INDEX]
        high = bounds[2 * INDEX + 1]
        accepted = accepted & (divergence >= low) & (divergence <= high)
    return accepted


@triton.jit
def sequence_kernel(
    old_log_probs,
    rollout_log_probs,
    mask,
    cu_seqlens,
    sequence_stats,
    num_tokens,
    bounds,
    AVERAGES: tl.constexpr,
    CRITERIA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sequence_stats [N, 2]: sum of log rho, and whether every criterion of sequences holds.

    AVERAGES: the mean of log rho in place of the sum.
    """
    n, begin, end = sequence_bounds(cu_seqlens, num_tokens)
    length = tl.zeros([BLOCK], tl.float32)
    exponent = tl.zeros([BLOCK], tl.float64)
    k1 = tl.zeros([BLOCK], tl.float32)
    k2 = tl.zeros([BLOCK], tl.float32)
    k3 = tl.zeros([BLOCK], tl.float32)
    k2_max = tl.zeros([BLOCK], tl.float32)
    k3_max = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        unmasked = unmasked_tokens(mask, offsets, offsets < end)
        old = tl.load(old_log_probs + offsets, mask=unmasked, other=0.0).to(tl.float32)
        rollout = tl.load(rollout_log_probs + offsets, mask=unmasked, other=0.0).to(tl.float32)
        log_rho = log_ratio(old, rollout)
        x = clamp(log_rho, -20.0, 20.0)
        x_k2 = 0.5 * x * x
        x_k3 = _k3(x)
        length += tl.where(unmasked, 1.0, 0.0)
        exponent += clamp(log_rho, -_MAX_TERM, _MAX_TERM).to(tl.float64)
        k1 -= x
        k2 += x_k2
        k3 += x_k3
        k2_max = tl.where(x_k2 <= k2_max, k2_max, x_k2)  # NaN stays
        k3_max = tl.where(x_k3 <= k3_max, k3_max, x_k3)
    scale = 1 / tl.maximum(tl.sum(length), 1.0)
    sum_k1 = tl.sum(k1)
    sum_k2 = tl.sum(k2)
    sum_k3 = tl.sum(k3)
    accepted = tl.sum(length) >= 0.0
    accepted = _within(accepted, sum_k1, bounds, CRITERIA, 3)
    accepted = _within(accepted, sum_k2, bounds, CRITERIA, 4)
    accepted = _within(accepted, sum_k3, bounds, CRITERIA, 5)
    accepted = _within(accepted, sum_k1 * scale, bounds, CRITERIA, 6)
    accepted = _within(accepted, sum_k2 * scale, bounds, CRITERIA, 7)
    accepted = _within(accepted, sum_k3 * scale, bounds, CRITERIA, 8)
    accepted = _within(accepted, tl.max(k2_max) + 0.0 * sum_k2, bounds, CRITERIA, 9)
    accepted = _within(accepted, tl.max(k3_max) + 0.0 * sum_k3, bounds, CRITERIA, 10)
    total = tl.sum(exponent)
    if AVERAGES:
        total /= tl.maximum(tl.sum(length), 1.0).to(tl.float64)
    tl.store(sequence_stats + n * 2, total.to(tl.float32))
    tl.store(sequence_stats + n * 2 + 1, tl.where(accepted, 1.0, 0.0))


@triton.jit
def token_kernel(
    old_log_probs,
    rollout_log_probs,
    mask,
    cu_seqlens,
    sequence_stats,
    weights,
    remaining,
    partials,
    num_tokens,
    num_sequences,
    upper,
    lower,
    bounds,
    LEVEL: tl.constexpr,
    CRITERIA: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """weights, remaining [T]; partials [blocks, 8]: the sums of a block, the maximum in row 6.

    LEVEL: 0 without weights, 1 by token, 2 by sequence.
    """
    block = tl.program_id(0)
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_tokens
    unmasked = unmasked_tokens(mask, offsets, inside)
    old = tl.load(old_log_probs + offsets, mask=unmasked, other=0.0).to(tl.float32)
    rollout = tl.load(rollout_log_probs + offsets, mask=unmasked, other=0.0).to(tl.float32)
    log_rho = log_ratio(old, rollout)  # 0 where masked
    x = clamp(log_rho, -20.0, 20.0)
    k3 = _k3(x)
    exponent = x
    accepted = unmasked
    if HAS_STATS:
        sequence = find_sequence(cu_seqlens, offsets, num_sequences, BLOCK)
        found = unmasked & (sequence < num_sequences)
        stats = sequence_stats + sequence.to(tl.int64) * 2
        accepted = accepted & (tl.load(stats + 1, mask=found, other=1.0) != 0)
        if LEVEL == 2:
            exponent = clamp(tl.load(stats, mask=found, other=0.0), -20.0, 20.0)
    accepted = _within(accepted, -x, bounds, CRITERIA, 0)
    accepted = _within(accepted, 0.5 * x * x, bounds, CRITERIA, 1)
    accepted = _within(accepted, k3, bounds, CRITERIA, 2)
    tl.store(remaining + offsets, accepted, mask=inside)
    sums = partials + block * 8
    twice = 2 * x
    tl.store(sums, tl.sum(-log_rho))
    tl.store(sums + 1, tl.sum(k3))
    tl.store(sums + 2, tl.sum(_k3(twice) + twice))
    tl.store(sums + 3, tl.sum(tl.where(unmasked & (accepted == 0), 1.0, 0.0)))
    if LEVEL:
        rho = tl.exp(exponent)
        outside = rho > upper
        if HAS_LOWER:
            outside = outside | (rho < lower)
            weight = tl.where(outside, 0.0, rho)
        else:
            weight = tl.where(outside, upper, rho)
        weight = tl.where(unmasked, weight, 0.0)
        tl.store(weights + offsets, weight, mask=inside)
        tl.store(sums + 4, tl.sum(weight))
        tl.store(sums + 5, tl.sum(tl.where(unmasked & outside, 1.0, 0.0)))
        tl.store(sums + 6, tl.max(weight))
    else:
        for i in tl.static_range(4, 7):
            tl.store(sums + i, 0.0)
    tl.store(sums + 7, tl.sum(tl.where(unmasked, 1.0, 0.0)))


@triton.jit
def sum_kernel(
    partials,
    blocks,
    denominators,
    num_tokens,
    metrics,
    HAS_DENOMINATORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """metrics [7], float64: sums of partials over the number of tokens, and the maximum."""
    column = tl.arange(0, 8)
    sums = tl.zeros([8], tl.float64)
    largest = tl.zeros([8], tl.float32)
    for begin in range(0, blocks, BLOCK):
        row = begin + tl.arange(0, BLOCK)[:, None]
        part = tl.load(partials + row * 8 + column[None, :], mask=row < blocks, other=0.0)
        sums += tl.sum(part.to(tl.float64), 0)
        largest = tl.maximum(largest, tl.max(part, 0))
    count = tl.sum(tl.where(column == 7, sums, 0.0))
    if HAS_DENOMINATORS:
        count = tl.load(denominators)
    else:
        count = tl.where(num_tokens == num_tokens, num_tokens, count)  # NaN: counted
    mean = sums / tl.maximum(count, 1.0)
    mean = tl.where(column == 6, largest.to(tl.float64), mean)
    tl.store(metrics + column, mean, mask=column < 7)


def correct_triton(
    inputs: RolloutTokens,
    num_tokens: float | Tensor,
    rollout_is: str | None,
    limits: ImportanceBounds,
    bounds: Bounds,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels; arguments and results as of the reference."""
    old_log_probs = inputs.old_log_probs
    tokens, sequences = old_log_probs.numel(), inputs.cu_seqlens.numel() - 1
    numbers = [REJECTION_CRITERIA.index(criterion) for criterion in bounds]
    free = (-math.inf, math.inf)
    pairs = tuple(b for name in REJECTION_CRITERIA for b in bounds.get(name, free))
    level = {None: 0, "token": 1, "sequence": 2, "sequence_mean": 2}[rollout_is]
    by_sequence = level == 2 or any(i >= _FIRST_OF_SEQUENCES for i in numbers)
    weights = old_log_probs.new_empty(tokens if rollout_is else 0, dtype=torch.float32)
    remaining = old_log_probs.new_empty(tokens, dtype=torch.bool)
    blocks = ceil_div(tokens, BLOCK)
    partials = old_log_probs.new_empty(blocks, NUM_SUMS, dtype=torch.float32)
    metrics = old_log_probs.new_empty(_NUM_METRICS, dtype=torch.float64)
    stats = old_log_probs.new_empty(sequences if by_sequence else 0, 2, dtype=torch.float32)
    criteria = sum(1 << i for i in numbers)
    given = (*inputs, stats)
    if by_sequence and sequences:
        flags = {"CRITERIA": criteria, "BLOCK": SEQUENCE_BLOCK}
        averages = rollout_is == "sequence_mean"
        launch(sequence_kernel, (sequences,), *given, tokens, pairs, AVERAGES=averages, **flags)
    if blocks:
        lower = 0.0 if limits.lower is None else limits.lower
        launch(
            token_kernel,
            (blocks,),
            *(*given, weights, remaining, partials, tokens, sequences, limits.upper, lower, pairs),
            LEVEL=level,
            CRITERIA=criteria,
            HAS_LOWER=limits.lower is not None,
            HAS_STATS=by_sequence,
            BLOCK=BLOCK,
        )
    on_device = isinstance(num_tokens, Tensor)
    launch(
        sum_kernel,
        (1,),
        *(partials, blocks, num_tokens if on_device else None),
        *(math.nan if on_device else float(num_tokens), metrics),
        HAS_DENOMINATORS=on_device,
        BLOCK=SUM_BLOCK,
    )
    return weights, remaining, metrics
