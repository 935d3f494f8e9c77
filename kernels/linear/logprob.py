"""linear_token_log_probs: log-probs and entropy from hidden states; [T, V] never exists.

logits = hidden @ weight.T + bias is formed for a chunk of rows at a time, as many as fit the budget
in bytes, reduced by the row kernel of token_log_probs, and thrown away. Logits are float32, also
where hidden and weight are 16-bit: they are never rounded. Backward forms each chunk again, turns
it into its gradient, and multiplies twice: 2 T H V operations forward and 6 T H V backward (2 of
them the recomputation). docs/linear_policy_loss.md derives the counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import native, register_backends
from ..logprob.op import rows_backward, rows_forward
from ..logprob.row_options import RowOptions, in_shape, row_options
from .arguments import (
    LINEAR_SCHEMA,
    budget,
    check_linear,
    split_row_options,
    wide_dtype,
)
from .mixed_gemm import WIDENED_BYTES, keeps_16_bits, mixed_product

register_backends(
    "linear_token_log_probs", cpu=("cpp", "reference"), cuda=("cuda", "triton", "reference")
)

# Rows of a matrix product in the deterministic mode: the product then always has the same shape.
_DETERMINISTIC_ROWS = 128
# Rows of a chunk where a group exchanges its row sums: the same number on all ranks, whatever the
# sizes of their vocabulary slices.
_GROUP_ROWS = 512
# How many chunks of 16-bit gradients a GPU gathers for one product.
_CHUNKS_PER_PRODUCT = 4
# Rows that tiles are copied from begin at multiples of 16 bytes.
_PITCH = 8


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    keep_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    budget_bytes: int | None = None,
    deterministic: bool = False,
    main_grad: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `token_ids` and entropy, from hidden states.

    Args:
        hidden: [..., H]; weight: [V, H] of the same dtype; token_ids: [...] int32 or int64.
        temperature, logit_scale, softcap, ignore_index, keep_mask: as in `token_log_probs`.
        bias: [V] or None.
        group: every rank holds a slice of the vocabulary, weight [V_r, H], in rank order and of
            any size, and the same hidden; the gradient of hidden is summed over the ranks.
        budget_bytes: memory for logits and their temporaries, beside inputs, outputs and
            gradients; None: 256 MiB on a CPU, 1 GiB on a GPU. With a group: that of 512 rows.
        deterministic: matrix products of one fixed shape, so that a row's log-prob, entropy and
            hidden gradient do not depend on which rows surround it or on the budget; the weight
            gradient is the same in every run.
        main_grad: [V, H] float32, contiguous; the weight gradient is added into it and weight.grad
            stays None.
        backend: of the row kernel; None takes the best one.

    Returns:
        log_probs [...] and entropy [...], float32, differentiable in hidden, weight and bias (once,
        in reverse mode). Logits
        and the sums of the weight gradient are float32; for its two products the logits' gradient
        is rounded to the inputs' dtype where the machine has fast products of it. What needs no
        gradient costs nothing.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit. The others as in `token_log_probs`.

    Example:
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(4, 8)
        >>> log_probs, _ = linear_token_log_probs(hidden, weight, torch.tensor([0, 3]))
        >>> [round(value, 4) for value in log_probs.tolist()]
        [-1.3863, -1.3863]
    """
    op = "linear_token_log_probs"
    token_ids = check_linear(op, hidden, weight, token_ids, bias, main_grad)
    options = row_options(
        op, token_ids, weight.shape[0], temperature, logit_scale, softcap, ignore_index, keep_mask,
        group,
    )  # fmt: skip
    log_probs, entropy, *_ = torch.ops.hybridengine.linear_token_log_probs(
        hidden if hidden.dim() == 2 else hidden.flatten(0, -2), weight, bias, token_ids.flatten(),
        *options, budget(op, hidden, budget_bytes), deterministic, main_grad, backend,
    )  # fmt: skip
    return in_shape(log_probs, token_ids.shape), in_shape(entropy, token_ids.shape)


