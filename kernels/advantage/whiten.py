"""whiten: zero mean and unit variance, with the statistics of all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, register_backends
from .._library import custom_op
from .._per_token import compute_dtype

register_backends("whiten", cpu=("reference",), cuda=("triton", "reference"))


def whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute (values - mean) / sqrt(var + epsilon), with the statistics of all ranks.

    Statistics are over unmasked entries; the variance is the unbiased one. Where torch.distributed
    is initialised, every rank of `group` must call this, also with an empty tensor. The split over
    ranks changes only the order of float64 sums. Only the reference waits for the GPU.

    Args:
        values: any shape, floating point; constants.
        mask: the same shape, bool or 0/1; masked entries get 0, and what they hold does not matter.
            None: all entries.
        shift_mean: False adds the mean back.
        epsilon: above 0.
        group: the ranks that share statistics; None is all of them.
        backend: `triton` or `reference`; None takes the best one.

    Returns:
        The shape and dtype of values, contiguous; the statistics are float64.

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
    backend = choose_backend(op, values.device, backend, values.dtype)
    values = values.detach().contiguous()
    mask = None if mask is None else check.mask(op, "mask", mask).contiguous()
    own = _moments(values, mask, backend)
    moments = _gather(own, group)
    return _apply(values, mask, moments, shift_mean, epsilon, backend)


def _gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the moments [3] of the W ranks: [W, 3]."""
    if not (dist.is_available() and dist.is_initialized()):
        return own.unsqueeze(0)
    moments = own.new_zeros(dist.get_world_size(group), 3)
    moments[dist.get_rank(group)] = own
    dist.all_reduce(moments, group=group)  # exact: one rank's value plus zeros
    return moments


def _keep_unmasked_(values: Tensor, bits: Tensor | None) -> Tensor:
    """Set masked values to 0 in place, NaN included.

    bits: of `_mask_bits`. On a CPU `torch.where` and `masked_fill_` take eight times as long.
    """
    if bits is not None:
        values.view(bits.dtype).bitwise_and_(bits)
    return values


def _mask_bits(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return integers with all bits set where unmasked, and none elsewhere; None without a mask."""
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    return None if mask is None else mask.to(bits).neg_()


@custom_op("hybridengine::whiten_moments", mutates_args=())
def _moments(values: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    """Compute (count, mean, sum of squared deviations) of the unmasked entries, float64 [3]."""
    if backend == "triton":
        from .whiten_triton import moments_triton

        return moments_triton(values, mask)
    dtype = compute_dtype(values)
    bits = _mask_bits(mask, dtype)
    wide = _keep_unmasked_(values.to(dtype, copy=mask is not None), bits)
    count = float(values.numel() if mask is None else mask.count_nonzero())
    mean = wide.sum(dtype=torch.float64).item() / max(count, 1.0)
    # Deviations from the rounded mean are exact to rounding; its error is corrected after them.
    center = _rounded(mean, dtype)
    deviations = wide - center if mask is None else _keep_unmasked_(wide.sub_(center), bits)
    norm = torch.linalg.vector_norm(deviations, dtype=torch.float64).item()
    squares = max(norm * norm - count * (mean - center) * (mean - center), 0.0)
    return values.new_tensor([count, mean, squares], dtype=torch.float64)


def _rounded(number: float, dtype: torch.dtype) -> float:
    """Return the number as this dtype holds it."""
    return torch.tensor(number, dtype=dtype).item()


@_moments.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(3, dtype=torch.float64)


@custom_op("hybridengine::whiten_apply", mutates_args=())
def _apply(
    values: Tensor,
    mask: Tensor | None,
    moments: Tensor,
    shift_mean: bool,
    epsilon: float,
    backend: str,
) -> Tensor:
    """Whiten values with the joint statistics of moments [W, 3] (Chan, Golub & LeVeque 1979)."""
    if backend == "triton":
        from .whiten_triton import apply_triton

        return apply_triton(values, mask, moments, shift_mean, epsilon)
    ranks = moments.tolist()
    count = sum(n for n, _, _ in ranks)
    mean = sum(n * own for n, own, _ in ranks) / max(count, 1.0)
    squares = sum(own_squares + n * (own - mean) * (own - mean) for n, own, own_squares in ranks)
    scale = 1 / math.sqrt(squares / max(count - 1, 1.0) + epsilon)
    dtype = compute_dtype(values)
    center = _rounded(mean, dtype)
    offset = (center - mean) * scale + (0.0 if shift_mean else mean)
    factor, offset = _rounded(scale, dtype), _rounded(offset, dtype)
    whitened = (values.to(dtype) - center).mul_(factor).add_(offset)
    return _keep_unmasked_(whitened, _mask_bits(mask, dtype)).to(values.dtype)


@_apply.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)
