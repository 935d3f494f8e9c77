"""Matrix products of 16-bit operands with a float32 result that is never rounded to 16 bits.

On a GPU this is `torch.mm` with an output type; on a CPU oneDNN's 16-bit kernel where the machine
supports it (csrc/mixed_gemm). Other CPUs run 16-bit products at a fifth to a thirtieth of the
float32 rate: there the operands are converted to float32 block by block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _check as check
from ._backend import native
from ._library import custom_op

# The size of an operand's block after conversion to float32, so that the product reads it from the
# cache.
WIDENED_BYTES = 2**22


def has_fast_products(dtype: torch.dtype, device: torch.device | str = "cpu") -> bool:
    """Return whether matrix products in `dtype` run at least at the float32 rate on `device`.

    A CPU needs AVX512-BF16 for bfloat16 (every CPU with AMX has it) and AVX512-FP16 for float16;
    `HYBRIDENGINE_ISA` and `ONEDNN_MAX_CPU_ISA` are respected. A GPU needs Ampere or later for
    bfloat16.

    Examples:
        >>> has_fast_products(torch.float32)
        True
    """
    if dtype.itemsize != 2:
        return True
    if torch.device(device).type == "cuda":
        return dtype == torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return native() is not None and native().has_mixed_gemm(dtype)


def keeps_16_bits(like: Tensor) -> bool:
    """Return whether operands of this dtype and device are multiplied without conversion."""
    return like.is_cuda or has_fast_products(like.dtype, like.device)


def mixed_gemm(
    out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, accumulate: bool = False
) -> None:
    """Compute out [m, n] = a [m, k] @ b [n, k].T + bias [n], or out += a @ b.T with `accumulate`.

    `out` is float32 if a or b is 16-bit, otherwise of their dtype. a, b and bias have any strides;
    operands without stride 1 along a dimension are copied.

    Examples:
        >>> out = torch.empty(2, 3)
        >>> mixed_gemm(out, torch.ones(2, 4).bfloat16(), torch.ones(3, 4).bfloat16())
        >>> out.tolist()
        [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """
    check.untransformed("mixed_gemm", out=out, a=a, b=b, bias=bias)
    if a.dtype == b.dtype == out.dtype:
        if accumulate:
            out.addmm_(a, b.t())
        elif bias is None:
            torch.mm(a, b.t(), out=out)
        else:
            torch.addmm(bias, a, b.t(), out=out)
    elif a.is_cuda and accumulate:
        torch.ops.aten.addmm.dtype_out(out, a, b.t(), out.dtype, out=out)
    elif a.is_cuda:
        torch.ops.aten.mm.dtype_out(a, b.t(), out.dtype, out=out)
        if bias is not None:
            out += bias
    elif a.dtype == b.dtype and has_fast_products(a.dtype, a.device):
        bias = None if bias is None else bias.float().contiguous()
        native().mixed_gemm(unit_stride(a), unit_stride(b), bias, out, accumulate)
    else:
        if bias is not None:
            out.copy_(bias.expand_as(out))
        _widened(out, a, b, accumulate or bias is not None)


def unit_stride(matrix: Tensor) -> Tensor:
    """Return the matrix, or a contiguous copy if it has no dimension of stride 1."""
    if 1 in matrix.stride():
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _widened(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Compute the product in float32.

    The larger 16-bit operand is converted in contiguous blocks, the other one at once.
    """
    dtype = out.dtype
    if b.dtype == dtype or (a.dtype != dtype and a.numel() > b.numel()):
        out, a, b = out.t(), b, a
    a = a.to(dtype)
    split_dim = int(b.stride(0) < b.stride(1))  # 0: n, the columns of out; 1: k, the sum
    size, width = b.shape[split_dim], b.shape[1 - split_dim]
    step = max(1, WIDENED_BYTES // (dtype.itemsize * max(1, width)))
    for begin in range(0, max(1, size), step):
        part = slice(begin, begin + step)
        if split_dim == 0:
            mixed_gemm(out[:, part], a, b[part].to(dtype), accumulate=accumulate)
        else:
            block = b[:, part].to(dtype)
            mixed_gemm(out, a[:, part], block, accumulate=accumulate or begin > 0)


@custom_op("hybridengine::reference_product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a [m, k] @ b [n, k].T + bias [n], differentiable any number of times."""
    return torch.nn.functional.linear(a, b, bias)


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (a, b), needs = ctx.saved_tensors, ctx.needs_input_grad
    return (
        product(grad, b.t(), None) if needs[0] else None,
        product(grad.t(), a.t(), None) if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


product.register_autograd(_backward, setup_context=_setup_context)
