"""value_loss: the clipped squared error of a critic, aggregated as policy_loss is."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check as check
from ._aggregation import check_aggregation, loss_denominators, token_weights
from ._per_token import as_mask, compute_dtype, token_arguments, zero_masked


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    response_mask: Tensor | None = None,
    cliprange_value: float | None = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
    global_num_tokens: float | Tensor | None = None,
    global_num_seqs: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sum_t weight_t max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    The clipped value loss of PPO's implementations (arXiv 2005.12729, section 3), in float64 for
    float64 values, else in float32; weights as in policy_loss. Plain PyTorch, with derivatives
    of any order in reverse and forward mode.

    Args:
        values: [T], packed tokens, or [B, L], whose rows are the sequences; differentiable.
        old_values, returns: the same shape, constants.
        response_mask: the same shape, bool or 0/1; what masked tokens hold does not matter.
        cliprange_value: c, not negative; None (or infinity) does not clip.
        loss_agg_mode, loss_scale_factor, cu_seqlens, global_num_tokens, global_num_seqs: as in
            policy_loss.

    Returns:
        (loss, metrics): vf_loss is the loss; vf_clipfrac and vpred_mean are sums divided by the
        global number of tokens. All of them add up over micro-batches and ranks.

    Raises:
        ValueError: as policy_loss.
    """
    op = "value_loss"
    check.not_none(op, values=values, old_values=old_values, returns=returns)
    loss_scale_factor = check_aggregation(op, loss_agg_mode, loss_scale_factor)
    clip = float("inf") if cliprange_value is None else cliprange_value
    clip = check.number(op, "cliprange_value", clip, at_least=0, infinite=True)
    tokens, cu_seqlens = token_arguments(
        op,
        {"values": values, "old_values": old_values, "returns": returns},
        {"response_mask": response_mask},
        cu_seqlens,
    )
    mask = as_mask(tokens.get("response_mask"), tokens["values"])
    denominators = loss_denominators(
        op, loss_agg_mode, mask, cu_seqlens, global_num_tokens, global_num_seqs
    )
    weights = token_weights(loss_agg_mode, mask, cu_seqlens, denominators, loss_scale_factor)
    dtype, num_tokens = compute_dtype(values), denominators[0]
    values, old, targets = (
        zero_masked(tensor.to(dtype), mask)
        for tensor in (tokens["values"], tokens["old_values"].detach(), tokens["returns"].detach())
    )
    clipped_values = torch.minimum(torch.maximum(values, old - clip), old + clip)
    unclipped_error, clipped_error = ((v - targets).square() for v in (values, clipped_values))
    clipped = clipped_error > unclipped_error
    errors = torch.where(clipped, clipped_error, unclipped_error)
    loss = 0.5 * (weights.to(dtype) * errors).sum()
    metrics = {
        "vf_loss": loss,
        "vf_clipfrac": clipped.to(dtype).sum() / num_tokens,
        "vpred_mean": values.sum() / num_tokens,
    }
    return loss, {name: value.detach().to(dtype) for name, value in metrics.items()}
