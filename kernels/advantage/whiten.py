"""whiten: zero mean and unit variance, with the statistics of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._per_token import zero_masked


def whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute (values - mean) / sqrt(var + epsilon), with the statistics of all ranks.

    Statistics are over unmasked entries; the variance is the unbiased one. Where torch.distributed
    is initialised, every rank of `group` must call this, also with an empty tensor. The split over
    ranks changes only the order of float64 sums. Nothing waits for the GPU.

    Args:
        values: any shape, floating point; constants.
        mask: the same shape, bool or 0/1; masked entries get 0, and what they hold does not matter.
            None: all entries.
        shift_mean: False adds the mean back.
        epsilon: above 0.
        group: the ranks that share statistics; None is all of them.

    Returns:
        The shape and dtype of values.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, an epsilon that is not above 0.
    """
    op = "whiten"
    check.not_none(op, values=values)
    check.same_device(op, values=values, mask=mask)
    check.floats(op, values=values)
    epsilon = check.number(op, "epsilon", epsilon, above=0)
    if mask is not None and mask.shape != values.shape:
        raise ValueError(
            f"whiten: mask has shape {list(mask.shape)}; expected {list(values.shape)} like values."
        )
    values, mask = values.detach(), None if mask is None else check.mask(op, "mask", mask)
    if mask is None:
        count = torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    else:
        values, count = zero_masked(values, mask), mask.sum().double()
    count, total = _sum_over_ranks(torch.stack([count, values.sum(dtype=torch.float64)]), group)
    mean = total / count.clamp(min=1)
    # Deviations from the rounded mean are exact to rounding; its error is corrected below.
    rounded_mean = mean.to(values.dtype)
    mean_error = mean - rounded_mean.double()
    deviations = values - rounded_mean
    if mask is not None:
        deviations.mul_(mask)
    squares = torch.linalg.vector_norm(deviations, dtype=torch.float64).square()
    squares = _sum_over_ranks(squares, group) - count * mean_error**2
    scale = (squares.clamp(min=0) / (count - 1).clamp(min=1) + epsilon).rsqrt()
    offset = (rounded_mean.double() - mean) * scale + (0 if shift_mean else mean)
    whitened = deviations.mul_(scale.to(values.dtype)).add_(offset.to(values.dtype))
    return whitened if mask is None else whitened.mul_(mask)


def _sum_over_ranks(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(local, group=group)
    return local
