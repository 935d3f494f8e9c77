"""orthogonalize: the Newton-Schulz iteration of Muon, over matrices of equal shape.

Each step multiplies a matrix by a polynomial of its Gram matrix. Gram matrices and their squares
are symmetric: only the tiles up to the diagonal (on a CPU: strips) are multiplied, the rest is
mirrored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, register_backends
from ._library import custom_op

OP = "orthogonalize"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7  # the least norm that a matrix is divided by
STRIP = 192  # rows of a symmetric product that are multiplied at once, on a CPU

register_backends(OP, cpu=("torch", "reference"), cuda=("triton", "torch", "reference"))


def orthogonalize(x: Tensor, *, backend: str | None = None) -> Tensor:
    """Return U S Vᵀ for every matrix U Σ Vᵀ of `x`, with all entries of S near 1.

    X is divided by its Frobenius norm, then five times X ← a X + (b A + c A²) X with A = X Xᵀ (Xᵀ X
    for more rows than columns) and (a, b, c) = (3.4445, -4.7750, 2.0315). Singular values above
    0.6% of the norm end between 0.68 and 1.21. Source: Keller Jordan, "Muon: An optimizer
    for hidden layers in neural networks" (kellerjordan.github.io/posts/muon), `torch.optim.Muon`,
    which computes in bfloat16; so does this for bfloat16 matrices, rounding where torch does.

    Args:
        x: [B, M, N], B matrices of a floating-point dtype, which the result is computed in.
        backend: `triton` (CUDA), `torch` or `reference`; None: the best one for the device, and
            `reference` for float64. `triton` leaves to `torch` float32 and matrices below 512 rows
            or columns.

    Returns:
        [B, M, N] of the dtype of `x`. No matrix depends on another one. Zeros stay zeros.

    Raises:
        ValueError: `x` has other dimensions, no floating-point dtype, or the backend cannot run.

    Example:
        >>> orthogonalize(torch.diag(torch.tensor([3.0, -2.0, 0.0]))[None])[0].diag().sign()
        tensor([ 1., -1.,  0.])
    """
    check.same_device(OP, x=x)
    check.shape(OP, "x", x, "B M N", {})
    check.floats(OP, x=x)
    return _op(x, choose_backend(OP, x.device, backend, x.dtype))


@custom_op(f"hybridengine::{OP}", mutates_args=())
def _op(x: Tensor, backend: str) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide, result = (x, out) if x.shape[1] <= x.shape[2] else (x.mT, out.mT)
    if backend == "reference":
        result.copy_(_reference(wide))
    elif x.is_cuda or backend == "triton":
        result.copy_(_batched(wide, backend))
    else:
        for matrix, into in zip(wide, result, strict=True):  # one product fills the cores
            into.copy_(_one(matrix))
    return out


@_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _reference(x: Tensor) -> Tensor:
    """Compute step by step, in the dtype of x [B, M, N], M <= N: the specification."""
    a, b, c = COEFFICIENTS
    x = x / x.square().sum((1, 2), keepdim=True).sqrt().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _batched(x: Tensor, backend: str) -> Tensor:
    a, b, c = COEFFICIENTS
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)).contiguous()
    symmetric = _symmetric
    if backend == "triton":
        from . import orthogonalize_triton

        if orthogonalize_triton.takes(x):
            symmetric = orthogonalize_triton.symmetric
    for _ in range(STEPS):
        x = torch.baddbmm(x, symmetric(symmetric(x), c, b), x, beta=a)
    return x


def _symmetric(x: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Return alpha x xᵀ + beta x; with beta, x is symmetric."""
    return torch.baddbmm(x, x, x, beta=beta, alpha=alpha) if beta else x @ x.mT


def _one(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    x = x / x.norm().clamp(min=EPS)
    gram, update = x.new_empty(2, x.shape[0], x.shape[0])
    for _ in range(STEPS):
        for rows, end in _strips(gram):
            torch.mm(x[rows], x[:end].T, out=gram[rows, :end])
        _mirror(gram)
        for rows, end in _strips(gram):
            known = gram[rows, :end]
            torch.addmm(known, gram[rows], gram[:, :end], beta=b, alpha=c, out=update[rows, :end])
        _mirror(update)
        x = torch.addmm(x, update, x, beta=a)
    return x


def _strips(square: Tensor) -> list[tuple[slice, int]]:
    """Return the rows of each strip, and the end of its columns, behind the diagonal."""
    size = square.shape[0]
    count = -(-size // STRIP)
    ends = [size * i // count for i in range(1, count + 1)]
    return [(slice(start, end), end) for start, end in zip([0, *ends], ends, strict=False)]


def _mirror(square: Tensor) -> None:
    """Fill what is right of the strips."""
    for rows, _ in _strips(square):
        square[: rows.start, rows] = square[rows, : rows.start].T
