"""The reference of policy_loss: plain PyTorch in float32 or float64, differentiated by autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._aggregation import token_weights
from .._per_token import TokenSequences, as_mask, compute_dtype, zero_masked
from .terms import (
    MAX_LOG_SEQUENCE_RATIO,
    SEQUENCE_RATIO_MODES,
    LossOptions,
    TokenTerms,
    clamped_log_ratio,
    gmpo_log_ratio,
    token_kl,
    token_loss,
)


class LossSettings(NamedTuple):
    """The modes and coefficients of policy_loss, checked and without aliases."""

    loss_mode: str
    loss_agg_mode: str
    kl_type: str
    kl_straight_through: bool
    kl_coef: float
    entropy_coeff: float
    loss_scale_factor: float | None
    kl_times_ratio: bool = False


def policy_loss_reference(
    tokens: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    seq_num_tokens: Tensor | None,
    denominators: Tensor,
    settings: LossSettings,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the loss, the metrics and the terms of the tokens.

    tokens: the per-token arguments of policy_loss, as `token_arguments` returns them.

    Returns:
        loss; metrics in the order of PolicyLossSum in csrc/policy_loss/params.h; [3, T]: loss with
        KL and entropy, KL, ratio; bool [2, T]: clipped, clipped_lower; the latter 0 where masked.
    """
    mask = as_mask(tokens.get("response_mask"), tokens["log_probs"])
    dtype = compute_dtype(tokens["log_probs"])
    values = {
        name: zero_masked(tensor.to(dtype), mask)
        for name, tensor in tokens.items()
        if name not in ("response_mask", "selected", "rollout_is_weights", "score_centering")
    }
    sequences = None if cu_seqlens is None else TokenSequences.of(cu_seqlens, mask)
    weights = token_weights(
        settings.loss_agg_mode,
        mask,
        cu_seqlens,
        denominators,
        settings.loss_scale_factor,
        seq_num_tokens,
    ).to(dtype)
    is_weights = tokens.get("rollout_is_weights")
    if is_weights is not None:
        is_weights = torch.where(mask, is_weights.detach().to(dtype), 1)
    selected = tokens["selected"] & mask if "selected" in tokens else None
    terms = _policy_gradient_terms(
        settings.loss_mode, values, is_weights, selected, mask, sequences, options
    )
    losses, kl = terms.loss, torch.zeros_like(terms.loss)
    pg_loss = (weights * losses).sum()
    kl_loss = entropy = pg_loss.new_zeros(())
    if "ref_log_probs" in values:
        kl = _kl(values, mask, sequences, settings, options)
        kl_loss = (weights * kl).sum()
        losses = losses + settings.kl_coef * kl
    if "entropy" in values:
        entropy = (weights * values["entropy"]).sum()
        losses = losses - settings.entropy_coeff * values["entropy"]
    loss = pg_loss + settings.kl_coef * kl_loss - settings.entropy_coeff * entropy
    means = [
        zero_masked(value.to(dtype), mask).sum() / denominators[0]
        for value in (terms.clipped, terms.clipped_lower, -terms.log_ratio, terms.ratio)
    ]
    lowest = weights.new_full((1,), -torch.inf)
    ratio_max = torch.cat([lowest, torch.where(mask, terms.ratio, -torch.inf)]).max()
    sums = [pg_loss, kl_loss, entropy, *means, ratio_max]
    metrics = torch.stack([value.detach().to(dtype) for value in sums])
    token_terms = torch.stack([losses, kl.detach(), zero_masked(terms.ratio, mask)])
    return loss, metrics, token_terms, torch.stack([terms.clipped, terms.clipped_lower]) & mask


def _kl(
    values: dict[str, Tensor],
    mask: Tensor,
    sequences: TokenSequences | None,
    settings: LossSettings,
    options: LossOptions,
) -> Tensor:
    """Compute the KL of every token, times the ratio of the loss mode if that is set."""
    log_probs, old = values["log_probs"], values["old_log_probs"].detach()
    kl = token_kl(
        settings.kl_type + "+" * settings.kl_straight_through,
        log_probs,
        values["ref_log_probs"].detach(),
        kl_input_clamp=options.kl_input_clamp,
        kl_output_clamp=options.kl_output_clamp,
    )
    if not settings.kl_times_ratio:
        return kl
    x = clamped_log_ratio(log_probs, old)
    if settings.loss_mode not in SEQUENCE_RATIO_MODES:
        return kl * x.exp()
    assert sequences is not None
    # Here the gradient is that of the sequence's ratio, which all its tokens share.
    own = torch.where(log_probs.isneginf(), 0, log_probs - log_probs.detach())
    mean = sequences.mean(own, mask) + sequences.mean(x.detach(), mask)
    return zero_masked(kl * mean.clamp(max=MAX_LOG_SEQUENCE_RATIO).exp(), mask)


def _policy_gradient_terms(
    loss_mode: str,
    values: dict[str, Tensor],
    is_weights: Tensor | None,
    selected: Tensor | None,
    mask: Tensor,
    sequences: TokenSequences | None,
    options: LossOptions,
) -> TokenTerms:
    """Compute the per-token terms of values that are 0 where masked."""
    log_probs = values["log_probs"]
    old, advantages = values["old_log_probs"].detach(), values["advantages"].detach()
    seq_log_ratio = seq_advantages = None
    if loss_mode in SEQUENCE_RATIO_MODES:
        assert sequences is not None
        x = clamped_log_ratio(log_probs.detach(), old)
        seq_log_ratio = sequences.mean(x, mask)
    elif loss_mode == "gmpo":
        assert sequences is not None
        x = gmpo_log_ratio(clamped_log_ratio(log_probs, old), advantages, options)
        seq_log_ratio = sequences.mean(x, mask)
        seq_advantages = sequences.mean(advantages, mask)
        if is_weights is not None:
            is_weights = sequences.mean(torch.log(is_weights + 1e-10), mask).exp()
    tokens, of_sequences = (log_probs, old, advantages), (seq_log_ratio, seq_advantages)
    terms = token_loss(loss_mode, tokens, options, *of_sequences, selected)
    loss = terms.loss if is_weights is None else terms.loss * is_weights
    return terms._replace(loss=zero_masked(loss, mask))
