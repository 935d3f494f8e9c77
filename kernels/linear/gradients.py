"""Gradients of hidden states, weight and bias from gradients of logits, a chunk at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._per_token import compute_dtype
from ..gemm import mixed_gemm
from ..logprob.options import RowOptions
from ..logprob.rows import rows_backward
from ..logprob.vocab_parallel import process_group
from .chunks import Chunks, empty_like_from_pool, scale_rows
from .shared_rows import RowTokens


class LogitEntries(NamedTuple):
    """Values that are added to the gradient of single logits of a chunk."""

    rows: Tensor  # int64 [K], of the chunk
    ids: Tensor  # int64 [K], columns; a pair (row, column) may repeat
    values: Tensor  # float32 [K]; 0 adds nothing

    def of_rows(self, rows: Tensor, count: int) -> LogitEntries:
        """Return the entries of the index `rows` of `count` rows, counted in it."""
        place = torch.full((count,), -1)
        place[rows] = torch.arange(rows.numel())
        inside = place[self.rows] >= 0
        return LogitEntries(place[self.rows][inside], self.ids[inside], self.values[inside])


class LinearGradients:
    """The gradients of hidden, weight and bias, accumulated from the logits of one chunk at a time.

    Args:
        wanted: which of the three gradients to compute.
        group: name of the process group over which the gradient of hidden is summed; "": none.
        main_grad: the weight gradient is added to it; None: it is returned.
        inactive: [T] bool, rows whose gradient is zero and whose hidden states may be NaN.
        wide_weight: return the weight gradient in float32.
        factors: return what the added rows have to be multiplied by, float32; None: nothing. It is
            called when they are multiplied, after the last of them is added: the products' other
            operands and results, which are smaller than the logits, take the factors.

    Rows of a chunk are a slice of T or an index tensor. Where the gradients of all rows fit the
    16-bit buffer, one product writes the weight gradient in the weight's own dtype: reading and
    writing float32 sums, and converting them, would take a GPU 2 to 3 ms for 500 million weights.
    """

    def __init__(
        self,
        chunks: Chunks,
        wanted: Sequence[bool],
        group: str = "",
        main_grad: Tensor | None = None,
        inactive: Tensor | None = None,
        wide_weight: bool = False,
        factors: Callable[[slice | Tensor], Tensor] | None = None,
    ) -> None:
        weight, bias = chunks.weight, chunks.bias
        self.chunks, self.group, self.main_grad = chunks, group, main_grad
        self.inactive, self.factors = inactive, factors
        self.wants_hidden = wanted[0]
        self.hidden: Tensor | None = None  # zeros where not all rows come at once
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
        """Add the gradient of the logits of `rows`, in its `buffer`, up to their factors."""
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
        factors = None if self.factors is None else self.factors(rows)
        if self.wants_hidden:
            self._add_hidden(rows, self.chunks.hidden_grad(grad_logits, factors))
        if self.weight is not None:
            hidden = self.chunks.hidden[rows]
            if self.inactive is not None:  # 0 * NaN is not 0
                hidden = hidden.masked_fill(self.inactive[rows].unsqueeze(1), 0)
            if factors is not None:
                hidden = scale_rows(hidden, factors, hidden)
            self.chunks.weight_grad(self.weight, grad_logits, hidden, add=self.weight_has_value)
            self.weight_has_value = True
        if self.bias is not None and factors is None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)
        elif self.bias is not None and factors is not None:
            high = factors.to(grad_logits.dtype)
            pair = torch.stack([high, (factors - high).to(high.dtype)])  # 16 bits of the factors
            sums = self.bias.new_empty(2, grad_logits.shape[1])
            mixed_gemm(sums, pair, grad_logits.t())
            self.bias += sums.sum(0)

    def _add_hidden(self, rows: slice | Tensor, grad: Tensor) -> None:
        hidden = self.chunks.hidden
        if isinstance(rows, slice) and rows == slice(0, hidden.shape[0]) and hidden.is_contiguous():
            self.hidden = grad
            return
        if self.hidden is None:
            self.hidden = torch.zeros_like(hidden)
        self.hidden[rows] = grad

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of hidden (summed over the group), weight and bias.

        They have the dtypes of their tensors (weight: float32 if `wide_weight`) and are empty if
        not wanted or, for the weight, if they are in main_grad.
        """
        self._multiply()
        like = self.chunks.hidden
        hidden, weight, bias = (like.new_empty(0) for _ in range(3))
        if self.wants_hidden:
            grad = torch.zeros_like(like) if self.hidden is None else self.hidden
            hidden = sum_over_ranks(grad, self.group)
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
        token_ids, options, backend: the arguments of the row kernels, for all rows.
        skip_inactive: leave rows with zero gradient out of the products (CPU only: on a GPU their
            number would have to be copied to the host).
        arguments: the arguments of `LinearGradients`.
    """

    def __init__(
        self,
        chunks: Chunks,
        token_ids: Tensor,
        options: RowOptions,
        backend: str,
        wanted: Sequence[bool],
        skip_inactive: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(chunks, wanted, options.group, **arguments)
        self.token_ids, self.options, self.backend = token_ids, options, backend
        self.skip_inactive = skip_inactive and check.readable(chunks.hidden)

    def add_chunk(
        self,
        logits: Tensor,
        rows: slice | Tensor,
        row_results: Sequence[Tensor],
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        entries: LogitEntries | None = None,
        tokens: RowTokens | None = None,
    ) -> None:
        """Add the gradients of a chunk, given its `logits(rows)`.

        row_results: its results of `rows_forward`.
        grad_log_probs, grad_entropy: the incoming gradients of its tokens.
        entries: gradients of single logits, which are added.
        tokens: those of the rows, where rows are shared; None: a token for each row.
        The logits are overwritten unless gradients have a buffer of their own.
        """
        active = None
        if self.skip_inactive:
            touched = None
            if entries is not None:
                touched = torch.zeros(logits.shape[0]).index_add_(
                    0, entries.rows, entries.values.abs()
                )
            active = active_rows(grad_log_probs, grad_entropy, touched, tokens=tokens)
        count, selected, row_index = logits.shape[0], rows, None
        if active is not None:
            count = active.numel()
            if count == 0:
                return
            selected = active + rows.start if isinstance(rows, slice) else rows[active]
            if entries is not None:
                entries = entries.of_rows(active, logits.shape[0])
            if self.chunks.separate:
                row_index = torch.full((logits.shape[0],), -1, dtype=torch.int32)
                row_index[active] = torch.arange(count, dtype=torch.int32)
            else:
                rows, logits, place = selected, _move_to_front(logits, active), active
                if tokens is not None:
                    tokens, place = tokens.take(active)
                row_results = [result[place] for result in row_results]
                grad_log_probs, grad_entropy = (
                    None if grad is None else grad[place] for grad in (grad_log_probs, grad_entropy)
                )
        out = self.buffer(logits, count)
        index, cu_tokens = (rows, None) if tokens is None else tokens
        rows_backward(
            logits,
            out,
            self.token_ids[index],
            self.options.select(index),
            list(row_results),
            grad_log_probs,
            grad_entropy,
            self.backend,
            row_index,
            cu_tokens,
        )
        if entries is not None:
            values = entries.values.to(out.dtype)
            out.index_put_((entries.rows, entries.ids), values, accumulate=True)
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


def active_rows(*grads: Tensor | None, tokens: RowTokens | None = None) -> Tensor | None:
    """Return the indices of rows with nonzero (or NaN) gradient, or None if that is all rows.

    tokens: those of the gradients, where they share rows.
    """
    active = any_nonzero(*grads)
    active = active if tokens is None else tokens.any(active)
    return None if active.all() else active.nonzero().squeeze(1)


def any_nonzero(*grads: Tensor | None) -> Tensor:
    """Return [T] bool, rows with nonzero (or NaN) gradient; at least one gradient is given."""
    first, *others = (grad != 0 for grad in grads if grad is not None)
    for other in others:
        first = first | other
    return first


def _move_to_front(logits: Tensor, rows: Tensor) -> Tensor:
    """Move the rows, in ascending order, to the front of `logits`, in place."""
    for target, source in enumerate(rows.tolist()):
        if target != source:
            logits[target].copy_(logits[source])
    return logits[: rows.numel()]


def sum_over_ranks(tensor: Tensor, group: str) -> Tensor:
    """All-reduce in place over the process group of this name; "": none."""
    if group:
        dist.all_reduce(tensor, group=process_group(group))
    return tensor
