"""The gradient products of linear_policy_loss over active rows: rows with nonzero gradient.

Only the device knows the number of active rows. The gradients of a chunk's active rows are appended
to a buffer in their order; when the next chunk may not fit, and after the last chunk, the buffer is
multiplied. Every kernel reads the number of rows from device memory and is launched for any number
of them, so the host never waits for the GPU and a CUDA graph can capture all of it. `state` is
int32 [3]: rows in the buffer, rows to multiply now (0: not yet), whether the weight gradient has a
value.

Sums have one fixed order: those over tokens row by row, those over the vocabulary in `SPLITS` equal
parts. The hidden gradient of a row does not depend on its position in the buffer.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..logprob.options import RowOptions
from ..logprob.rows import rows_backward
from .chunks import Chunks, LinearGradients

# Parts of the vocabulary: the hidden gradient alone has too few tiles to fill a GPU.
SPLITS = 4
# By element size. Float32 products are exact, without tensor cores.
TILES = {
    2: {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 8, "num_stages": 3},
}
_BLOCK = 1024
_BIAS_BLOCK = 128


@triton.jit
def index_kernel(
    grad_log_probs, grad_entropy, state, row_index, src_index, first_row, rows, next_rows, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Assign buffer rows to the active rows of a chunk, and decide whether to multiply now.

    One program. row_index [rows]: the row in the buffer, -1 for an inactive row. src_index
    [capacity]: for every row of the buffer, its row in T.
    """
    filled = tl.load(state)
    lanes = tl.arange(0, BLOCK)
    for begin in range(0, rows, BLOCK):
        inside = begin + lanes < rows
        g = tl.load(grad_log_probs + begin + lanes, mask=inside, other=0.0)
        h = tl.load(grad_entropy + begin + lanes, mask=inside, other=0.0)
        active = (g != 0) | (h != 0)
        row = filled + tl.cumsum(active.to(tl.int32), 0) - 1
        tl.store(row_index + begin + lanes, tl.where(active, row, -1), mask=inside)
        tl.store(src_index + row, first_row + begin + lanes, mask=active)
        filled += tl.sum(active.to(tl.int32), 0)
    full = (next_rows == 0) | (filled + next_rows > capacity)
    multiplied_before = tl.load(state + 1) > 0
    tl.store(state + 2, tl.load(state + 2) | multiplied_before.to(tl.int32))
    tl.store(state + 1, tl.where(full, filled, 0))
    tl.store(state, tl.where(full, 0, filled))


