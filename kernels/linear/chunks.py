"""The matrix products of an output head, a chunk of rows at a time, and their buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._backend import has_triton, native
from .._per_token import compute_dtype
from ..decode_linear import find_kernel
from ..gemm import WIDENED_BYTES, keeps_16_bits, mixed_gemm, unit_stride
from ..memory_pool import empty_from_pool

# Rows of a matrix product in the deterministic mode, where every product has the same shape.
_DETERMINISTIC_ROWS = 128
# Columns of its result at least: for fewer, MKL sums some rows of an operand in another order than
# others.
_DETERMINISTIC_COLUMNS = 64
# Rows of a chunk where a group exchanges its row sums: the same number on all ranks, whatever the
# sizes of their vocabulary slices.
GROUP_ROWS = 512
# How many chunks of 16-bit gradients the buffer of a GPU holds.
_CHUNKS_PER_PRODUCT = 8
# Rows of logits on a GPU: more do not make their product faster, because it already reads the
# weight in a tenth of the time that it computes.
_GPU_ROWS = 2048
# cuBLAS is fast where row strides are multiples of 16 bytes. Triton divides the sums of a row among
# threads by whether its stride is a multiple of 16 elements, as that of an engine's logits is.
_GPU_STRIDE = 16


class Chunks:
    """The matrix products of hidden [T, H] and weight [V, H], in reused buffers.

    Logits are float32 for any dtype of the inputs. The gradient of a chunk overwrites its logits,
    or with 16-bit products is written to a buffer of that dtype. On a GPU that buffer holds several
    chunks, all of them if they fit, because each product reads and writes the full weight gradient.

    Args:
        budget_bytes: memory for the buffers and for temporary copies of hidden and weight.
        deterministic: products are batch-invariant. Logits are by `decode_linear`, if it takes the
            operands; with it, 16-bit products on a CPU are by csrc/mixed_gemm. Every other product
            is padded to the same number of rows, and to enough columns.
        grad_rows: rows whose gradient is computed; 0: logits only.
        group: name of the process group of vocabulary-parallel ranks; "": none.
        kept: all logits are given (`logits_fit`); one chunk, with a buffer for its gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        budget_bytes: int,
        deterministic: bool,
        grad_rows: int,
        group: str = "",
        kept: bool = False,
    ) -> None:
        self.hidden, self.weight = unit_stride(hidden), unit_stride(weight)
        self.bias = None if bias is None else bias.contiguous()
        # Logits by `decode_linear`, whose rows do not depend on their number.
        self._invariant = deterministic and is_invariant(hidden, weight)
        dtype, is_16_bit = compute_dtype(hidden), keeps_16_bits(hidden) and hidden.itemsize == 2
        if self._invariant and hidden.is_cpu and is_16_bit:
            deterministic = False
        self.deterministic = deterministic
        grad_dtype = hidden.dtype if keeps_16_bits(hidden) else dtype
        # Whether gradients have a buffer of their own.
        self.separate = grad_rows > 0 and (grad_dtype != dtype or kept)
        several = self.separate and hidden.is_cuda and not deterministic
        shared = _CHUNKS_PER_PRODUCT if several else 1
        rows, vocab = hidden.shape[0], weight.shape[0]
        grad_bytes = grad_dtype.itemsize if self.separate else 0
        max_rows = _max_rows(hidden, weight, budget_bytes, shared, grad_bytes)
        if kept:
            max_rows = self.rows = max(1, rows)
        elif deterministic:
            max_rows = self.rows = _DETERMINISTIC_ROWS
        elif group:
            max_rows = self.rows = max(1, min(rows, GROUP_ROWS))
        else:
            limit = min(max_rows, _GPU_ROWS) if hidden.is_cuda else max_rows
            self.rows = _equal_rows(rows, limit)
        in_place = grad_rows > 0 and not self.separate
        logits_rows = 0 if kept else max_rows if in_place else self.rows
        if not deterministic:
            logits_rows, max_rows = min(logits_rows, rows), min(max_rows * shared, grad_rows)
        self.logits_buffer = _empty_rows(hidden, logits_rows, vocab, dtype)
        self.grad_logits = self.logits_buffer
        if self.separate:
            self.grad_logits = _empty_rows(hidden, max_rows, vocab, grad_dtype)
        # Whether one product gives the full weight gradient, in the dtype of its operands.
        in_16_bits = several or (hidden.is_cpu and is_16_bit and not deterministic)
        self.one_product = in_16_bits and self.grad_logits.shape[0] == grad_rows

    def parts(self, index: Tensor | None = None) -> Iterator[slice | Tensor]:
        """Yield the rows of every chunk: slices of all rows, or parts of `index` int64 [A]."""
        if index is not None:
            yield from (part for part in index.split(self.rows) if part.numel())
            return
        for begin in range(0, self.hidden.shape[0], self.rows):
            yield slice(begin, min(begin + self.rows, self.hidden.shape[0]))

    def logits(self, rows: slice | Tensor, offset: int = 0) -> Tensor:
        """Compute logits [rows, V] into the buffer at row `offset`; valid until the next call."""
        hidden = self.hidden[rows]
        if self._invariant:
            out = self.logits_buffer[offset : offset + hidden.shape[0]]
            product = find_kernel("triton" if hidden.is_cuda else "cpp")
            return product(hidden, self.weight, self.bias, out.dtype, out=out)
        padded = self._padded(hidden)
        out = self.logits_buffer[offset : offset + padded.shape[0]]
        self._multiply(out, padded, self.weight, self.bias)
        return out[: hidden.shape[0]]

    def hidden_grad(self, grad_logits: Tensor, factors: Tensor | None) -> Tensor:
        """Compute grad_logits @ weight; row t times factors[t], float32, before it is rounded."""
        padded = self._padded(grad_logits)
        direct = factors is None and padded.dtype == self.weight.dtype and padded.is_cpu
        if direct and not self._invariant and not self._is_narrow(self.weight.shape[1]):
            return (padded @ self.weight)[: grad_logits.shape[0]]
        # float32: cuBLAS may split the sum over V, and then adds 16-bit results in 16 bits.
        out = padded.new_empty(padded.shape[0], self.weight.shape[1], dtype=compute_dtype(padded))
        self._multiply(out, padded, self.weight.t())
        out = out[: grad_logits.shape[0]]
        return (
            out.to(self.weight.dtype) if factors is None else scale_rows(out, factors, self.weight)
        )

    def weight_grad(self, total: Tensor, grad_logits: Tensor, hidden: Tensor, add: bool) -> None:
        """Compute total [V, H] = grad_logits.T @ hidden, or += with `add`, in total's dtype."""
        mixed_gemm(total, grad_logits.t(), hidden.to(grad_logits.dtype).t(), accumulate=add)

    def _is_narrow(self, columns: int) -> bool:
        """Return whether a product with so few columns has to be padded."""
        return self.deterministic and columns < _DETERMINISTIC_COLUMNS

    def _multiply(self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        """Compute out = a @ b.T + bias; each row of `a` in the same way if deterministic."""
        columns = b.shape[0]
        if not self._is_narrow(columns):
            mixed_gemm(out, a, b, bias)
            return
        padded = b.new_zeros(_DETERMINISTIC_COLUMNS, b.shape[1])
        padded[:columns] = b
        result = out.new_empty(a.shape[0], _DETERMINISTIC_COLUMNS)
        mixed_gemm(result, a, padded)
        out.copy_(result[:, :columns] if bias is None else result[:, :columns] + bias)

    def _padded(self, rows: Tensor) -> Tensor:
        if not self.deterministic or rows.shape[0] == self.rows:
            return rows
        padded = rows.new_zeros(self.rows, rows.shape[1])
        padded[: rows.shape[0]] = rows
        return padded


def is_invariant(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the deterministic mode computes logits by `decode_linear`."""
    has_kernel = has_triton() if hidden.is_cuda else native() is not None and hidden.is_cpu
    fits = hidden.dtype in (torch.float32, torch.bfloat16)
    return fits and has_kernel and hidden.stride(1) == weight.stride(1) == 1


def logits_fit(hidden: Tensor, weight: Tensor, budget_bytes: int) -> bool:
    """Return whether the logits of all rows and as large a gradient fit the budget together."""
    (rows, width), dtype = hidden.shape, compute_dtype(hidden)
    row_bytes = 2 * weight.shape[0] * dtype.itemsize + width * (hidden.dtype.itemsize + 16)
    return rows * row_bytes <= budget_bytes - _reserved_bytes(budget_bytes)


def _reserved_bytes(budget_bytes: int) -> int:
    """Return the part of the budget for blocks of operands that are converted to float32."""
    return min(WIDENED_BYTES, budget_bytes // 8)


def gradients_fit(hidden: Tensor, weight: Tensor, budget_bytes: int, rows: int) -> bool:
    """Return whether the buffer of 16-bit gradients holds `rows` rows (not deterministic)."""
    shared = _CHUNKS_PER_PRODUCT if hidden.is_cuda else 1
    return rows <= shared * _max_rows(hidden, weight, budget_bytes, shared, hidden.itemsize)


def _max_rows(
    hidden: Tensor, weight: Tensor, budget_bytes: int, shared: int, grad_bytes: int
) -> int:
    """Return the rows of a chunk that fit the budget, at least 1: a multiple of 128 from 128 on.

    The buffer of gradients, of grad_bytes an entry, holds `shared` chunks.
    """
    dtype = compute_dtype(hidden)
    # 8: a row of hidden, packed or widened, and its gradient.
    row_bytes = shared * weight.shape[1] * 8
    row_bytes += weight.shape[0] * (dtype.itemsize + shared * grad_bytes)
    reserved = _reserved_bytes(budget_bytes) if dtype != hidden.dtype else 0
    rows = (budget_bytes - reserved) // row_bytes
    return max(1, rows if rows < 128 else rows - rows % 128)


def _equal_rows(rows: int, max_rows: int) -> int:
    """Return the rows of a chunk: equal chunks, of multiples of 128 rows from 128 on."""
    if max_rows < 128 or rows == 0:
        return max_rows
    equal = rows / -(-rows // max_rows)
    return min(max_rows, -int(-equal // 128) * 128)


def _empty_rows(like: Tensor, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Allocate [rows, vocab]."""
    stride = vocab + (-vocab % _GPU_STRIDE if like.is_cuda else 0)
    return empty_from_pool((rows, stride), dtype, like.device).narrow(1, 0, vocab)


def scale_rows(rows: Tensor, factors: Tensor, like: Tensor) -> Tensor:
    """Compute rows [R, H] * factors [R], rounded once to the dtype of `like`, in one kernel."""
    return torch.mul(rows, factors[:, None], out=torch.empty_like(rows, dtype=like.dtype))


def empty_like_from_pool(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of this shape and device, as `empty_from_pool`."""
    return empty_from_pool(tensor.shape, dtype, tensor.device)
