"""A linear layer whose weight has a low-rank adapter merged, with the bits of an engine's weight.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): W + scale * B A. A weight sync merges parts of
a weight wherever its shards are, and an engine multiplies by the result. `merge_adapter` gives the
same bits for an element in any part, so a trainer that merges as it computes has the engine's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _check as check
from .decode_linear import decode_linear, inference_linear

OP = "merged_linear"
# Elements computed in float64 at a time: they stay in a CPU's caches; a GPU needs few launches.
_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24


@torch.no_grad()
def merge_adapter(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return weight + scale * left @ right in the dtype of the weight, without gradient.

    Products are summed in float32 by `decode_linear`; then the scale, the weight, and one rounding.
    An element depends on its row of `left` and its column of `right` alone.

    weight: [N, K]. left: [N, r]. right: [r, K]; all of one dtype, float32 or bfloat16.
    """
    update = inference_linear(left, right.t().contiguous(), None, torch.float32, max_rows=None)
    return update.mul_(scale).add_(weight).to(weight.dtype)


def merge_into(
    out: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scale: float,
    computed_in: torch.dtype | None = None,
) -> None:
    """Write weight + scale * left @ right into `out`, in chunks of rows.

    computed_in: by `merge_adapter` in this dtype; None: in float64, with one rounding.
    """
    chunk = _CPU_CHUNK if weight.device.type == "cpu" else _GPU_CHUNK
    step = max(1, chunk // max(weight.shape[1], 1))
    if computed_in is not None:
        left, right = left.to(computed_in), right.to(computed_in)
    else:
        right = right.double() * scale
    for i in range(0, weight.shape[0], step):
        rows, base = left[i : i + step], weight[i : i + step]
        if computed_in is None:
            out[i : i + step] = (rows.double() @ right).add_(base)
        else:
            out[i : i + step] = merge_adapter(base.to(computed_in), rows, right, scale)


def merged_linear(
    x: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    scale: float,
    bias: Tensor | None = None,
    *,
    splits: int = 1,
) -> Tensor:
    """Return x @ (weight + scale * left @ right).T + bias, by `merge_adapter` and `decode_linear`.

    The merged weight exists during the forward only. Backward takes the factors: two products with
    a weight's shape less than those of a merged weight.

    Args:
        x: [..., K]; weight: [N, K]; left: [N, r]; right: [r, K]; bias: [N] or None; of one dtype,
            float32 or bfloat16.
        scale: alpha / r.
        splits: as in `decode_linear`.

    Returns:
        [..., N], differentiable in x, left and right; weight and bias are frozen.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.

    Example:
        >>> x, weight = torch.ones(1, 2), torch.tensor([[1.0, 2.0]])
        >>> merged_linear(x, weight, torch.tensor([[3.0]]), torch.tensor([[1.0, 0.0]]), 0.5)
        tensor([[4.5000]])
    """
    check.same_device(OP, x=x, weight=weight, left=left, right=right, bias=bias)
    sizes: check.Sizes = {}
    check.shape(OP, "weight", weight, "N K", sizes)
    check.shape(OP, "left", left, "N r", sizes)
    check.shape(OP, "right", right, "r K", sizes)
    for name, tensor in (("left", left), ("right", right)):
        check.dtype(OP, name, tensor, (weight.dtype,))
    out: Tensor = _MergedLinear.apply(x, left, right, weight, bias, scale, splits)
    return out


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, left: Tensor, right: Tensor, *others: Any) -> Tensor:
        weight, bias, ctx.scale, splits = others
        ctx.save_for_backward(x, left, right, weight)
        merged = merge_adapter(weight, left, right, ctx.scale)
        return decode_linear(x, merged, bias, splits=splits)

    @staticmethod
    @check.differentiable_once(OP)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, left, right, weight = ctx.saved_tensors
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        inner = ctx.scale * (grads @ left)
        of_x = (grads @ weight + inner @ right).view_as(x) if ctx.needs_input_grad[0] else None
        of_left = ctx.scale * (grads.t() @ (rows @ right.t()))
        return of_x, of_left, inner.t() @ rows, None, None, None, None
