"""cross_entropy: with label smoothing and z-loss, from the log-probs of token_log_probs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._per_token import compute_dtype
from .op import check_logits, checked_log_probs
from .options import in_shape, row_options
from .vocab_parallel import vocab_range


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of every row of `logits`.

    With z = logit_scale * logits and lse = log sum exp z,

        loss = lse - (1 - label_smoothing) z[label] - label_smoothing mean(z)
               + lse_square_scale lse^2

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64; labels: [...] int32 or int64.
        label_smoothing: from 0 to 1; lse_square_scale: factor of the z-loss, not negative. With
            neither, logits are read once.
        logit_scale, ignore_index, group, inplace_backward, backend: as in `token_log_probs`.

    Returns:
        (losses [...], z-losses [...], a part of them and without gradient): float64 for float64
        logits, else float32; 0 for rows with ignore_index. Losses are differentiable.

    Raises:
        ValueError: a number out of its range. Otherwise as `token_log_probs`.

    Examples:
        >>> losses, _ = cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(losses.item(), 4)
        1.3863
    """
    op = "cross_entropy"
    label_smoothing = check.number(op, "label_smoothing", label_smoothing, at_least=0, at_most=1)
    lse_square_scale = check.number(op, "lse_square_scale", lse_square_scale, at_least=0)
    labels = check_logits(op, logits, labels, name="labels")
    dtype, size = compute_dtype(logits), logits.shape[-1]
    numbers = (1.0, logit_scale, None, ignore_index)
    options = row_options(op, labels, size, *numbers, None, group, dtype, negate=True)
    losses, *_ = checked_log_probs(logits, labels, options, False, inplace_backward, backend)
    losses = in_shape(losses, labels.shape)
    if not label_smoothing and not lse_square_scale:
        return losses, torch.zeros_like(losses)
    ignored = labels == ignore_index
    first: int | Tensor = 0
    vocab: int | Tensor = max(size, 1)
    if group is not None:
        first, vocab = vocab_range(logits, size, group.group_name).unbind()
    ids = labels - first
    is_own = (ids >= 0) & (ids < size) & ~ignored
    own_logits = logits.gather(-1, torch.where(is_own, ids, 0).unsqueeze(-1)).squeeze(-1)
    label_logits = _sum_over(group, torch.where(is_own, own_logits.to(dtype) * logit_scale, 0))
    z_losses = torch.zeros_like(losses)
    if lse_square_scale:
        lse = label_logits + losses
        z_losses = lse_square_scale * lse * lse  # the square may overflow
        losses = losses + z_losses
    if label_smoothing:
        mean = _sum_over(group, logits.sum(-1, dtype=dtype)) * (logit_scale / vocab)
        losses = losses + label_smoothing * torch.where(ignored, 0, label_logits - mean)
    return losses, z_losses.detach()


def _sum_over(group: dist.ProcessGroup | None, part: Tensor) -> Tensor:
    return part if group is None else _Sum.apply(part, group)


class _Sum(torch.autograd.Function):
    """The sum over the ranks; every rank has the gradient of all, and passes it to its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
