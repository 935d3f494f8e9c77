"""grouped_linear: a linear layer per group of rows, for the experts of a mixture.

The rows of a group (the tokens of an expert) are contiguous, and no group is padded. A loop of
products, one per expert, packs every weight for few rows; here the rows are packed, or the weight
once per product where its layout needs it, and the next block is read while one is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, has_triton, native, register_backends
from ._library import custom_op
from ._per_token import compute_dtype, unit_inner_stride
from .memory_pool import empty_from_pool

OP = "grouped_linear"
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT = 16  # bytes, of rows and addresses that torch's grouped product takes
_MAX_GROUPS = 1023  # of torch's kernel for GPUs
# The GPUs that have it. Others take a loop over the groups; on those of capability 10 gradients of
# weights without rows are not zero (pytorch issue 172439).
_CAPABILITY = 9

register_backends(OP, cpu=("cpp", "torch", "reference"), cuda=("torch", "triton", "reference"))


def grouped_linear(
    x: Tensor, weight: Tensor, cu_counts: Tensor, *, backend: str | None = None
) -> Tensor:
    """Return x @ weight[e].T for the rows of every group e, differentiable in x and weight.

    On the `cpp` backend a row of the result, and of the gradient of `x`, has the same bits whatever
    the other rows of its group, their number, its position and the number of threads. Sums are
    float32: blocks of 256 elements, each in ascending order from zero, are added in ascending
    order, and the result is rounded once. A weight's gradient is summed in the same way over the
    rows of its group, counted from the group's first row. AVX512-BF16 adds pairs of bfloat16, so
    results of instruction sets differ in rounding; it treats subnormal numbers as zero. Sums of the
    `triton` backend are float32 chains (grouped_linear_triton.py). No backend adds with atomics.

    Args:
        x: [T, K], the rows of group 0, of group 1 and so on; float32 or bfloat16 (float16 on a CPU
            and float64: on the reference backend).
        weight: [E, N, K] of the dtype of `x`. It is read as it is if one of its last two dimensions
            has stride 1: for weights [E, K, N] pass `weight.transpose(1, 2)`.
        cu_counts: [E + 1] int32 or int64, from 0 to T in ascending order; group e has the rows from
            cu_counts[e] to cu_counts[e + 1] - 1, possibly none.
        backend: `cpp` (CPU), `torch` (torch's grouped product), `triton` (CUDA) or `reference`,
            which reads cu_counts on the host; None: the best one for the device. `torch` leaves to
            `triton` (without Triton and on a CPU: `reference`) rows that are no multiple of 16
            bytes and, on a GPU, all that torch computes by a loop that waits for the GPU: dtypes
            other than bfloat16, and GPUs other than compute capability 9 and 10.

    Returns:
        [T, N] of the dtype of `x`. The gradient of an empty group's weight is zero.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, cu_counts does not ascend from 0 to T, or
            the backend cannot run here. (On a GPU the values of cu_counts are not checked.)

    Example:
        >>> x, weight = torch.ones(3, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> grouped_linear(x, weight, torch.tensor([0, 1, 3])).flatten()
        tensor([3., 7., 7.])
    """
    check.same_device(OP, x=x, weight=weight, cu_counts=cu_counts)
    sizes: check.Sizes = {}
    check.shape(OP, "x", x, "T K", sizes)
    check.shape(OP, "weight", weight, "E N K", sizes)
    check.floats(OP, x=x)
    check.dtype(OP, "weight", weight, (x.dtype,))
    check.shape(OP, "cu_counts", cu_counts, "C", {"C": (weight.shape[0] + 1, "weight, E + 1")})
    cu_counts = check.cu_seqlens(OP, cu_counts, x.shape[0], name="cu_counts")
    chosen = choose_backend(OP, x.device, backend, x.dtype)
    if chosen == "cpp" and x.dtype not in _KERNEL_DTYPES:
        chosen = "reference"
    return _forward_op(x, weight, cu_counts, chosen)


@custom_op(f"hybridengine::{OP}", mutates_args=())
def _forward_op(x: Tensor, weight: Tensor, cu_counts: Tensor, backend: str) -> Tensor:
    return _product(x, weight, cu_counts, backend)


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@custom_op(f"hybridengine::{OP}_backward", mutates_args=())
def _backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, cu_counts: Tensor, wanted: list[bool], backend: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight; those not `wanted` are empty."""
    x_grad, weight_grad = x.new_empty(0), weight.new_empty(0)
    if wanted[0]:
        x_grad = _product(grad, weight.transpose(1, 2), cu_counts, backend)
    if wanted[1]:
        weight_grad = _weight_grad(grad, x, weight, cu_counts, backend)
    return x_grad, weight_grad


@_backward_op.register_fake
def _(x: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor]:
    x_grad = x.new_empty(x.shape) if wanted[0] else x.new_empty(0)
    return x_grad, _empty_weight(weight) if wanted[1] else weight.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, cu_counts, ctx.backend = inputs
    ctx.save_for_backward(x, weight, cu_counts)


@check.differentiable_once(OP)
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:2])
    grads = _backward_op(grad, *ctx.saved_tensors, wanted, ctx.backend)
    return tuple(g if needed else None for g, needed in zip(grads, wanted, strict=True))


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _product(x: Tensor, weight: Tensor, cu_counts: Tensor, backend: str) -> Tensor:
    """Return [T, N] from x [T, K] and weight [E, N, K]."""
    if backend == "cpp":
        out = empty_from_pool([x.shape[0], weight.shape[1]], x.dtype)
        native().grouped_linear(unit_inner_stride(x), _unit_stride(weight), cu_counts, out)
        return out
    if backend != "reference":
        x, weight = unit_inner_stride(x), _unit_stride(weight)
        backend = narrow_backend(backend, weight.shape, x, weight)
    if backend == "torch":
        return F.grouped_mm(x, weight.transpose(1, 2), offs=cu_counts[1:])
    if backend == "triton":
        from . import grouped_linear_triton

        return grouped_linear_triton.product(x, weight, cu_counts)
    out, dtype = x.new_empty(x.shape[0], weight.shape[1]), compute_dtype(x)
    for group, rows, w in zip(_split(out, cu_counts), _split(x, cu_counts), weight, strict=True):
        group.copy_(rows.to(dtype) @ w.to(dtype).t())
    return out


