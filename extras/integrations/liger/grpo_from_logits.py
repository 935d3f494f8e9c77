"""Liger's GRPO from logits: liger_kernel.transformers.grpo_loss.triton_grpo_loss, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridengine.kernels import token_log_probs

from .grpo_loss import GRPOOptions, check_positive, grpo_terms, masked_mean, reduce_grpo_loss
from .head import IGNORE_INDEX


def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Compute the log-probs [B, L] of the last L of `input_ids`, 0 where masked; no gradient.

    logits: [B, L + 1, V]; those of the last position are not used.
    """
    length = logits.shape[1] - 1
    mask = None if mask is None else mask[:, -length:]
    with torch.no_grad():
        return _log_probs(logits, input_ids[:, -length:], mask, temperature, inplace=False)


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: float | Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple:
    """Compute GRPO losses from logits.

    Args:
        logits: [B, L + 1, V]; those of the last position are not used, and get no gradient.
        old_logp, ref_logp: [B, L]; without old ones every ratio is 1; ref_logp is needed for a KL.
        completion_ids, completion_mask: [B, L]; advantages: [B].
        inplace: write the gradient over `logits`.
        max_completion_length: the divisor of dr_grpo; None: L.
        reduce: whether to reduce the losses; other arguments as in `LigerFusedLinearGRPOLoss`.

    Returns:
        (loss, metrics: [mean KL if beta is not 0, share of clipped tokens]) if `reduce`, else
        (losses, KL or None, whether clipped), each [B, L] float32 and 0 where masked. Only the
        losses have a gradient.
    """
    options = GRPOOptions.of(locals() | {"epsilon_low": eps_low, "epsilon_high": eps_high})
    if loss_type == "sapo":
        check_positive(
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg
        )
    if delta is not None and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(f"delta (two-sided clipping) is not supported for loss_type='{loss_type}'")
    if beta != 0.0 and ref_logp is None:
        raise ValueError(f"beta is {beta}, and ref_logp is not given; give both or neither.")
    log_probs = _log_probs(logits, completion_ids, completion_mask, temperature, inplace)
    mask = torch.ones_like(log_probs) if completion_mask is None else completion_mask.float()
    # What masked tokens hold must not overflow: a ratio of inf times 0 is NaN.
    old, ref = (None if t is None else torch.where(mask != 0, t, 0.0) for t in (old_logp, ref_logp))
    terms = grpo_terms(log_probs, mask, advantages, old, ref, vllm_is_ratio, options)
    losses = terms.loss * mask
    kl = None if terms.kl is None else (terms.kl * mask).detach()
    is_clipped = terms.is_clipped * mask
    if not reduce:
        return losses, kl, is_clipped
    length = losses.shape[1] if max_completion_length is None else max_completion_length
    loss = reduce_grpo_loss(losses, mask, loss_type, length, num_items_in_batch)
    metrics = [] if kl is None else [masked_mean(kl, mask)]
    return loss, [*metrics, masked_mean(is_clipped, mask)]


def _log_probs(
    logits: Tensor, token_ids: Tensor, mask: Tensor | None, temperature: float, inplace: bool
) -> Tensor:
    """Compute log-probs [B, L] of logits [B, L + 1, V], 0 where masked.

    The last position becomes an ignored row: a slice of the logits would be copied.
    """
    if mask is not None:
        token_ids = token_ids.masked_fill(mask == 0, IGNORE_INDEX)
    token_ids = F.pad(token_ids, (0, 1), value=IGNORE_INDEX)
    log_probs, _ = token_log_probs(logits, token_ids, temperature, inplace_backward=inplace)
    return log_probs[:, :-1]
