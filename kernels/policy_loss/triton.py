"""policy_loss in Triton, for GPUs that the CUDA build does not cover: same passes, same formulas.

One program per sequence computes the means that the sequence modes need; one per block of tokens
computes loss, gradient and partial sums. The formulas are in triton_terms.py.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._aggregation import LOSS_AGG_MODES, loss_denominators
from .._launch import ceil_div, launch
from .._per_token import as_mask
from .terms import KERNEL_MODES, SEQUENCE_MODES, SEQUENCE_RATIO_MODES
from .triton_terms import clamp, gmpo_log_ratio, log_ratio, token_kl, token_loss

BLOCK = 512
_NUM_SUMS = 8
# Of a sequence: length, means of log-ratio and advantage, geometric mean of the weights, mean KL.
_NUM_STATS = 5


class LossTensors(NamedTuple):
    """The tensors of the C++ binding policy_loss, in its order."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor | None
    selected: Tensor | None
    ref_log_probs: Tensor | None
    entropy: Tensor | None
    is_weights: Tensor | None
    cu_seqlens: Tensor | None
    seq_num_tokens: Tensor | None
    denominators: Tensor | None


@triton.jit
def sequence_bounds(cu_seqlens, num_tokens):
    """The tokens of a program's sequence. cu_seqlens is not checked on a GPU: a wrong one must not
    read outside the tensors."""
    n = tl.program_id(0)
    begin = tl.maximum(tl.load(cu_seqlens + n), 0)
    return n, begin, tl.minimum(tl.load(cu_seqlens + n + 1), num_tokens)


@triton.jit
def unmasked_tokens(mask, offsets, inside):
    """Which of the tokens at `offsets` are inside and not masked."""
    unmasked = inside
    if mask is not None:
        unmasked = unmasked & (tl.load(mask + offsets, mask=inside, other=0) != 0)
    return unmasked


