"""The matrix products of an output head, a chunk of rows at a time: logits and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._per_token import compute_dtype
from ..logprob.options import RowOptions
from ..logprob.rows import rows_backward
from ..logprob.vocab_parallel import process_group
from ..memory_pool import empty_from_pool
from .mixed_gemm import WIDENED_BYTES, keeps_16_bits, mixed_gemm

# Rows of a matrix product in the deterministic mode, where every product has the same shape.
_DETERMINISTIC_ROWS = 128
# Rows of a chunk where a group exchanges its row sums: the same number on all ranks, whatever the
# sizes of their vocabulary slices.
_GROUP_ROWS = 512
# How many chunks of 16-bit gradients the buffer of a GPU holds.
_CHUNKS_PER_PRODUCT = 8
# Rows of logits on a GPU: more do not make their product faster, because it already reads the
# weight in a tenth of the time that it computes.
_GPU_ROWS = 2048
# cuBLAS is fast where row strides are multiples of 16 bytes, that is, of 8 16-bit elements.
_GPU_STRIDE = 8


class Chunks:
    """The matrix products of hidden [T, H] and weight [V, H], in reused buffers.

    Logits are float32 for any dtype of the inputs. The gradient of a chunk overwrites its logits,
    or with 16-bit products is written to a buffer of that dtype. On a GPU that buffer holds several
    chunks, all of them if they fit, because each product reads and writes the full weight gradient.

    Args:
        budget_bytes: memory for the buffers and for temporary copies of hidden and weight.
        deterministic: pad every product to the same number of rows.
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
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.deterministic = deterministic
        dtype = compute_dtype(hidden)
        grad_dtype = hidden.dtype if keeps_16_bits(hidden) else dtype
        # Whether gradients have a buffer of their own.
        self.separate = grad_rows > 0 and (grad_dtype != dtype or kept)
        several = self.separate and hidden.is_cuda and not deterministic
        shared = _CHUNKS_PER_PRODUCT if several else 1
        (rows, width), vocab = hidden.shape, weight.shape[0]
        entry_bytes = dtype.itemsize + (shared * grad_dtype.itemsize if self.separate else 0)
        # 8: a row of hidden, packed or widened, and its gradient.
        row_bytes = shared * width * 8 + vocab * entry_bytes
        reserved = _reserved_bytes(budget_bytes) if dtype != hidden.dtype else 0
        max_rows = _max_rows((budget_bytes - reserved) // row_bytes)
        if kept:
            max_rows = self.rows = max(1, rows)
        elif deterministic:
            max_rows = self.rows = _DETERMINISTIC_ROWS
        elif group:
            max_rows = self.rows = max(1, min(rows, _GROUP_ROWS))
        else:
            limit = min(max_rows, _GPU_ROWS) if hidden.is_cuda else max_rows
            self.rows = _equal_rows(rows, limit)
        in_place = grad_rows > 0 and not self.separate
        logits_rows = 0 if kept else max_rows if in_place else self.rows
        if not deterministic:
            logits_rows, max_rows = min(logits_rows, rows), min(max_rows * shared, grad_rows)
        self._logits = _empty_rows(hidden, logits_rows, vocab, dtype)
        self.grad_logits = self._logits
        if self.separate:
            self.grad_logits = _empty_rows(hidden, max_rows, vocab, grad_dtype)
        # Whether one product gives the full weight gradient, in the dtype of its operands.
        self.one_product = several and self.grad_logits.shape[0] == grad_rows

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
        padded = self._padded(hidden)
        out = self._logits[offset : offset + padded.shape[0]]
        mixed_gemm(out, padded, self.weight, self.bias)
        return out[: hidden.shape[0]]

    def hidden_grad(self, grad_logits: Tensor) -> Tensor:
        """Compute grad_logits @ weight."""
        padded = self._padded(grad_logits)
        if padded.dtype == self.weight.dtype and padded.is_cpu:
            return (padded @ self.weight)[: grad_logits.shape[0]]
        # float32: cuBLAS may split the sum over V, and then adds 16-bit results in 16 bits.
        out = padded.new_empty(padded.shape[0], self.weight.shape[1], dtype=compute_dtype(padded))
        mixed_gemm(out, padded, self.weight.t())
        return out[: grad_logits.shape[0]].to(self.weight.dtype)

    def weight_grad(self, total: Tensor, grad_logits: Tensor, hidden: Tensor, add: bool) -> None:
        """Compute total [V, H] = grad_logits.T @ hidden, or += with `add`, in total's dtype."""
        mixed_gemm(total, grad_logits.t(), hidden.to(grad_logits.dtype).t(), accumulate=add)

    def _padded(self, rows: Tensor) -> Tensor:
        if not self.deterministic or rows.shape[0] == self.rows:
            return rows
        padded = rows.new_zeros(self.rows, rows.shape[1])
        padded[: rows.shape[0]] = rows
        return padded


def logits_fit(hidden: Tensor, weight: Tensor, budget_bytes: int) -> bool:
    """Return whether the logits of all rows and as large a gradient fit the budget together."""
    (rows, width), dtype = hidden.shape, compute_dtype(hidden)
    row_bytes = 2 * weight.shape[0] * dtype.itemsize + width * (hidden.dtype.itemsize + 16)
    return rows * row_bytes <= budget_bytes - _reserved_bytes(budget_bytes)


def _reserved_bytes(budget_bytes: int) -> int:
    """Return the part of the budget for blocks of operands that are converted to float32."""
    return min(WIDENED_BYTES, budget_bytes // 8)


def _max_rows(rows: int) -> int:
    """Return at most this many rows, at least 1: a multiple of 128 from 128 on."""
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


class LinearGradients:
    """The gradients of hidden, weight and bias, accumulated from the logits of one chunk at a time.

    Args:
        wanted: which of the three gradients to compute.
        group: name of the process group over which the gradient of hidden is summed; "": none.
        main_grad: the weight gradient is added to it; None: it is returned.
        inactive: [T] bool, rows whose gradient is zero and whose hidden states may be NaN.
        wide_weight: return the weight gradient in float32.

    Rows of a chunk are a slice of T or an index tensor. Where the gradients of all rows fit the
    buffer of a GPU, one product writes the weight gradient in the weight's own dtype: reading and
    writing float32 sums, and converting them, would take 2 to 3 ms for 500 million weights.
    """

    def __init__(
        self,
        chunks: Chunks,
        wanted: Sequence[bool],
        group: str = "",
        main_grad: Tensor | None = None,
        inactive: Tensor | None = None,
        wide_weight: bool = False,
    ) -> None:
        hidden, weight, bias = chunks.hidden, chunks.weight, chunks.bias
        self.chunks, self.group, self.main_grad = chunks, group, main_grad
        self.inactive = inactive
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None  # inactive rows stay 0
        self.bias = None
        if bias is not None and wanted[2]:
            self.bias = torch.zeros_like(bias, dtype=compute_dtype(bias))
        self.weight, self.weight_dtype = None, weight.dtype
        if wide_weight:
            self.weight_dtype = compute_dtype(weight)
        if wanted[1]:
            self.weight = main_grad
            if main_grad is None:
                dtype = self.weight_dtype if chunks.one_product else compute_dtype(weight)
                self.weight = empty_like_from_pool(weight, dtype)
        self.weight_has_value = main_grad is not None  # otherwise the first product is stored
        self._pending: list[tuple[Tensor, slice | Tensor]] = []

    def logits(self, rows: slice | Tensor) -> Tensor:
        """Compute the logits of a chunk, where they do not overwrite pending gradients."""
        if self.chunks.separate:
            return self.chunks.logits(rows)
        count = rows.numel() if isinstance(rows, Tensor) else rows.stop - rows.start
        return self.chunks.logits(rows, self._free_row(count))

    def buffer(self, logits: Tensor, count: int) -> Tensor:
        """Return where to write the gradient of `count` rows of `logits`: over them, if possible.

        `add` it before the next chunk.
        """
        if not self.chunks.separate:
            return logits[:count]
        begin = self._free_row(count)
        return self.chunks.grad_logits[begin : begin + count]

    def add(self, grad_logits: Tensor, rows: slice | Tensor) -> None:
        """Add the gradient of the logits of `rows`, in its `buffer`."""
        self._pending.append((grad_logits, rows))

    def _free_row(self, count: int) -> int:
        """Return the first of `count` free rows of the buffer; multiply what is in it if full."""
        buffer_rows = self.chunks.grad_logits.shape[0]
        count = buffer_rows if self.chunks.deterministic else count
        filled = sum(grad.shape[0] for grad, _ in self._pending)
        if filled + count > buffer_rows:
            self._multiply()
            return 0
        return filled

    def _multiply(self) -> None:
        """Multiply the pending gradients of logits."""
        if not self._pending:
            return
        grad_logits = self._pending[0][0]
        if len(self._pending) > 1:
            count = sum(part.shape[0] for part, _ in self._pending)
            grad_logits = self.chunks.grad_logits[:count]
        rows = _joined([rows for _, rows in self._pending], grad_logits.device)
        self._pending = []
        if self.hidden is not None:
            self.hidden[rows] = self.chunks.hidden_grad(grad_logits)
        if self.weight is not None:
            hidden = self.chunks.hidden[rows]
            if self.inactive is not None:  # 0 * NaN is not 0
                hidden = hidden.masked_fill(self.inactive[rows].unsqueeze(1), 0)
            self.chunks.weight_grad(self.weight, grad_logits, hidden, add=self.weight_has_value)
            self.weight_has_value = True
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of hidden (summed over the group), weight and bias.

        They have the dtypes of their tensors (weight: float32 if `wide_weight`) and are empty if
        not wanted or, for the weight, if they are in main_grad.
        """
        self._multiply()
        like = self.chunks.hidden
        hidden, weight, bias = (like.new_empty(0) for _ in range(3))
        if self.hidden is not None:
            hidden = sum_over_ranks(self.hidden, self.group)
        if self.weight is not None and self.main_grad is None:
            weight = self.weight if self.weight_has_value else self.weight.zero_()
            if weight.dtype != self.weight_dtype:
                weight = empty_like_from_pool(weight, self.weight_dtype).copy_(weight)
        if self.bias is not None:
            bias = self.bias.to(like.dtype)
        return hidden, weight, bias


class LogProbGradients(LinearGradients):
    """`LinearGradients` from the gradients of log-probs and entropy.

    Args:
        token_ids, options, backend: of the row kernels, for all rows.
        skip_inactive: leave rows with zero gradient out of the products (CPU only: on a GPU their
            number would have to be copied to the host).
        arguments: of `LinearGradients`.
    """

    def __init__(
        self,
        chunks: Chunks,
        token_ids: Tensor,
        options: RowOptions,
        backend: str | None,
        wanted: Sequence[bool],
        skip_inactive: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(chunks, wanted, options.group, **arguments)
        self.token_ids, self.options, self.backend = token_ids, options, backend
        self.skip_inactive = skip_inactive and chunks.hidden.is_cpu

    def add_chunk(
        self,
        logits: Tensor,
        rows: slice | Tensor,
        row_results: Sequence[Tensor],
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        """Add the gradients of a chunk, given its `logits(rows)`.

        row_results: its first four results of `rows_forward`. grad_log_probs, grad_entropy: the
        incoming gradients of its rows. The logits are overwritten unless gradients have a buffer of
        their own.
        """
        active = active_rows(grad_log_probs, grad_entropy) if self.skip_inactive else None
        count, selected, row_index = logits.shape[0], rows, None
        if active is not None:
            count = active.numel()
            if count == 0:
                return
            selected = active + rows.start if isinstance(rows, slice) else rows[active]
            if self.chunks.separate:
                row_index = torch.full((logits.shape[0],), -1, dtype=torch.int32)
                row_index[active] = torch.arange(count, dtype=torch.int32)
            else:
                rows, logits = selected, _move_to_front(logits, active)
                row_results = [result[active] for result in row_results]
                grad_log_probs, grad_entropy = (
                    None if grad is None else grad[active]
                    for grad in (grad_log_probs, grad_entropy)
                )
        out = self.buffer(logits, count)
        rows_backward(
            logits, out, self.token_ids[rows], self.options.select(rows), list(row_results),
            grad_log_probs, grad_entropy, self.backend, row_index,
        )  # fmt: skip
        self.add(out, selected)


def _joined(parts: Sequence[slice | Tensor], device: torch.device) -> slice | Tensor:
    """Join slices that follow each other to one, other parts to an index tensor."""
    slices = [part for part in parts if isinstance(part, slice)]
    follows = all(a.stop == b.start for a, b in itertools.pairwise(slices))
    if len(slices) == len(parts) and follows:
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat(
        [torch.arange(p.start, p.stop, device=device) if isinstance(p, slice) else p for p in parts]
    )


def active_rows(grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> Tensor | None:
    """Return the indices of rows with nonzero (or NaN) gradient, or None if that is all rows."""
    given = [grad for grad in (grad_log_probs, grad_entropy) if grad is not None]
    active = torch.stack([grad != 0 for grad in given]).any(0)
    return None if active.all() else active.nonzero().squeeze(1)


def _move_to_front(logits: Tensor, rows: Tensor) -> Tensor:
    """Move the rows, in ascending order, to the front of `logits`, in place."""
    for target, source in enumerate(rows.tolist()):
        if target != source:
            logits[target].copy_(logits[source])
    return logits[: rows.numel()]


def empty_like_from_pool(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of this shape and device, as `empty_from_pool`."""
    return empty_from_pool(tensor.shape, dtype, tensor.device)


def sum_over_ranks(tensor: Tensor, group: str) -> Tensor:
    """All-reduce in place over the process group of this name; "": none."""
    if group:
        dist.all_reduce(tensor, group=process_group(group))
    return tensor
