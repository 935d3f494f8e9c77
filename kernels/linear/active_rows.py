"""The gradient products of linear_policy_loss over live rows whose number only the device knows.

A chunk's rows with a gradient are written to the next free rows of the buffer, in their order; once
the next chunk may not fit, and after the last one, the buffer is multiplied. Every kernel reads
the number of rows from device memory and is launched for any number of them: nothing waits for the
GPU, and a CUDA graph can hold all of it. `state`, int32: rows in the buffer, rows to multiply now
(0: not yet), whether the weight gradient holds anything.

Sums run in one fixed order: those over tokens row after row, those over the vocabulary in
`SPLITS` equal parts. A row's hidden gradient does not depend on where in the buffer it stands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..logprob.op import RowOptions, rows_backward
from .logprob import Chunks, LinearGrads

# Parts of the vocabulary: the hidden gradient alone has too few tiles to fill a GPU.
SPLITS = 4
# By size of an element. Float32 products are exact ones, without tensor cores.
TILES = {
    2: {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 8, "num_stages": 3},
}
_BLOCK = 1024
_BIAS_BLOCK = 128


@triton.jit
def place_kernel(
    by_log_prob, by_entropy, state, places, origins, first_row, rows, next_rows, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. places [rows]: a row's place in the buffer, -1 for a dead one; origins
    [capacity]: the row in T of every place."""
    filled = tl.load(state)
    lanes = tl.arange(0, BLOCK)
    for begin in range(0, rows, BLOCK):
        inside = begin + lanes < rows
        g = tl.load(by_log_prob + begin + lanes, mask=inside, other=0.0)
        h = tl.load(by_entropy + begin + lanes, mask=inside, other=0.0)
        alive = (g != 0) | (h != 0)
        place = filled + tl.cumsum(alive.to(tl.int32), 0) - 1
        tl.store(places + begin + lanes, tl.where(alive, place, -1), mask=inside)
        tl.store(origins + place, first_row + begin + lanes, mask=alive)
        filled += tl.sum(alive.to(tl.int32), 0)
    full = (next_rows == 0) | (filled + next_rows > capacity)
    multiplied_before = tl.load(state + 1) > 0
    tl.store(state + 2, tl.load(state + 2) | multiplied_before.to(tl.int32))
    tl.store(state + 1, tl.where(full, filled, 0))
    tl.store(state, tl.where(full, 0, filled))


