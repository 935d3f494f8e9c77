"""The matrix products of sparse_linear_token_log_probs, by backend, over K kept entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._backend import choose_backend, native, register_backends
from .._per_token import compute_dtype, row_index, segment_reduce, unit_inner_stride
from ..linear.chunks import empty_like_from_pool

OP = "sparse_linear_token_log_probs"
register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))


def _scaled(rows: Tensor, grad: Tensor, inside: Tensor) -> Tensor:
    """Return grad[k] * rows[k], [K, H]; 0 where not `inside`, and for a gradient of 0."""
    used = inside & (grad != 0)
    return (grad[:, None] * rows.to(grad.dtype)).where(used[:, None], 0.0)


class Products(NamedTuple):
    """A problem of T rows and K kept entries, and its products."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]; of a group: this rank's slice
    ids: Tensor  # int32 [K]
    ends: Tensor  # int32 [T + 1]
    row_index: Tensor  # int64 [K]
    vocab_range: Tensor | None  # see RowOptions
    backend: str

    @staticmethod
    def choose(
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        ends: Tensor,
        vocab_range: Tensor | None,
        backend: str | None,
    ) -> Products:
        """Return the problem with the backend that runs it; float64 needs the reference."""
        chosen = choose_backend(OP, hidden.device, backend, hidden.dtype)
        hidden, weight = unit_inner_stride(hidden), unit_inner_stride(weight)
        if chosen == "triton":
            from . import triton_rows

            rows = triton_rows.row_index(ends, ids.shape[0])
        else:
            rows = row_index(ends, ids.shape[0])
        return Products(hidden, weight, ids, ends, rows, vocab_range, chosen)

    def logits(self, bias: Tensor | None) -> Tensor:
        """Compute hidden . weight + bias per entry, [K]; 0 for the entries of other ranks."""
        tensors = self.hidden, self.weight, self.ids
        if self.backend == "cpp":
            logits = native().sparse_logits(*tensors, self.ends, self._first_id())
        elif self.backend == "triton":
            from . import triton

            logits = triton.logits(*tensors, self.row_index, self.vocab_range)
        else:
            local, inside = self._local_rows()
            dtype = compute_dtype(self.hidden)
            products = self.hidden[self.row_index].to(dtype) * self.weight[local].to(dtype)
            logits = products.sum(-1).where(inside, 0.0)
        if bias is not None:
            local, inside = self._local_rows()
            logits = logits + bias.to(compute_dtype(bias))[local].where(inside, 0.0)
        return logits

    def hidden_grad(self, grad: Tensor) -> Tensor:
        """Compute the gradient of hidden, [T, H], from that of the logits, [K]."""
        tensors = self.hidden, self.weight, self.ids
        if self.backend == "cpp":
            return native().sparse_hidden_grad(*tensors, self.ends, self._first_id(), grad)
        if self.backend == "triton":
            from . import triton

            return triton.hidden_grad(*tensors, self.ends, self.vocab_range, grad)
        local, inside = self._local_rows()
        scaled = _scaled(self.weight[local], grad, inside)
        total = scaled.new_zeros(self.hidden.shape).index_add_(0, self.row_index, scaled)
        return total.to(self.hidden.dtype)

    def weight_grad(self, grad: Tensor, main_grad: Tensor | None) -> Tensor:
        """Compute the gradient of weight, [V, H]; with main_grad, add it there: empty."""
        tensors, add = (self.hidden, self.weight, self.ids), main_grad is not None
        out = main_grad
        if self.backend == "reference":
            local, inside = self._local_rows()
            scaled = _scaled(self.hidden[self.row_index], grad, inside)
            total = scaled.new_zeros(self.weight.shape).index_add_(0, local, scaled)
            out = total.to(self.weight.dtype) if main_grad is None else main_grad.add_(total)
        else:
            if out is None:
                out = empty_like_from_pool(self.weight, self.weight.dtype)
            if self.backend == "cpp":
                native().sparse_weight_grad(*tensors, self.ends, self._first_id(), grad, out, add)
            else:
                from . import triton

                triton.weight_grad(self.hidden, self.row_index, *self.by_id(), grad, out, add)
        return self.weight.new_empty(0) if add else out

    def bias_grad(self, grad: Tensor) -> Tensor:
        """Compute the gradient of bias, [V]."""
        order, begin = self.by_id()
        return segment_reduce(grad[order], begin, "sum")

    def _first_id(self) -> int:
        return 0 if self.vocab_range is None else int(self.vocab_range[0])

    def _local_ids(self) -> Tensor:
        """Return the ids counted from the start of this rank's slice, int64 [K]."""
        ids = self.ids.long()
        return ids if self.vocab_range is None else ids - self.vocab_range[0]

    def _local_rows(self) -> tuple[Tensor, Tensor]:
        """Return the row of `weight` of every entry, and whether this rank's slice has it, [K]."""
        local = self._local_ids()
        inside = (local >= 0) & (local < self.weight.shape[0])
        return local.where(inside, 0), inside

    def by_id(self) -> tuple[Tensor, Tensor]:
        """Return the entries sorted by id, stably, and where each local id begins, [V + 1]."""
        ids, order = self._local_ids().sort(stable=True)
        every_id = torch.arange(self.weight.shape[0] + 1, device=ids.device)
        return order, torch.searchsorted(ids, every_id)
