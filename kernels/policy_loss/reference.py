"""The reference of policy_loss: plain PyTorch in float32 or float64, differentiated by autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._aggregation import token_weights
from .._per_token import TokenSequences, as_mask, compute_dtype, zero_masked
from .terms import LossOptions, TokenTerms, clamped_log_ratio, gmpo_log_ratio, token_kl, token_loss


class LossSettings(NamedTuple):
    """The modes and coefficients of policy_loss, checked and without aliases."""

    loss_mode: str
    loss_agg_mode: str
    kl_type: str
    kl_straight_through: bool
    kl_coef: float
    entropy_coeff: float
    loss_scale_factor: float | None


def policy_loss_reference(
    tokens: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    denominators: Tensor,
    settings: LossSettings,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Compute (loss, metrics in the order of PolicyLossSum in csrc/policy_loss/params.h).

    tokens: the per-token arguments of policy_loss, as `token_arguments` returns them.
    """
    mask = as_mask(tokens.get("response_mask"), tokens["log_probs"])
    dtype = compute_dtype(tokens["log_probs"])
    values = {
        name: zero_masked(tensor.to(dtype), mask)
        for name, tensor in tokens.items()
        if name not in ("response_mask", "selected", "rollout_is_weights")
    }
    sequences = None if cu_seqlens is None else TokenSequences.of(cu_seqlens, mask)
    weights = token_weights(
        settings.loss_agg_mode, mask, cu_seqlens, denominators, settings.loss_scale_factor
    ).to(dtype)
    is_weights = tokens.get("rollout_is_weights")
    if is_weights is not None:
        is_weights = torch.where(mask, is_weights.detach().to(dtype), 1)
    selected = tokens["selected"] & mask if "selected" in tokens else None
    terms = _policy_gradient_terms(
        settings.loss_mode, values, is_weights, selected, mask, sequences, options
    )
    pg_loss = (weights * terms.loss).sum()
    kl_loss = entropy = pg_loss.new_zeros(())
    if "ref_log_probs" in values:
        kl_type = settings.kl_type + "+" * settings.kl_straight_through
        kl = token_kl(kl_type, values["log_probs"], values["ref_log_probs"].detach())
        kl_loss = (weights * kl).sum()
    if "entropy" in values:
        entropy = (weights * values["entropy"]).sum()
    loss = pg_loss + settings.kl_coef * kl_loss - settings.entropy_coeff * entropy
    means = [
        zero_masked(value.to(dtype), mask).sum() / denominators[0]
        for value in (terms.clipped, terms.clipped_lower, -terms.log_ratio, terms.ratio)
    ]
    lowest = weights.new_full((1,), -torch.inf)
    ratio_max = torch.cat([lowest, torch.where(mask, terms.ratio, -torch.inf)]).max()
    sums = [pg_loss, kl_loss, entropy, *means, ratio_max]
    return loss, torch.stack([value.detach().to(dtype) for value in sums])


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
    if loss_mode == "gspo":
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
    terms = token_loss(
        loss_mode,
        log_probs,
        old,
        advantages,
        options,
        seq_log_ratio=seq_log_ratio,
        seq_advantages=seq_advantages,
        selected=selected,
    )
    loss = terms.loss if is_weights is None else terms.loss * is_weights
    return terms._replace(loss=zero_masked(loss, mask))