@triton.jit
def gather_kernel(
    hidden, origins, state, live_hidden, grad_logits, hidden_stride, grad_stride, width, vocab,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """live_hidden [capacity, width]: the rows of hidden. The block of rows that the last one lies
    in is filled up with zeros, here and in grad_logits, for the sum over rows goes by blocks."""
    place = tl.program_id(0)
    count = tl.load(state + 1)
    columns = tl.arange(0, BLOCK)
    if place < count:
        hidden += tl.load(origins + place).to(tl.int64) * hidden_stride
        for begin in range(0, width, BLOCK):
            inside = begin + columns < width
            row = tl.load(hidden + begin + columns, mask=inside)
            tl.store(live_hidden + place.to(tl.int64) * width + begin + columns, row, mask=inside)
    elif place < tl.cdiv(count, BLOCK_K) * BLOCK_K:
        zeros = tl.zeros((BLOCK,), live_hidden.dtype.element_ty)
        for begin in range(0, width, BLOCK):
            inside = begin + columns < width
            tl.store(live_hidden + place.to(tl.int64) * width + begin + columns, zeros, mask=inside)
        for begin in range(0, vocab, BLOCK):
            inside = begin + columns < vocab
            tl.store(
                grad_logits + place.to(tl.int64) * grad_stride + begin + columns, zeros, mask=inside
            )


@triton.jit
def hidden_kernel(
    grad_logits, weight, partial, state, capacity, vocab, width, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial [SPLITS, capacity, width] = grad_logits [count, vocab] @ weight [vocab, width], a
    part of the vocabulary each."""
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
        where = (split.to(tl.int64) * capacity + rows) * width + columns
        tl.store(partial + where, sums, mask=(rows < count) & (columns < width))


@triton.jit
def scatter_kernel(
    partial, origins, state, hidden_grad, capacity, width, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden_grad [T, width]: the sum of the parts, where the row came from."""
    place = tl.program_id(0)
    if place < tl.load(state + 1):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        sums = tl.zeros((BLOCK,), tl.float32)
        for split in range(SPLITS):
            begin = (split * capacity + place).to(tl.int64) * width
            sums += tl.load(partial + begin + columns, mask=inside, other=0.0)
        out = hidden_grad + tl.load(origins + place).to(tl.int64) * width
        tl.store(out + columns, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_tile(total, row, column, sums, not_first):
    if not_first:
        sums += total.load([row, column])
    total.store([row, column], sums)


@triton.jit
def weight_kernel(
    grad_logits, live_hidden, total, state, vocab, width, LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total [vocab, width] float32 += grad_logits [count, vocab].T @ live_hidden [count, width];
    the first product is stored, the last one stored even if it has no rows."""
    count = tl.load(state + 1)
    not_first = tl.load(state + 2) != 0
    across = tl.cdiv(width, BLOCK_N)
    tiles = tl.cdiv(vocab, BLOCK_M) * across
    tiles = tl.where((count > 0) | (LAST & (not_first == 0)), tiles, 0)
    # Neighbouring programs share rows of the vocabulary; all of live_hidden stays in the cache.
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // across * BLOCK_M
        column = tile % across * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, count, BLOCK_K):
            a = grad_logits.load([k, row])
            b = live_hidden.load([k, column])
            sums = tl.dot(a.T, b, sums, input_precision="ieee")
        # By halves, which leave registers for what is added to.
        halves = tl.permute(tl.reshape(sums, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _add_tile(total, row, column, left, not_first)
        _add_tile(total, row, column + BLOCK_N // 2, right, not_first)


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
            place = begin + tl.arange(0, BLOCK_K)[:, None]
            inside = (place < count) & (columns < vocab)[None, :]
            where = place.to(tl.int64) * grad_stride + columns[None, :]
            sums += tl.sum(tl.load(grad_logits + where, mask=inside, other=0.0).to(tl.float32), 0)
        before = tl.load(total + columns, mask=columns < vocab, other=0.0)
        tl.store(total + columns, before + sums, mask=columns < vocab)


def fits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take these. Tiles are copied by Hopper's copy engine, in units of 16
    bytes; on older GPUs Triton does not overlap the copies with arithmetic, which costs more than
    dead rows do."""
    return (
        not (hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < (9, 0))
        and hidden.numel() * weight.numel() > 0
        and weight.shape[1] * weight.dtype.itemsize % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and hidden.stride(1) == 1
    )


class LiveRowGrads(LinearGrads):
    """The gradients of a linear layer from the live rows of the gradient of its results."""

    def __init__(self, chunks: Chunks, wanted):
        super().__init__(chunks, wanted)
        self.has_weight = True  # `finished` need not clear it: the last product writes it
        hidden = chunks.hidden
        self.capacity = chunks.gradient.shape[0]
        integers = {"dtype": torch.int32, "device": hidden.device}
        self.state = torch.zeros(3, **integers)
        self.origins = torch.empty(self.capacity, **integers)
        self.live_hidden = hidden.new_empty(self.capacity, hidden.shape[1])
        self.partial = None
        if self.hidden is not None:
            self.partial = torch.empty(
                SPLITS, *self.live_hidden.shape, dtype=torch.float32, device=hidden.device
            )
        self.tiles = TILES[hidden.dtype.itemsize]
        self.programs = 3  # in the interpreter
        if hidden.is_cuda:
            self.programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count

    def take(
        self, logits: Tensor, rows: slice, token_ids: Tensor, options: RowOptions, found, slopes,
        backend: str,
    ) -> None:  # fmt: skip
        """The chunk `rows`: logits [rows, V]; found: its rows_forward; slopes: its gradients of
        log-prob and entropy, [rows] float32."""
        places = torch.empty_like(token_ids[rows], dtype=torch.int32)
        total = self.chunks.hidden.shape[0]
        place_kernel[(1,)](
            *slopes, self.state, places, self.origins, rows.start, rows.stop - rows.start,
            min(self.chunks.size, total - rows.stop), self.capacity, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        rows_backward(
            logits, self.chunks.gradient, token_ids[rows], options.rows(rows), list(found), *slopes,
            backend, places,
        )  # fmt: skip
        self._multiply_if_full(last=rows.stop == total)

    def _multiply_if_full(self, last: bool) -> None:
        hidden, weight, gradient = self.chunks.hidden, self.chunks.weight, self.chunks.gradient
        vocab, width = weight.shape
        block_m, block_n, block_k = (self.tiles[f"BLOCK_{axis}"] for axis in "MNK")
        gather_kernel[(self.capacity,)](
            hidden, self.origins, self.state, self.live_hidden, gradient, hidden.stride(0),
            gradient.stride(0), width, vocab, BLOCK=_BLOCK, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
        if self.partial is not None:
            hidden_kernel[(self.programs,)](
                _tiled(gradient, vocab, block_m, block_k), _tiled(weight, width, block_k, block_n),
                self.partial, self.state, self.capacity, vocab, width, SPLITS=SPLITS, **self.tiles,
            )  # fmt: skip
            scatter_kernel[(self.capacity, triton.cdiv(width, _BLOCK))](
                self.partial, self.origins, self.state, self.hidden, self.capacity, width,
                SPLITS=SPLITS, BLOCK=_BLOCK, num_warps=4,
            )  # fmt: skip
        if self.weight is not None:
            weight_kernel[(self.programs,)](
                _tiled(gradient, vocab, block_k, block_m),
                _tiled(self.live_hidden, width, block_k, block_n),
                _tiled(self.weight, width, block_m, block_n // 2), self.state, vocab, width,
                LAST=last, **self.tiles,
            )  # fmt: skip
        if self.bias is not None:
            bias_kernel[(triton.cdiv(vocab, _BIAS_BLOCK),)](
                gradient, self.bias, self.state, gradient.stride(0), vocab, BLOCK=_BIAS_BLOCK,
                BLOCK_K=block_k, num_warps=4,
            )  # fmt: skip


def _tiled(matrix: Tensor, columns: int, *block: int) -> TensorDescriptor:
    """What lies beyond the matrix reads as 0."""
    shape = [matrix.shape[0], columns]
    return TensorDescriptor(matrix, shape, list(matrix.stride()), list(block))
