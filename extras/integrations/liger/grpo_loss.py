"""The mathematics of Liger's GRPO losses on log-probs [B, L]: terms per token, and their reduction.

Liger reduces in two ways that differ for `luspo`: its fused-linear loss averages what masked tokens
hold, too (as TRL does), its loss from logits does not. Both are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# They have no form with one ratio for a sequence.
TOKEN_LEVEL_TYPES = ("cispo", "sapo", "vespo")


@dataclass(frozen=True)
class GRPOOptions:
    """The options of a GRPO loss, under Liger's names."""

    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GRPOOptions:
        """Return the options that are among `given`, by their names."""
        names = [field.name for field in fields(cls) if field.name in given]
        return cls(**{name: given[name] for name in names})

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"Unknown loss_type: {self.loss_type!r}; expected one of {', '.join(LOSS_TYPES)}."
            )
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"Unknown importance_sampling_level: {self.importance_sampling_level!r}; expected "
                "'token' or 'sequence'."
            )
        if self.importance_sampling_level == "sequence" and self.loss_type in TOKEN_LEVEL_TYPES:
            raise ValueError(
                "Sequence-level importance sampling is not supported for "
                f"loss_type='{self.loss_type}'; use importance_sampling_level='token'."
            )


def check_positive(**values: float | None) -> None:
    """Check numbers that may be None."""
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True)
class GRPOTerms:
    """Per token [B, L], or [B, 1] where a whole sequence has one value."""

    loss: Tensor
    kl: Tensor | None  # None without a KL term
    is_clipped: Tensor  # bool


def grpo_terms(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    is_ratio: Tensor | None,
    options: GRPOOptions,
) -> GRPOTerms:
    """Compute the losses of all tokens, before the mask and the reduction.

    Args:
        log_probs: [B, L] float32, differentiable; of masked tokens they have to be finite.
        mask: [B, L], 1 for completion tokens.
        advantages: [B].
        old_log_probs, ref_log_probs: [B, L]; None: `log_probs` themselves.
        is_ratio: [B], [B, 1] or [B, L], π_train / π_rollout; None: 1.
    """
    advantages = advantages.unsqueeze(1)
    if is_ratio is not None and is_ratio.dim() == 1:
        is_ratio = is_ratio.unsqueeze(-1)
    old = log_probs.detach() if old_log_probs is None else old_log_probs.float()
    log_ratio = log_probs - old
    log_weights = log_ratio
    if options.importance_sampling_level == "sequence":
        lengths = mask.sum(-1, keepdim=True).clamp(min=1.0)
        log_weights = (log_ratio * mask).sum(-1, keepdim=True) / lengths
    ratio = log_weights.exp()
    low, high = 1 - options.epsilon_low, 1 + options.epsilon_high
    is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    if options.loss_type == "cispo":
        clipped = ratio.clamp(max=options.epsilon_high).detach()
        loss = -clipped * advantages * log_probs
        is_clipped = (ratio > options.epsilon_high) & (advantages > 0)
    elif options.loss_type == "sapo":
        loss = -_sapo_gate(ratio, advantages, options) * advantages
        is_clipped = torch.zeros_like(is_clipped)
    elif options.loss_type == "vespo":
        weights = get_gamma_weights(
            advantages.squeeze(1),
            log_ratio,
            mask,
            is_ratio,
            options.vespo_k_pos,
            options.vespo_lambda_pos,
            options.vespo_k_neg,
            options.vespo_lambda_neg,
        )
        loss = -weights * advantages * log_probs
        is_clipped = torch.zeros_like(is_clipped)
    else:
        upper = ratio if options.delta is None else ratio.clamp(max=options.delta)
        loss = -torch.min(upper * advantages, ratio.clamp(low, high) * advantages)
    if is_ratio is not None and options.loss_type != "vespo":  # there it is part of the weights
        loss = loss * is_ratio
    if options.beta == 0.0:
        return GRPOTerms(loss, None, is_clipped)
    kl = _k3(log_probs.detach() if ref_log_probs is None else ref_log_probs.float(), log_probs)
    if options.use_bias_correction_kl:
        kl = kl * ratio
    return GRPOTerms(loss + options.beta * kl, kl, is_clipped)


def _k3(ref_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """http://joschu.net/blog/kl-approx.html, without a clamp."""
    return torch.exp(ref_log_probs - log_probs) - (ref_log_probs - log_probs) - 1.0


def _sapo_gate(ratio: Tensor, advantages: Tensor, options: GRPOOptions) -> Tensor:
    """SAPO's soft clip, arXiv 2511.20347: 4 / τ sigmoid(τ (ratio - 1))."""
    tau = torch.where(
        advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg
    ).to(ratio.dtype)
    return torch.sigmoid(tau * (ratio - 1)) * 4 / tau


@torch.no_grad()
def get_gamma_weights(
    advantages: Tensor,
    log_ratio_per_token: Tensor,
    mask: Tensor,
    importance_sampling_ratio: Tensor | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """Compute VESPO's weights e^λ w^k e^(-λ w) of sequences [B, 1], 1 at w = 1.

    w is the product of the ratios of a sequence's tokens and of `importance_sampling_ratio`.
    """
    smallest, largest = math.log(1e-8), 20.0
    log_w = (log_ratio_per_token.clamp(-20.0, largest) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        log_w = log_w + importance_sampling_ratio.log().clamp(smallest, largest).sum(-1, True)
    log_w = log_w.clamp(smallest, largest)
    positive = advantages.unsqueeze(-1) >= 0
    k = torch.where(positive, k_pos, k_neg)
    rate = torch.where(positive, lambda_pos, lambda_neg).clamp(min=1e-4)
    weights = torch.exp(rate + k * log_w - rate * log_w.exp())
    return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def reduce_grpo_loss(
    losses: Tensor,
    mask: Tensor,
    loss_type: str,
    max_completion_length: int,
    num_items_in_batch: float | Tensor | None,
) -> Tensor:
    """Reduce losses [B, L] (or [B, 1]) by Liger's rule for `loss_type`."""
    batch = mask.shape[0]
    if loss_type in ("grpo", "sapo"):
        return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / batch
    if loss_type == "luspo":
        return (losses * mask.sum(-1, keepdim=True)).mean()
    if loss_type == "bnpo":
        denominator: float | Tensor = mask.sum().clamp(min=1.0)
    elif loss_type == "dr_grpo":
        denominator = batch * max_completion_length
    else:
        denominator = dapo_normalizer(mask, num_items_in_batch)
    return (losses * mask).sum() / denominator


def dapo_normalizer(mask: Tensor, num_items_in_batch: float | Tensor | None = None) -> Tensor:
    """Return the completion tokens of all ranks, or `num_items_in_batch`, divided by the ranks."""
    distributed = dist.is_available() and dist.is_initialized()
    if num_items_in_batch is not None:
        total = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=mask.device)
    else:
        total = mask.sum(dtype=torch.float32)
        if distributed:
            dist.all_reduce(total)
    return (total / (dist.get_world_size() if distributed else 1)).clamp(min=1.0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of values [B, L] or [B, 1] over the tokens of the mask [B, L]."""
    return (values * mask).sum() / mask.sum().clamp(min=1.0)