class Chunks:
    """The chunked matrix products of a [T, H] x [V, H] problem, in reused buffers.

    Logits are float32 whatever the inputs are. The gradient of a chunk takes the place of its
    logits, or, for 16-bit inputs whose products are 16-bit ones and if `compact`, a buffer of the
    inputs' dtype. On a GPU that buffer holds several chunks, for each product reads and writes the
    whole weight gradient.
    """

    def __init__(
        self, hidden, weight, bias, budget_bytes, deterministic, backward, compact=False, group=""
    ):
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.pad = deterministic
        wide = wide_dtype(hidden)
        narrow = wide != hidden.dtype
        self.separate = backward and ((narrow and keeps_16_bits(hidden)) or compact)
        shared = _CHUNKS_PER_PRODUCT if self.separate and hidden.is_cuda else 1
        (rows, width), vocab = hidden.shape, weight.shape[0]
        # A row of hidden, packed or widened, and its gradient (in parts, if rows are compacted).
        width_bytes = width * (8 if not compact else hidden.dtype.itemsize + 16)
        row_bytes = shared * width_bytes + vocab * (
            wide.itemsize + (shared * hidden.dtype.itemsize if self.separate else 0)
        )
        spare = min(WIDENED_BYTES, budget_bytes // 8) if narrow else 0
        most, self.size = _buffer_rows(rows, (budget_bytes - spare) // row_bytes)
        if deterministic:
            most = self.size = _DETERMINISTIC_ROWS
        elif group:
            most = self.size = max(1, min(rows, _GROUP_ROWS))
        in_place = backward and not self.separate
        self._logits = hidden.new_empty(
            most if in_place else min(most, self.size), vocab, dtype=wide
        )
        self.gradient = self._logits
        if self.separate:
            pitch = vocab + (-vocab % _PITCH if compact else 0)
            self.gradient = hidden.new_empty(min(most * shared, rows), pitch)[:, :vocab]

    def slices(self) -> Iterator[slice]:
        for begin in range(0, self.hidden.shape[0], self.size):
            yield slice(begin, min(begin + self.size, self.hidden.shape[0]))

    def logits(self, rows: slice, offset: int = 0) -> Tensor:
        """[rows, V], in the buffer from `offset` on: valid until the next call."""
        hidden = self._padded(self.hidden[rows])
        out = self._logits[offset : offset + hidden.shape[0]]
        mixed_product(out, hidden, self.weight, self.bias)
        return out[: rows.stop - rows.start]

    def hidden_grad(self, grad_logits: Tensor) -> Tensor:
        padded = self._padded(grad_logits)
        if padded.dtype == self.weight.dtype:
            return (padded @ self.weight)[: grad_logits.shape[0]]
        out = padded.new_empty(padded.shape[0], self.weight.shape[1])
        mixed_product(out, padded, self.weight.t())
        return out[: grad_logits.shape[0]].to(self.weight.dtype)

    def weight_grad(self, total: Tensor, grad_logits: Tensor, hidden: Tensor, add: bool) -> None:
        """total [V, H] float32 (float64 for float64) = grad_logits.T @ hidden, or += with `add`."""
        mixed_product(total, grad_logits.t(), hidden.to(grad_logits.dtype).t(), accumulate=add)

    def _padded(self, rows: Tensor) -> Tensor:
        if not self.pad or rows.shape[0] == self.size:
            return rows
        padded = rows.new_zeros(self.size, rows.shape[1])
        padded[: rows.shape[0]] = rows
        return padded


def _buffer_rows(rows: int, most: int) -> tuple[int, int]:
    """(rows of the buffer, of a chunk): equal chunks, in whole tiles of the matrix products."""
    most = max(1, most)
    if most >= 128:
        most -= most % 128
    size = most
    if most >= 128 and rows:
        equal = rows / -(-rows // most)
        size = min(most, -int(-equal // 128) * 128)
    return min(most, rows), size


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """On a CPU its pages outlive it: new ones would cost as much as the product that fills them."""
    if like.is_cpu and native() is not None:
        return native().empty_pooled(like.shape, dtype)
    return torch.empty_like(like, dtype=dtype)


def sum_over_ranks(tensor: Tensor, group: str) -> Tensor:
    if group:
        dist.all_reduce(tensor, group=dist.distributed_c10d._resolve_process_group(group))
    return tensor


@torch.library.custom_op(
    "hybridengine::linear_token_log_probs",
    mutates_args=(),
    schema=f"({LINEAR_SCHEMA}, Tensor? main_grad, str? backend) -> ({', '.join(['Tensor'] * 4)})",
)
def _linear_token_log_probs(hidden, weight, bias, token_ids, *arguments):
    """log_probs, entropy, row_max and log_sum of `token_log_probs`, each [T]."""
    options, (budget_bytes, deterministic, _, backend) = split_row_options(arguments)
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, False, group=options.group)
    results = tuple(hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden)) for _ in range(4))
    for rows in chunks.slices():
        found = rows_forward(
            chunks.logits(rows), token_ids[rows], options.rows(rows), False, backend
        )
        for result, part in zip(results, found, strict=False):
            result[rows] = part
    return results


@_linear_token_log_probs.register_fake
def _(hidden, *_):
    return tuple(hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden)) for _ in range(4))