@triton.jit
def gather_kernel(
    hidden, src_index, state, active_hidden, grad_logits, hidden_stride, grad_stride, width, vocab,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gather the active rows of hidden into active_hidden [capacity, width].

    The last block of rows is padded with zeros, here and in grad_logits, because the sum over rows
    is computed in blocks.
    """
    row = tl.program_id(0)
    count = tl.load(state + 1)
    columns = tl.arange(0, BLOCK)
    if row < count:
        hidden += tl.load(src_index + row).to(tl.int64) * hidden_stride
        for begin in range(0, width, BLOCK):
            inside = begin + columns < width
            values = tl.load(hidden + begin + columns, mask=inside)
            out = active_hidden + row.to(tl.int64) * width + begin
            tl.store(out + columns, values, mask=inside)
    elif row < tl.cdiv(count, BLOCK_K) * BLOCK_K:
        zeros = tl.zeros((BLOCK,), active_hidden.dtype.element_ty)
        for begin in range(0, width, BLOCK):
            inside = begin + columns < width
            out = active_hidden + row.to(tl.int64) * width + begin
            tl.store(out + columns, zeros, mask=inside)
        for begin in range(0, vocab, BLOCK):
            inside = begin + columns < vocab
            out = grad_logits + row.to(tl.int64) * grad_stride + begin
            tl.store(out + columns, zeros, mask=inside)


@triton.jit
def hidden_kernel(
    grad_logits, weight, partial, state, capacity, vocab, width, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial [SPLITS, capacity, width] = grad_logits [count, vocab] @ weight [vocab, width], with
    the vocabulary in SPLITS parts."""
    count = tl.load(state + 1)
    across = tl.cdiv(width, BLOCK_N)
    tiles = tl.cdiv(count, BLOCK_M) * across
    part = tl.cdiv(tl.cdiv(vocab, BLOCK_K), SPLITS) * BLOCK_K
    for tile in range(tl.program_id(0), tiles * SPLITS, tl.num_programs(0)):
        split = tile // tiles
        row = tile % tiles // across * BLOCK_M
        column = tile % across * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(split * part, tl.minimum((split + 1) * part, vocab), BLOCK_K):
            a = grad_logits.load([row, k])
            b = weight.load([k, column])
            sums = tl.dot(a, b, sums, input_precision="ieee")
        rows = row + tl.arange(0, BLOCK_M)[:, None]
        columns = column + tl.arange(0, BLOCK_N)[None, :]
        offsets = (split.to(tl.int64) * capacity + rows) * width + columns
        tl.store(partial + offsets, sums, mask=(rows < count) & (columns < width))


@triton.jit
def scatter_kernel(
    partial, src_index, state, hidden_grad, capacity, width, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scatter the sums of the parts to the rows of hidden_grad [T, width]."""
    row = tl.program_id(0)
    if row < tl.load(state + 1):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        sums = tl.zeros((BLOCK,), tl.float32)
        for split in range(SPLITS):
            begin = (split * capacity + row).to(tl.int64) * width
            sums += tl.load(partial + begin + columns, mask=inside, other=0.0)
        out = hidden_grad + tl.load(src_index + row).to(tl.int64) * width
        tl.store(out + columns, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_tile(total, row, column, sums, has_value):
    if has_value:
        sums += total.load([row, column])
    total.store([row, column], sums)


@triton.jit
def weight_kernel(
    grad_logits, active_hidden, total, state, vocab, width, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total [vocab, width] float32 += grad_logits [count, vocab].T @ active_hidden [count, width].

    The first product is stored instead of added. If there was none, the last call stores zeros.
    """
    count = tl.load(state + 1)
    has_value = tl.load(state + 2) != 0
    across = tl.cdiv(width, BLOCK_N)
    tiles = tl.cdiv(vocab, BLOCK_M) * across
    tiles = tl.where((count > 0) | (LAST & (has_value == 0)), tiles, 0)
    # Neighbouring programs share rows of the vocabulary; active_hidden stays in the cache.
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // across * BLOCK_M
        column = tile % across * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, count, BLOCK_K):
            a = grad_logits.load([k, row])
            b = active_hidden.load([k, column])
            sums = tl.dot(a.T, b, sums, input_precision="ieee")
        # Two halves, so that the registers also hold the previous total.
        halves = tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _add_tile(total, row, column, left, has_value)
        _add_tile(total, row, column + BLOCK_N // 2, right, has_value)


@triton.jit
def bias_kernel(
    grad_logits, total, state, grad_stride, vocab, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """total [vocab] float32 += grad_logits [count, vocab].sum(0)"""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(state + 1)
    if count > 0:
        sums = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, count, BLOCK_K):
            row = begin + tl.arange(0, BLOCK_K)[:, None]
            inside = (row < count) & (columns < vocab)[None, :]
            offsets = row.to(tl.int64) * grad_stride + columns[None, :]
            sums += tl.sum(tl.load(grad_logits + offsets, mask=inside, other=0.0).to(tl.float32), 0)
        before = tl.load(total + columns, mask=columns < vocab, other=0.0)
        tl.store(total + columns, before + sums, mask=columns < vocab)


def supports(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels support these tensors.

    Tiles are copied by Hopper's TMA in units of 16 bytes. On older GPUs Triton does not overlap the
    copies with arithmetic, which costs more than the products over inactive rows.
    """
    return (
        not (hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < (9, 0))
        and hidden.numel() * weight.numel() > 0
        and weight.shape[1] * weight.dtype.itemsize % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and hidden.stride(1) == 1
    )


class ActiveRowGradients(LinearGradients):
    """LinearGradients over active rows only, on a GPU."""

    def __init__(
        self,
        chunks: Chunks,
        token_ids: Tensor,
        options: RowOptions,
        backend: str | None,
        wanted: Sequence[bool],
    ) -> None:
        super().__init__(chunks, token_ids, options, backend, wanted)
        self.weight_has_value = True  # the last product writes it
        hidden = chunks.hidden
        self.capacity = chunks.grad_logits.shape[0]
        self.state = torch.zeros(3, dtype=torch.int32, device=hidden.device)
        self.src_index = torch.empty(self.capacity, dtype=torch.int32, device=hidden.device)
        self.active_hidden = hidden.new_empty(self.capacity, hidden.shape[1])
        self.partial = None
        if self.hidden is not None:
            self.partial = torch.empty(
                SPLITS, *self.active_hidden.shape, dtype=torch.float32, device=hidden.device
            )
        self.tiles = TILES[hidden.dtype.itemsize]
        self.programs = 3  # in the interpreter
        if hidden.is_cuda:
            self.programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count

    def add_chunk(
        self,
        logits: Tensor,
        rows: slice | Tensor,
        row_results: Sequence[Tensor],
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        assert isinstance(rows, slice)  # the host knows of no other rows
        row_index = torch.empty_like(self.token_ids[rows], dtype=torch.int32)
        total = self.chunks.hidden.shape[0]
        index_kernel[(1,)](
            grad_log_probs, grad_entropy, self.state, row_index, self.src_index, rows.start,
            rows.stop - rows.start, min(self.chunks.rows, total - rows.stop), self.capacity,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        rows_backward(
            logits, self.chunks.grad_logits, self.token_ids[rows], self.options.select(rows),
            list(row_results), grad_log_probs, grad_entropy, self.backend, row_index,
        )  # fmt: skip
        self._multiply_if_full(last=rows.stop == total)

    def _multiply_if_full(self, last: bool) -> None:
        hidden, weight, gradient = self.chunks.hidden, self.chunks.weight, self.chunks.grad_logits
        vocab, width = weight.shape
        block_m, block_n, block_k = (self.tiles[f"BLOCK_{axis}"] for axis in "MNK")
        gather_kernel[(self.capacity,)](
            hidden, self.src_index, self.state, self.active_hidden, gradient, hidden.stride(0),
            gradient.stride(0), width, vocab, BLOCK=_BLOCK, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
        if self.partial is not None:
            hidden_kernel[(self.programs,)](
                _tiled(gradient, vocab, block_m, block_k), _tiled(weight, width, block_k, block_n),
                self.partial, self.state, self.capacity, vocab, width, SPLITS=SPLITS, **self.tiles,
            )  # fmt: skip
            scatter_kernel[(self.capacity, triton.cdiv(width, _BLOCK))](
                self.partial, self.src_index, self.state, self.hidden, self.capacity, width,
                SPLITS=SPLITS, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
        if self.weight is not None:
            weight_kernel[(self.programs,)](
                _tiled(gradient, vocab, block_k, block_m),
                _tiled(self.active_hidden, width, block_k, block_n),
                _tiled(self.weight, width, block_m, block_n // 2), self.state, vocab, width,
                LAST=last, **self.tiles,
            )  # fmt: skip
        if self.bias is not None:
            bias_kernel[(triton.cdiv(vocab, _BIAS_BLOCK),)](
                gradient, self.bias, self.state, gradient.stride(0), vocab, BLOCK=_BIAS_BLOCK,
                BLOCK_K=block_k, num_warps=4,
            )  # fmt: skip


def _tiled(matrix: Tensor, columns: int, *block: int) -> TensorDescriptor:
    """Describe tiles of a matrix; elements outside the matrix are read as 0."""
    shape = [matrix.shape[0], columns]
    return TensorDescriptor(matrix, shape, list(matrix.stride()), list(block))
