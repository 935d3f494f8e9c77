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


@triton.jit
def _sequence_kernel(
    log_probs,
    old_log_probs,
    advantages,
    mask,
    ref_log_probs,
    is_weights,
    cu_seqlens,
    sequence_stats,
    num_tokens,
    low,
    high,
    kl_input,
    kl_output,
    MODE: tl.constexpr,
    KL: tl.constexpr,
    SEQUENCE_KL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0)
    # cu_seqlens is not checked on a GPU: a wrong one must not read outside the tensors.
    begin = tl.maximum(tl.load(cu_seqlens + n), 0)
    end = tl.minimum(tl.load(cu_seqlens + n + 1), num_tokens)
    length = tl.zeros([BLOCK], tl.float32)
    log_ratio_sum = tl.zeros([BLOCK], tl.float32)
    advantage_sum = tl.zeros([BLOCK], tl.float32)
    log_weight = tl.zeros([BLOCK], tl.float32)
    kl_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        unmasked = offsets < end
        if HAS_MASK:
            unmasked = unmasked & (tl.load(mask + offsets, mask=unmasked, other=0) != 0)
        length += tl.where(unmasked, 1.0, 0.0)
        log_prob = tl.load(log_probs + offsets, mask=unmasked, other=0.0)
        old = tl.load(old_log_probs + offsets, mask=unmasked, other=0.0)
        advantage = tl.load(advantages + offsets, mask=unmasked, other=0.0)
        x = clamp(log_ratio(log_prob, old), -20.0, 20.0)
        if MODE == "gmpo":
            x = gmpo_log_ratio(x, advantage, low, high)
            if HAS_WEIGHTS:
                weight = tl.load(is_weights + offsets, mask=unmasked, other=1.0)
                log_weight += tl.where(unmasked, tl.log(weight + 1e-10), 0.0)
        if SEQUENCE_KL:
            ref = tl.load(ref_log_probs + offsets, mask=unmasked, other=0.0)
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
    log_probs,
    old_log_probs,
    advantages,
    mask,
    selected,
    ref_log_probs,
    entropy,
    is_weights,
    cu_seqlens,
    seq_num_tokens,
    sequence_stats,
    shared_weight,
    partials,
    gradients,
    entropy_gradients,
    token_terms,
    token_clips,
    num_tokens,
    num_sequences,
    low,
    high,
    c,
    tau_pos,
    tau_neg,
    cov_kl_coef,
    dro_beta,
    kl_input,
    kl_output,
    kl_coef,
    entropy_coeff,
    MODE: tl.constexpr,
    BY_LENGTH: tl.constexpr,
    KL: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TIMES_RATIO: tl.constexpr,
    HAS_SEQ_NUM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_SELECTED: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_STATS: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
    WANTS_ENTROPY: tl.constexpr,
    WANTS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_tokens
    unmasked = inside
    if HAS_MASK:
        unmasked = unmasked & (tl.load(mask + offsets, mask=inside, other=0) != 0)
    token_weight = tl.load(shared_weight) + tl.zeros([BLOCK], tl.float32)
    seq_log_ratio = tl.zeros([BLOCK], tl.float32)
    seq_advantage = tl.zeros([BLOCK], tl.float32)
    is_weight = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_STATS:
        sequence = find_sequence(cu_seqlens, offsets, num_sequences, BLOCK)
        unmasked = unmasked & (sequence < num_sequences)  # else the token belongs to no sequence
        stats = sequence_stats + sequence.to(tl.int64) * 5
        if BY_LENGTH:
            length = stats
            if HAS_SEQ_NUM:
                length = seq_num_tokens + sequence
            token_weight /= tl.maximum(tl.load(length, mask=unmasked, other=1.0), 1.0)
        seq_log_ratio = tl.load(stats + 1, mask=unmasked, other=0.0)
        seq_advantage = tl.load(stats + 2, mask=unmasked, other=0.0)
        is_weight = tl.load(stats + 3, mask=unmasked, other=1.0)
    is_selected = inside & (offsets < 0)
    if HAS_SELECTED:
        is_selected = unmasked & (tl.load(selected + offsets, mask=unmasked, other=0) != 0)
    log_prob = tl.load(log_probs + offsets, mask=unmasked, other=0.0)
    old = tl.load(old_log_probs + offsets, mask=unmasked, other=0.0)
    sums = partials + program * 8
    tl.store(sums + 5, tl.sum(tl.where(unmasked, -log_ratio(log_prob, old), 0.0)))
    loss, gradient, clipped, lower, ratio, grad_log_ratio = token_loss(
        log_prob,
        old,
        tl.load(advantages + offsets, mask=unmasked, other=0.0),
        seq_log_ratio,
        seq_advantage,
        is_selected,
        low,
        high,
        c,
        tau_pos,
        tau_neg,
        cov_kl_coef,
        dro_beta,
        MODE,
    )
    if HAS_WEIGHTS:
        if MODE != "gmpo":
            is_weight = tl.load(is_weights + offsets, mask=unmasked, other=0.0)
        loss *= is_weight
        gradient *= is_weight
    tl.store(sums, tl.sum(tl.where(unmasked, loss * token_weight, 0.0)))
    if HAS_REF:
        ref = tl.load(ref_log_probs + offsets, mask=unmasked, other=0.0)
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
        if WANTS_TOKENS:
            kl = tl.where(unmasked, kl, 0.0)
            tl.store(token_terms + (offsets + num_tokens), kl, mask=inside)
    if HAS_ENTROPY:
        bonus = tl.load(entropy + offsets, mask=unmasked, other=0.0)
        loss -= entropy_coeff * bonus
        tl.store(sums + 2, tl.sum(tl.where(unmasked, bonus * token_weight, 0.0)))
    tl.store(sums + 3, tl.sum(tl.where(unmasked & clipped, 1.0, 0.0)))
    tl.store(sums + 4, tl.sum(tl.where(unmasked & lower, 1.0, 0.0)))
    tl.store(sums + 6, tl.sum(tl.where(unmasked, ratio, 0.0)))
    tl.store(sums + 7, tl.max(tl.where(unmasked, ratio, -float("inf"))))
    if WANTS_GRADIENT:
        tl.store(gradients + offsets, tl.where(unmasked, gradient * token_weight, 0.0), mask=inside)
    if WANTS_ENTROPY:
        bonus_gradient = tl.where(unmasked, -entropy_coeff * token_weight, 0.0)
        tl.store(entropy_gradients + offsets, bonus_gradient, mask=inside)
    if WANTS_TOKENS:
        tl.store(token_terms + offsets, tl.where(unmasked, loss, 0.0), mask=inside)
        ratio = tl.where(unmasked, ratio, 0.0)
        tl.store(token_terms + (offsets + num_tokens + num_tokens), ratio, mask=inside)
        tl.store(token_clips + offsets, unmasked & clipped, mask=inside)
        tl.store(token_clips + (offsets + num_tokens), unmasked & lower, mask=inside)


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
    flags = {"MODE": loss_mode, "HAS_MASK": mask is not None, "BLOCK": BLOCK}
    flags["HAS_WEIGHTS"] = given.is_weights is not None
    sequence_kl = (
        kl_times_ratio and given.ref_log_probs is not None and loss_mode in SEQUENCE_RATIO_MODES
    )
    if needs_stats and num_sequences:
        launch(
            _sequence_kernel,
            (num_sequences,),
            log_probs,
            given.old_log_probs,
            given.advantages,
            mask,
            given.ref_log_probs,
            given.is_weights,
            cu_seqlens,
            sequence_stats,
            num_tokens,
            options.clip_ratio_low,
            options.clip_ratio_high,
            options.kl_input_clamp,
            options.kl_output_clamp,
            KL=kl_type,
            SEQUENCE_KL=sequence_kl,
            **flags,
        )
    if programs:
        launch(
            _token_kernel,
            (programs,),
            *given[:-1],
            sequence_stats,
            shared_weight,
            partials,
            gradient,
            entropy_gradient,
            token_terms,
            token_clips,
            num_tokens,
            num_sequences,
            *options,
            kl_coef,
            entropy_coeff,
            BY_LENGTH=by_length,
            KL=kl_type,
            STRAIGHT=kl_straight_through,
            TIMES_RATIO=kl_times_ratio,
            HAS_SEQ_NUM=given.seq_num_tokens is not None,
            WANTS_TOKENS=wants_tokens,
            HAS_SELECTED=given.selected is not None,
            HAS_REF=given.ref_log_probs is not None,
            HAS_ENTROPY=given.entropy is not None,
            HAS_STATS=needs_stats,
            WANTS_GRADIENT=wants_gradient,
            WANTS_ENTROPY=wants_entropy_gradient,
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