def _weight_grad(
    grad: Tensor, x: Tensor, weight: Tensor, cu_counts: Tensor, backend: str
) -> Tensor:
    """Return grad.T @ x of every group, with the strides of `weight`."""
    if backend == "cpp":
        out = _empty_weight(weight)
        native().grouped_weight_grad(unit_inner_stride(grad), unit_inner_stride(x), cu_counts, out)
        return out
    if backend != "reference":
        grad, x = unit_inner_stride(grad), unit_inner_stride(x)
        backend = narrow_backend(backend, weight.shape, grad, x)
    if backend != "reference":
        transposed = _is_transposed(weight)
        left, right = (x, grad) if transposed else (grad, x)
        if backend == "torch":
            out = F.grouped_mm(left.t(), right, offs=cu_counts[1:])
        else:
            from . import grouped_linear_triton

            out = grouped_linear_triton.weight_grad(left, right, cu_counts)
        return out.transpose(1, 2) if transposed else out
    out, dtype = _empty_weight(weight), compute_dtype(x)
    for group, g, rows in zip(out, _split(grad, cu_counts), _split(x, cu_counts), strict=True):
        group.copy_(g.to(dtype).t() @ rows.to(dtype))
    return out


def narrow_backend(backend: str, shape: torch.Size, *operands: Tensor) -> str:
    """Return `backend`, or what runs in place of torch's grouped product where that cannot.

    shape: [E, N, K], of the weight. operands: of the product, with an inner stride of 1.
    """
    if backend != "torch" or _torch_takes(shape, *operands):
        return backend
    return "triton" if operands[0].is_cuda and has_triton() else "reference"


def _torch_takes(shape: torch.Size, *operands: Tensor) -> bool:
    """Return whether torch's grouped product takes operands and does not wait for the GPU."""
    first, (groups, *sizes) = operands[0], shape
    if first.is_cuda:
        capability = torch.cuda.get_device_capability(first.device)[0]
        if first.dtype != torch.bfloat16 or capability != _CAPABILITY or groups > _MAX_GROUPS:
            return False
    unit = _ALIGNMENT // first.dtype.itemsize
    return not any(size % unit for size in sizes) and all(map(_is_aligned, operands))


def _is_aligned(operand: Tensor) -> bool:
    """Return whether the address and all rows are aligned, and no rows overlap."""
    inner = -1 if operand.stride(-1) == 1 else -2
    strides = list(operand.stride())
    strides[inner] = 0
    unit = _ALIGNMENT // operand.dtype.itemsize
    apart = operand.stride(-3 - inner) >= operand.shape[inner]
    return apart and operand.data_ptr() % _ALIGNMENT == 0 and not any(s % unit for s in strides)


def _split(rows: Tensor, cu_counts: Tensor) -> tuple[Tensor, ...]:
    return rows.split(cu_counts.diff().tolist())


def _unit_stride(weight: Tensor) -> Tensor:
    """Return the weight, or a contiguous copy if neither inner dimension has stride 1."""
    if 1 in weight.stride()[1:]:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(1) == 1 and weight.stride(2) != 1


def _empty_weight(weight: Tensor) -> Tensor:
    """Return a new tensor like `weight`, transposed in memory as that is."""
    groups, n, k = weight.shape
    if _is_transposed(weight):
        return empty_from_pool([groups, k, n], weight.dtype, weight.device).transpose(1, 2)
    return empty_from_pool([groups, n, k], weight.dtype, weight.device)
