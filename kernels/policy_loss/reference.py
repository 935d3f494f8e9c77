"""The reference of policy_loss: plain PyTorch in float32 or float64, differentiated by autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .aggregation import Segments, as_mask, compute_dtype, kept, token_weights
from .terms import clamped_log_ratio, gmpo_log_ratio, token_kl, token_loss


class LossPlan(NamedTuple):
    """What policy_loss computes, checked and without aliases."""

    loss_mode: str
    loss_agg_mode: str
    kl_type: str
    kl_straight_through: bool
    kl_coef: float
    entropy_coeff: float
    loss_scale_factor: float | None


def policy_loss_reference(tokens, cu_seqlens, counted, plan, options):
    """(loss, metrics in the order of PolicyLossSum in csrc/policy_loss/params.h).

    tokens: what `token_arguments` made of the arguments of policy_loss; counted: `denominators`.
    """
    mask = as_mask(tokens["response_mask"], tokens["log_probs"])
    dtype = compute_dtype(tokens["log_probs"])
    values = {
        name: None if tensor is None else kept(tensor.to(dtype), mask)
        for name, tensor in tokens.items()
        if name not in ("response_mask", "selected", "rollout_is_weights")
    }
    segments = None if cu_seqlens is None else Segments.of(cu_seqlens, mask)
    num_tokens, num_seqs = counted.unbind()
    weights = token_weights(
        plan.loss_agg_mode, mask, segments, num_tokens, num_seqs, plan.loss_scale_factor
    ).to(dtype)
    is_weights = tokens["rollout_is_weights"]
    if is_weights is not None:
        is_weights = torch.where(mask, is_weights.detach().to(dtype), 1)
    selected = tokens["selected"]
    selected = None if selected is None else selected & mask
    terms = _reference_terms(plan.loss_mode, values, is_weights, selected, mask, segments, options)
    pg_loss = (weights * terms.loss).sum()
    kl_loss = entropy = pg_loss.new_zeros(())
    if values["ref_log_probs"] is not None:
        kl_type = plan.kl_type + "+" * plan.kl_straight_through
        kl = token_kl(kl_type, values["log_probs"], values["ref_log_probs"].detach())
        kl_loss = (weights * kl).sum()
    if values["entropy"] is not None:
        entropy = (weights * values["entropy"]).sum()
    loss = pg_loss + plan.kl_coef * kl_loss - plan.entropy_coeff * entropy
    means = [
        kept(value.to(dtype), mask).sum() / num_tokens
        for value in (terms.clipped, terms.clipped_lower, -terms.log_ratio, terms.ratio)
    ]
    lowest = weights.new_full((1,), -torch.inf)
    ratio_max = torch.cat([lowest, torch.where(mask, terms.ratio, -torch.inf)]).max()
    sums = [pg_loss, kl_loss, entropy, *means, ratio_max]
    return loss, torch.stack([value.detach().to(dtype) for value in sums])


def _reference_terms(loss_mode, values, is_weights, selected, mask, segments, options):
    """Per-token terms in plain PyTorch, of values that are 0 where masked."""
    log_probs = values["log_probs"]
    old, advantages = values["old_log_probs"].detach(), values["advantages"].detach()
    segment_log_ratio = segment_advantages = None
    if loss_mode == "gspo":
        x = clamped_log_ratio(log_probs.detach(), old)
        segment_log_ratio = segments.mean(x, mask)
    elif loss_mode == "gmpo":
        x = gmpo_log_ratio(clamped_log_ratio(log_probs, old), advantages, options)
        segment_log_ratio = segments.mean(x, mask)
        segment_advantages = segments.mean(advantages, mask)
        if is_weights is not None:
            is_weights = segments.mean(torch.log(is_weights + 1e-10), mask).exp()
    terms = token_loss(
        loss_mode,
        log_probs,
        old,
        advantages,
        options,
        segment_log_ratio=segment_log_ratio,
        segment_advantages=segment_advantages,
        selected=selected,
    )
    loss = terms.loss if is_weights is None else terms.loss * is_weights
    return terms._replace(loss=torch.where(mask, loss, 0))
