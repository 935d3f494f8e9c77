"""value_loss: the critic's clipped squared error, with the policy loss's global denominators."""

from __future__ import annotations

import torch
from torch import Tensor

from .aggregation import (
    LOSS_AGG_MODES,
    Segments,
    as_mask,
    check_choice,
    check_shapes,
    denominators,
    kept,
    token_weights,
)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    response_mask: Tensor | None = None,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
    global_num_tokens: float | Tensor | None = None,
    global_num_seqs: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t weight_t max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    The clipped value loss of PPO's implementations (arXiv 2005.12729, section 3), in the dtype of
    `values`; weights as in policy_loss.

    Args:
        values: [T], differentiable. old_values, returns: [T], constants.
        response_mask: [T] bool; what masked tokens hold does not matter.
        cliprange_value: c; float("inf") does not clip.
        loss_agg_mode, loss_scale_factor, cu_seqlens, global_num_tokens, global_num_seqs: as in
            policy_loss.

    Returns:
        (loss, metrics): vf_loss is the loss; vf_clipfrac, vpred_mean are sums divided by the
        global number of tokens. All add up over micro-batches and ranks.
    """
    per_token = {"old_values": old_values, "returns": returns, "response_mask": response_mask}
    check_shapes("value_loss", "values", values, per_token)
    check_choice("value_loss", "loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    if loss_agg_mode == "seq-mean-token-sum-norm" and not loss_scale_factor:
        raise ValueError("value_loss: 'seq-mean-token-sum-norm' needs loss_scale_factor")
    mask = as_mask(response_mask, values)
    num_tokens, num_seqs = denominators(
        "value_loss", loss_agg_mode, mask, cu_seqlens, global_num_tokens, global_num_seqs
    ).unbind()
    segments = None if cu_seqlens is None else Segments.of(cu_seqlens, mask)
    weights = token_weights(
        loss_agg_mode, mask, segments, num_tokens, num_seqs, loss_scale_factor
    ).to(values.dtype)
    values, old, targets = (kept(x, mask) for x in (values, old_values.detach(), returns.detach()))
    near = torch.minimum(torch.maximum(values, old - cliprange_value), old + cliprange_value)
    free, bounded = (values - targets).square(), (near - targets).square()
    clipped = bounded > free
    loss = 0.5 * (weights * torch.where(clipped, bounded, free)).sum()
    metrics = {
        "vf_loss": loss,
        "vf_clipfrac": clipped.to(weights.dtype).sum() / num_tokens,
        "vpred_mean": values.sum() / num_tokens,
    }
    return loss, {name: value.detach().to(weights.dtype) for name, value in metrics.items()}