@torch.library.custom_op(
    "hybridengine::linear_token_log_probs_backward",
    mutates_args=("main_grad",),
    schema=f"({LINEAR_SCHEMA}, Tensor(a!)? main_grad, str? backend, Tensor[] row_results, "
    "Tensor? grad_log_probs, Tensor? grad_entropy, bool[] wanted) -> (Tensor, Tensor, Tensor)",
)
def _linear_backward_op(hidden, weight, bias, token_ids, *arguments):
    """Gradients of hidden, weight and bias; those not `wanted` are empty."""
    options, rest = split_row_options(arguments)
    budget_bytes, deterministic, main_grad, backend, row_results, *by_row, wanted = rest
    chunks = Chunks(hidden, weight, bias, budget_bytes, deterministic, True, group=options.group)
    dead = token_ids == options.ignore_index
    asked = sum(grad != 0 for grad in by_row if grad is not None) > 0
    grads = LinearGrads(chunks, wanted, main_grad, dead | ~asked)
    for rows in chunks.slices():
        logits = grads.logits(rows)
        grad_logits = grads.room(logits)
        rows_backward(
            logits, grad_logits, token_ids[rows], options.rows(rows),
            [result[rows] for result in row_results],
            *(None if grad is None else grad[rows] for grad in by_row), backend,
        )  # fmt: skip
        grads.add(grad_logits, rows)
    return grads.finished(options.group)


