"""aggregate_loss: one number from losses per token, in every aggregation mode of policy_loss."""

from __future__ import annotations

from torch import Tensor

from . import _check as check
from ._aggregation import check_aggregation, check_seq_num_tokens, loss_denominators, token_weights
from ._per_token import as_mask, compute_dtype, token_arguments, zero_masked


def aggregate_loss(
    losses: Tensor,
    *,
    response_mask: Tensor | None = None,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    cu_seqlens: Tensor | None = None,
    global_num_tokens: float | Tensor | None = None,
    global_num_seqs: float | Tensor | None = None,
    seq_num_tokens: Tensor | None = None,
) -> Tensor:
    """Compute sum_t weight_t losses_t, with the weights of policy_loss.

    Args:
        losses: [T], packed tokens, or [B, L], whose rows are the sequences; differentiable.
        response_mask: the same shape, bool or 0/1; what masked tokens hold, NaN included, does not
            matter.
        loss_agg_mode, loss_scale_factor, cu_seqlens, global_num_tokens, global_num_seqs: as in
            policy_loss.
        seq_num_tokens: [N] numbers, with seq-mean-token-mean: L of every sequence, where this call
            sees a part of its tokens only (context parallelism). Values below 1 become 1. None: the
            unmasked tokens of this call.

    Returns:
        A 0-d tensor, float64 for float64 losses, else float32.

    Raises:
        ValueError: as policy_loss; seq_num_tokens with another mode or of another shape.

    Examples:
        >>> import torch
        >>> losses = torch.tensor([[1.0, 2.0], [6.0, 9.0]])
        >>> aggregate_loss(losses, response_mask=torch.tensor([[1, 1], [1, 0]])).item()
        3.0
    """
    op = "aggregate_loss"
    check.not_none(op, losses=losses)
    loss_scale_factor = check_aggregation(op, loss_agg_mode, loss_scale_factor)
    tokens, cu_seqlens = token_arguments(
        op, {"losses": losses}, {"response_mask": response_mask}, cu_seqlens
    )
    flat = tokens["losses"].to(compute_dtype(losses))
    mask = as_mask(tokens.get("response_mask"), flat)
    denominators = loss_denominators(
        op, loss_agg_mode, mask, cu_seqlens, global_num_tokens, global_num_seqs
    )
    seq_num_tokens = check_seq_num_tokens(op, loss_agg_mode, cu_seqlens, seq_num_tokens)
    weights = token_weights(
        loss_agg_mode, mask, cu_seqlens, denominators, loss_scale_factor, seq_num_tokens
    )
    return (weights.to(flat.dtype) * zero_masked(flat, mask)).sum()