@triton.jit
def _sequence_kernel(
    given,
    sequence_stats,
    num_tokens,
    numbers,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    SEQUENCE_KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    low, high = numbers.clip_ratio_low, numbers.clip_ratio_high
    kl_input, kl_output = numbers.kl_input_clamp, numbers.kl_output_clamp
    n, begin, end = sequence_bounds(given.cu_seqlens, num_tokens)
    zeros = tl.zeros([BLOCK], tl.float32)
    length, log_ratio_sum, advantage_sum, log_weight, kl_sum = zeros, zeros, zeros, zeros, zeros
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        unmasked = unmasked_tokens(given.mask, offsets, offsets < end)
        length += tl.where(unmasked, 1.0, 0.0)
        log_prob = tl.load(given.log_probs + offsets, mask=unmasked, other=0.0)
        old = tl.load(given.old_log_probs + offsets, mask=unmasked, other=0.0)
        advantage = tl.load(given.advantages + offsets, mask=unmasked, other=0.0)
        x = clamp(log_ratio(log_prob, old), -20.0, 20.0)
        if MODE == "gmpo":
            x = gmpo_log_ratio(x, advantage, low, high)
            if given.is_weights is not None:
                weight = tl.load(given.is_weights + offsets, mask=unmasked, other=1.0)
                log_weight += tl.where(unmasked, tl.log(weight + 1e-10), 0.0)
        if SEQUENCE_KL:
            ref = tl.load(given.ref_log_probs + offsets, mask=unmasked, other=0.0)
            kl, _ = token_kl(log_prob, ref, kl_input, kl_output, KL, False)
            kl_sum += tl.where(unmasked, kl, 0.0)
        log_ratio_sum += x
        advantage_sum += advantage
    total = tl.sum(length)
    scale = 1 / tl.maximum(total, 1.0)
    tl.store(sequence_stats + n * 5, total)
    tl.store(sequence_stats + n * 5 + 1, tl.sum(log_ratio_sum) * scale)
    tl.store(sequence_stats + n * 5 + 2, tl.sum(advantage_sum) * scale)
    tl.store(sequence_stats + n * 5 + 3, tl.exp(tl.sum(log_weight) * scale))
    tl.store(sequence_stats + n * 5 + 4, tl.sum(kl_sum) * scale)


@triton.jit
def find_sequence(cu_seqlens, offsets, num_sequences, BLOCK: tl.constexpr):
    """Return the first sequence that ends after each token; num_sequences if there is none."""
    first = tl.zeros([BLOCK], tl.int32)
    last = first + num_sequences
    for _ in range(32):  # binary search; num_sequences < 2^31
        middle = first + (last - first) // 2
        searching = first < last
        ends = tl.load(cu_seqlens + middle + 1, mask=searching, other=0)
        after = ends > offsets
        last = tl.where(searching & after, middle, last)
        first = tl.where(searching & (after == 0), middle + 1, first)
    return first


@triton.jit
def _token_kernel(
    given,
    sequence_stats,
    shared_weight,
    partials,
    outputs,
    num_tokens,
    num_sequences,
    numbers,
    coefficients,
    MODE: tl.constexpr,
    BY_LENGTH: tl.constexpr,
    KL: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TIMES_RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """outputs: gradients, entropy_gradients, token_terms and token_clips; None: not wanted."""
    gradients, entropy_gradients, token_terms, token_clips = outputs
    kl_coef, entropy_coeff = coefficients
    kl_input, kl_output = numbers.kl_input_clamp, numbers.kl_output_clamp
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_tokens
    unmasked = unmasked_tokens(given.mask, offsets, inside)
    token_weight = tl.load(shared_weight) + tl.zeros([BLOCK], tl.float32)
    seq_log_ratio = tl.zeros([BLOCK], tl.float32)
    seq_advantage = tl.zeros([BLOCK], tl.float32)
    is_weight = tl.full([BLOCK], 1.0, tl.float32)
    if sequence_stats is not None:
        sequence = find_sequence(given.cu_seqlens, offsets, num_sequences, BLOCK)
        unmasked = unmasked & (sequence < num_sequences)  # else the token belongs to no sequence
        stats = sequence_stats + sequence.to(tl.int64) * 5
        if BY_LENGTH:
            length = stats
            if given.seq_num_tokens is not None:
                length = given.seq_num_tokens + sequence
            token_weight /= tl.maximum(tl.load(length, mask=unmasked, other=1.0), 1.0)
        seq_log_ratio = tl.load(stats + 1, mask=unmasked, other=0.0)
        seq_advantage = tl.load(stats + 2, mask=unmasked, other=0.0)
        is_weight = tl.load(stats + 3, mask=unmasked, other=1.0)
    is_selected = inside & (offsets < 0)
    if given.selected is not None:
        is_selected = unmasked_tokens(given.selected, offsets, unmasked)
    log_prob = tl.load(given.log_probs + offsets, mask=unmasked, other=0.0)
    old = tl.load(given.old_log_probs + offsets, mask=unmasked, other=0.0)
    sums = partials + program * 8
    tl.store(sums + 5, tl.sum(tl.where(unmasked, -log_ratio(log_prob, old), 0.0)))
    advantage = tl.load(given.advantages + offsets, mask=unmasked, other=0.0)
    loss, gradient, clipped, lower, ratio, grad_log_ratio = token_loss(
        log_prob, old, advantage, seq_log_ratio, seq_advantage, is_selected, numbers, MODE
    )
    if given.is_weights is not None:
        if MODE != "gmpo":
            is_weight = tl.load(given.is_weights + offsets, mask=unmasked, other=0.0)
        loss *= is_weight
        gradient *= is_weight
    tl.store(sums, tl.sum(tl.where(unmasked, loss * token_weight, 0.0)))
    if given.ref_log_probs is not None:
        ref = tl.load(given.ref_log_probs + offsets, mask=unmasked, other=0.0)
        kl, kl_gradient = token_kl(log_prob, ref, kl_input, kl_output, KL, STRAIGHT)
        if TIMES_RATIO:
            mean_kl = kl
            if MODE == "gspo" or MODE == "seq_sapo":
                mean_kl = tl.load(stats + 4, mask=unmasked, other=0.0)
            kl_gradient = ratio * (kl_gradient + mean_kl * grad_log_ratio)
            kl *= ratio
        gradient += kl_coef * kl_gradient
        loss += kl_coef * kl
        tl.store(sums + 1, tl.sum(tl.where(unmasked, kl * token_weight, 0.0)))
        if token_terms is not None:
            kl = tl.where(unmasked, kl, 0.0)
            tl.store(token_terms + (offsets + num_tokens), kl, mask=inside)
    if given.entropy is not None:
        bonus = tl.load(given.entropy + offsets, mask=unmasked, other=0.0)
        loss -= entropy_coeff * bonus
        tl.store(sums + 2, tl.sum(tl.where(unmasked, bonus * token_weight, 0.0)))
    tl.store(sums + 3, tl.sum(tl.where(unmasked & clipped, 1.0, 0.0)))
    tl.store(sums + 4, tl.sum(tl.where(unmasked & lower, 1.0, 0.0)))
    tl.store(sums + 6, tl.sum(tl.where(unmasked, ratio, 0.0)))
    tl.store(sums + 7, tl.max(tl.where(unmasked, ratio, -float("inf"))))
    if gradients is not None:
        tl.store(gradients + offsets, tl.where(unmasked, gradient * token_weight, 0.0), mask=inside)
    if entropy_gradients is not None:
        bonus_gradient = tl.where(unmasked, -entropy_coeff * token_weight, 0.0)
        tl.store(entropy_gradients + offsets, bonus_gradient, mask=inside)
    if token_terms is not None:
        tl.store(token_terms + offsets, tl.where(unmasked, loss, 0.0), mask=inside)
        ratio = tl.where(unmasked, ratio, 0.0)
        tl.store(token_terms + (offsets + num_tokens + num_tokens), ratio, mask=inside)
        tl.store(token_clips + offsets, unmasked & clipped, mask=inside)
        tl.store(token_clips + (offsets + num_tokens), unmasked & lower, mask=inside)


def policy_loss_triton(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the kernels; arguments and results as of the C++ binding policy_loss."""
    count = len(LossTensors._fields)
    given, (mode, agg_mode, kl_type, *settings) = LossTensors(*arguments[:count]), arguments[count:]
    kl_straight_through, kl_times_ratio, options, coefficients, *wants = settings
    wants_tokens, wants_gradient, wants_entropy_gradient = wants
    log_probs, mask, cu_seqlens = given.log_probs, given.mask, given.cu_seqlens
    loss_mode, agg = KERNEL_MODES[mode], LOSS_AGG_MODES[agg_mode]
    kl_coef, entropy_coeff, loss_scale_factor, *counts = coefficients
    denominators = _counted(agg, log_probs, mask, cu_seqlens, given.denominators, counts)
    by_length = agg == "seq-mean-token-mean"
    needs_stats = by_length or loss_mode in SEQUENCE_MODES
    num_tokens = log_probs.numel()
    num_sequences = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    programs = ceil_div(num_tokens, BLOCK)
    gradient = log_probs.new_empty(num_tokens if wants_gradient else 0)
    entropy_gradient = log_probs.new_empty(num_tokens if wants_entropy_gradient else 0)
    token_terms = log_probs.new_zeros(3 if wants_tokens else 0, num_tokens)
    token_clips = torch.empty(
        2 if wants_tokens else 0, num_tokens, dtype=torch.bool, device=log_probs.device
    )
    partials = log_probs.new_zeros(programs, _NUM_SUMS)
    sequence_stats = log_probs.new_empty(num_sequences if needs_stats else 0, _NUM_STATS)
    shared_weight = _shared_weight(agg, denominators, loss_scale_factor)
    read = given._replace(denominators=None)
    flags = {"MODE": loss_mode, "KL": kl_type, "BLOCK": BLOCK}
    sequence_kl = (
        kl_times_ratio and given.ref_log_probs is not None and loss_mode in SEQUENCE_RATIO_MODES
    )
    if needs_stats and num_sequences:
        of_sequences = (read, sequence_stats, num_tokens, options)
        grid = (num_sequences,)
        launch(_sequence_kernel, grid, *of_sequences, SEQUENCE_KL=sequence_kl, **flags)
    if programs:
        wanted = (
            gradient if wants_gradient else None,
            entropy_gradient if wants_entropy_gradient else None,
            *((token_terms, token_clips) if wants_tokens else (None, None)),
        )
        launch(
            _token_kernel,
            (programs,),
            *(read, sequence_stats if needs_stats else None, shared_weight, partials, wanted),
            *(num_tokens, num_sequences, options, (kl_coef, entropy_coeff)),
            BY_LENGTH=by_length,
            STRAIGHT=kl_straight_through,
            TIMES_RATIO=kl_times_ratio,
            **flags,
        )
    loss, metrics = _reduce(partials, denominators, kl_coef, entropy_coeff)
    return loss, metrics, token_terms, token_clips, gradient, entropy_gradient


def _counted(
    agg: str,
    log_probs: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    denominators: Tensor | None,
    numbers: list[float],
) -> Tensor:
    """Return the numbers of tokens and sequences, float64 [2], counted where they are NaN."""
    given = [
        None if math.isnan(number) else number if denominators is None else denominators[i]
        for i, number in enumerate(numbers)
    ]
    mask = as_mask(mask, log_probs)
    return loss_denominators("policy_loss", agg, mask, cu_seqlens, *given)


def _shared_weight(agg: str, denominators: Tensor, loss_scale_factor: float) -> Tensor:
    """Compute the part of a token's weight that all tokens share: float32 [1]."""
    if agg == "token-sum":
        return torch.ones(1, dtype=torch.float32, device=denominators.device)
    shared = denominators[0 if agg == "token-mean" else 1]
    if agg == "seq-mean-token-sum-norm":
        shared = shared * loss_scale_factor
    return (1 / shared).float().reshape(1)


def _reduce(
    partials: Tensor, denominators: Tensor, kl_coef: float, entropy_coeff: float
) -> tuple[Tensor, Tensor]:
    """Combine the partial sums: the loss, float32 [], and the metrics, float32 [8]."""
    totals = partials[:, :7].sum(0, dtype=torch.float64)
    totals[3:] /= denominators[0]
    loss = totals[0] + kl_coef * totals[1] - entropy_coeff * totals[2]
    lowest = partials.new_full((1,), -torch.inf)
    ratio_max = torch.cat([lowest, partials[:, 7]]).max()
    return loss.float(), torch.cat([totals, ratio_max.double().reshape(1)]).float()