class LinearGrads:
    """The three gradients of a linear layer, from the gradients of its results, chunk by chunk.

    dead: [T] bool, rows of hidden that may hold NaN: their gradients are 0, and 0 * NaN is not.
    """

    def __init__(self, chunks: Chunks, wanted, main_grad=None, dead=None):
        hidden, weight, bias = chunks.hidden, chunks.weight, chunks.bias
        self.chunks, self.main_grad, self.dead = chunks, main_grad, dead
        # Rows that no chunk brings (compacted away) stay 0.
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.bias = None
        if bias is not None and wanted[2]:
            self.bias = torch.zeros_like(bias, dtype=wide_dtype(bias))
        self.weight = None
        if wanted[1]:
            self.weight = _empty(weight, wide_dtype(weight)) if main_grad is None else main_grad
        self.has_weight = main_grad is not None  # else the first product is not added, but stored
        self.pending: list[tuple[Tensor, slice | Tensor]] = []

    def logits(self, rows: slice) -> Tensor:
        """Those of the chunk, beside the gradients that wait where both share a buffer."""
        if self.chunks.separate:
            return self.chunks.logits(rows)
        return self.chunks.logits(rows, self._room_for(rows.stop - rows.start))

    def room(self, logits: Tensor) -> Tensor:
        """Where the gradient of these logits goes; `add` it then."""
        if not self.chunks.separate:
            return logits
        begin = self._room_for(logits.shape[0])
        return self.chunks.gradient[begin : begin + logits.shape[0]]

    def add(self, grad_logits: Tensor, rows: slice | Tensor) -> None:
        """`rows`: where in T these rows lie. They are multiplied once the buffer is full."""
        self.pending.append((grad_logits, rows))

    def _room_for(self, count: int) -> int:
        """The first free row of the buffer, `count` of them being free."""
        count = self.chunks.gradient.shape[0] if self.chunks.pad else count
        filled = sum(grad.shape[0] for grad, _ in self.pending)
        if filled + count > self.chunks.gradient.shape[0]:
            self._multiply()
            return 0
        return filled

    def _multiply(self) -> None:
        if not self.pending:
            return
        (grad_logits, rows), *more = self.pending
        if more:
            device = grad_logits.device
            parts = [
                torch.arange(part.start, part.stop, device=device) if type(part) is slice else part
                for _, part in self.pending
            ]
            rows = torch.cat(parts)
            grad_logits = self.chunks.gradient[: rows.shape[0]]
        self.pending = []
        if self.hidden is not None:
            self.hidden[rows] = self.chunks.hidden_grad(grad_logits)
        if self.weight is not None:
            hidden = self.chunks.hidden[rows]
            if self.dead is not None:
                hidden = hidden.masked_fill(self.dead[rows].unsqueeze(1), 0)
            self.chunks.weight_grad(self.weight, grad_logits, hidden, add=self.has_weight)
            self.has_weight = True
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)

    def finished(self, group: str, wide_weight: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtypes of their tensors, summed over the ranks where that is due."""
        self._multiply()
        like = self.chunks.hidden
        hidden = weight = bias = None
        if self.hidden is not None:
            hidden = sum_over_ranks(self.hidden, group)
        if self.weight is not None and self.main_grad is None:
            weight = self.weight if self.has_weight else self.weight.zero_()
            if not wide_weight and weight.dtype != like.dtype:
                weight = _empty(weight, like.dtype).copy_(weight)
        if self.bias is not None:
            bias = self.bias.to(like.dtype)
        return tuple(like.new_empty(0) if g is None else g for g in (hidden, weight, bias))


@_linear_backward_op.register_fake
def _(hidden, weight, bias, *args):
    main_grad, wanted = args[11], args[-1]
    return tuple(
        torch.empty_like(tensor) if tensor is not None and want else hidden.new_empty(0)
        for tensor, want in zip(
            (hidden, weight if main_grad is None else None, bias), wanted, strict=True
        )
    )


def _setup_context(ctx, inputs, output):
    options, ctx.rest = split_row_options(inputs[4:])
    ctx.save_for_backward(*inputs[:4], *options.tensors(), *output)
    ctx.scalars = options.scalars()
    ctx.set_materialize_grads(False)


@check.differentiable_once("linear_token_log_probs")
def _backward(ctx, grad_log_probs, grad_entropy, *_):
    nothing = (None,) * 13
    wanted = list(ctx.needs_input_grad[:3])
    if not any(wanted) or (grad_log_probs is None and grad_entropy is None):
        return None, None, None, *nothing
    hidden, weight, bias, token_ids, *rest = ctx.saved_tensors
    options, row_results = RowOptions.of(ctx.scalars, rest[:3]), rest[3:]
    grads = torch.ops.hybridengine.linear_token_log_probs_backward(
        hidden, weight, bias, token_ids, *options, *ctx.rest, row_results, grad_log_probs,
        grad_entropy, wanted,
    )  # fmt: skip
    main_grad = ctx.rest[2]
    wanted[1] = wanted[1] and main_grad is None
    chosen = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
    return *chosen, *nothing


torch.library.register_autograd(
    "hybridengine::linear_token_log_probs", _backward, setup_context=_setup_context
)
