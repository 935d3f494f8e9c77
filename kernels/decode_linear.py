"""decode_linear: a batch-invariant linear layer, from row-major weights as they are.

A decoding step multiplies one row per sequence. General products pack the weight at every call,
which costs more than the product itself, and a packed copy could not be written in place by the
weight sync. Here register tiles of dot products along K read both operands as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op
from ._per_token import unit_inner_stride
from .gemm import has_fast_products, mixed_gemm, product

OP = "decode_linear"
MAX_ROWS = 128  # from there on a general product is as fast
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)

register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))


def decode_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    splits: int = 1,
    backend: str | None = None,
) -> Tensor:
    """Return x @ weight.T + bias; for few rows faster than a general product, else about as fast.

    Batch-invariant: the bits of a result depend on its row of `x`, its row of `weight` and its
    `bias` alone, whatever the number of rows and threads. Sums are float32: lane l of L adds the
    products of the elements k that a vector register of L lanes takes there (bfloat16: k = 2 l and
    2 l + 1 of every 2 L elements; float32: k = l and l + L), in ascending order of k. The lanes are
    joined as a binary tree, neighbours first. The bias is added last, and the result is rounded
    once. L is 16 with AVX-512, 8 with AVX2, 4 otherwise. A GPU adds one instruction of its tensor
    cores after the other, in ascending order of k, in up to 8 parts of K, which are added in their
    order (decode_linear_triton.py). Therefore results of different instruction sets and GPUs differ
    in rounding. AVX512-BF16 treats subnormal numbers as zero.

    Args:
        x: [..., K], float32 or bfloat16 (float64: on the reference backend).
        weight: [N, K] of the dtype of `x`.
        bias: [N] of the dtype of `x`, or None.
        out_dtype: dtype of `x` (the default) or float32.
        splits: equal parts of K, a divisor of it, whose float32 sums are added in their order. So
            many tensor-parallel ranks, each with a slice of K, get the same bits, if their float32
            results are added in the order of the ranks.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None: the best one for the device.

    Returns:
        [..., N], differentiable; the products of its gradients are torch's.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend cannot run here.

    Example:
        >>> decode_linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[3., 7.]])
    """
    check.same_device(OP, x=x, weight=weight, bias=bias)
    sizes: check.Sizes = {}
    check.shape(OP, "x", x, "... K", sizes)
    check.shape(OP, "weight", weight, "N K", sizes)
    allowed = (torch.float32, torch.bfloat16, torch.float64)
    check.dtype(OP, "x", x, allowed)
    check.dtype(OP, "weight", weight, (x.dtype,))
    if bias is not None:
        check.shape(OP, "bias", bias, "N", sizes)
        check.dtype(OP, "bias", bias, (x.dtype,))
    out_dtype = out_dtype or x.dtype
    if out_dtype not in (x.dtype, torch.float32):
        raise ValueError(
            f"{OP}: out_dtype is {out_dtype}; expected {x.dtype}, the dtype of x, or torch.float32."
        )
    if x.shape[-1] % check.integer(OP, "splits", splits, at_least=1):
        raise ValueError(f"{OP}: splits is {splits}; expected a divisor of K = {x.shape[-1]}.")
    chosen = choose_backend(OP, x.device, backend, x.dtype)
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out: Tensor = _op(rows, weight, bias, out_dtype, splits, chosen)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def inference_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    max_rows: int | None = MAX_ROWS,
) -> Tensor:
    """Return `torch.nn.functional.linear` without a gradient, by `decode_linear` if it is faster.

    That is on a CPU up to MAX_ROWS rows, and for bfloat16 without AVX512-BF16 for any number. There
    the overhead is the least possible, because a product of one row takes no longer than the
    argument checks, the choice of a backend and torch's dispatcher. Under torch.compile it is one
    operator, so that the number of rows may change without another compilation.

    out_dtype: dtype of `x` (the default) or float32, to which sums are not rounded before.
    max_rows: `decode_linear` is taken up to so many rows; None: always, so that the result is
        batch-invariant.
    """
    if torch.compiler.is_compiling():
        return _inference_op(x, weight, bias, out_dtype, max_rows)
    return eager_inference_linear(x, weight, bias, out_dtype, max_rows)


def eager_inference_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    max_rows: int | None,
) -> Tensor:
    extension, dtype = native(), x.dtype
    out: Tensor
    out_dtype = out_dtype or dtype
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    shape = *x.shape[:-1], weight.shape[0]
    plain = extension is None or x.device.type != "cpu" or dtype not in _KERNEL_DTYPES
    few = max_rows is None or rows.shape[0] <= max_rows or not has_fast_products(dtype)
    if max_rows is None and x.is_cuda:
        out = _run(rows, weight, bias, out_dtype, 1, choose_backend(OP, x.device, None, dtype))
    elif few and not plain:
        out = extension.decode_linear(rows, weight, bias, out_dtype)
    elif out_dtype == dtype:
        return F.linear(x, weight, bias)
    else:
        out = x.new_empty(rows.shape[0], weight.shape[0], dtype=out_dtype)
        mixed_gemm(out, rows, weight, bias)
    return out if x.dim() == 2 else out.view(shape)


_inference_op = custom_op("hybridengine::inference_linear", mutates_args=())(eager_inference_linear)


@_inference_op.register_fake
def _(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype or x.dtype)


def join_parts(parts: Iterable[Tensor], bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Add the results of parts of K, float32 [T, N] each, in their order, then the bias [N]."""
    parts = iter(parts)
    out = next(parts)
    for part in parts:
        out = out + part
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(out_dtype)


def find_kernel(backend: str) -> Callable[..., Tensor]:
    """Return the kernel of `cpp` or `triton`: (x, weight, bias, out_dtype, out=) → out."""
    if backend == "cpp":
        kernel: Callable[..., Tensor] = native().decode_linear
        return kernel
    from .decode_linear_triton import decode_linear

    return decode_linear


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    splits: int,
    backend: str,
) -> Tensor:
    kernel = _reference
    if backend != "reference":
        x, weight = unit_inner_stride(x), unit_inner_stride(weight)
        bias = None if bias is None else bias.contiguous()
        kernel = find_kernel(backend)
    if splits == 1:
        return kernel(x, weight, bias, out_dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = zip(x.chunk(splits, 1), weight.chunk(splits, 1), strict=True)
    return join_parts((kernel(*part, None, wide) for part in parts), bias, out_dtype)


_op = custom_op(f"hybridengine::{OP}", mutates_args=())(_run)


@_op.register_fake
def _(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *_ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    for_x, for_weight = ctx.needs_input_grad[:2]
    grad = grad.to(x.dtype)
    return (
        product(grad, weight.t(), None) if for_x else None,
        product(grad.t(), x.t(), None) if for_weight else None,
        grad.sum(0) if ctx.has_bias else None,
    )


_op.register_autograd(_gradients, setup_context=_save_operands)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.to(wide) @ weight.to(wide).t()
    return (sums if bias is None else sums + bias.to(wide)).to(out_dtype)
