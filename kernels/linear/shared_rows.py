"""Rows of hidden states from which several tokens are predicted: `hidden_index`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from .. import _check as check
from .._backend import choose_backend
from .._library import custom_op
from .._per_token import compute_dtype
from ..logprob.options import RowOptions


def shares_rows(device: torch.device) -> bool:
    """Return whether the operators compute the logits of a row once for all of its tokens.

    GPU kernels write the gradient of one token per row. There a caller that gathers the hidden
    states gives them a row for each token, which saves the second gather, of `hidden_index`.
    """
    return choose_backend("linear_token_log_probs", device) == "cpp"


def own_rows(
    op: str, hidden: Tensor, hidden_index: Tensor | None, options: RowOptions, sharable: bool
) -> tuple[Tensor, Tensor | None]:
    """Return hidden and hidden_index, or where rows are not shared a row for each token and None.

    They are shared where the caller can (`sharable`: with the backend of `shares_rows`) and tokens
    have no temperatures or masks of their own.
    """
    if hidden_index is None:
        return hidden, None
    hidden_index = check.ids(op, "hidden_index", hidden_index)
    own = options.temperatures is not None or options.vocab_mask is not None
    if sharable and not own and not options.group:
        return hidden, hidden_index
    return take_rows(hidden, hidden_index, op), None


def take_rows(hidden: Tensor, hidden_index: Tensor, caller: str = "take_rows") -> Tensor:
    """Return hidden[hidden_index], [..., H], whose gradient is summed in float32 on a CPU.

    hidden: [D, H]; hidden_index: [...] int64; caller: the operator that errors name.
    """
    if hidden.is_cuda:  # as hidden[-1] would be the last row; and the gradient's order is fixed
        return embedding(hidden_index, hidden)
    rows = _take_rows(hidden, hidden_index.flatten(), caller)
    return rows if hidden_index.dim() == 1 else rows.view(*hidden_index.shape, hidden.shape[1])


def _checked(op: str, hidden_index: Tensor, rows: int) -> Tensor:
    """Return hidden_index; called where an op reads it, so in a compiled graph, too."""
    if check.readable(hidden_index):
        outside = hidden_index[(hidden_index < 0) | (hidden_index >= rows)]
        if outside.numel():
            raise IndexError(
                f"{op}: hidden_index has {int(outside[0])}; expected row numbers of hidden, from 0 "
                f"to {rows - 1}."
            )
    return hidden_index


@custom_op("hybridengine::take_rows", mutates_args=())
def _take_rows(hidden: Tensor, hidden_index: Tensor, caller: str) -> Tensor:
    return hidden[_checked(caller, hidden_index, hidden.shape[0])]


@custom_op("hybridengine::take_rows_backward", mutates_args=())
def _add_rows(grad: Tensor, hidden_index: Tensor, rows: int) -> Tensor:
    """Return the sum of the rows of grad [T, H] with the same index, [rows, H]."""
    total = grad.new_zeros(rows, grad.shape[1], dtype=compute_dtype(grad))
    return total.index_add_(0, hidden_index, grad.to(total.dtype)).to(grad.dtype)


@_take_rows.register_fake
def _(hidden: Tensor, hidden_index: Tensor) -> Tensor:
    return hidden.new_empty(hidden_index.shape[0], hidden.shape[1])


@_add_rows.register_fake
def _(grad: Tensor, hidden_index: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.shape[1])


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    hidden, hidden_index, _ = inputs
    ctx.save_for_backward(hidden_index)
    ctx.rows = hidden.shape[0]


@check.differentiable_once("a loss from hidden states")
def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return _add_rows(grad, *ctx.saved_tensors, ctx.rows)


_take_rows.register_autograd(_backward, setup_context=_save)


class RowTokens(NamedTuple):
    """The tokens that are predicted from each of D rows of hidden states.

    Those of row d are order[ends[d] : ends[d + 1]].
    """

    order: Tensor  # int64 [T], of tokens
    ends: Tensor  # int64 [D + 1]

    @staticmethod
    def of(op: str, hidden_index: Tensor | None, rows: int) -> RowTokens | None:
        """hidden_index: int64 [T], the row of each token; None: a row for each, and no result."""
        if hidden_index is None:
            return None
        counts = _checked(op, hidden_index, rows).bincount(None, rows)
        return RowTokens(hidden_index.argsort(stable=True), _ends(counts))

    def take(self, rows: slice | Tensor) -> tuple[RowTokens, Tensor]:
        """Select the tokens of some rows; return also where they are in `order`."""
        counts = self.ends.diff()[rows]
        ends = _ends(counts)
        place = (self.ends[:-1][rows] - ends[:-1]).repeat_interleave(counts)
        place += torch.arange(place.numel())
        return RowTokens(self.order[place], ends), place

    def any(self, flags: Tensor) -> Tensor:
        """Return whether a row has a token with a flag: bool [D]. flags: bool, as `order`."""
        return _ends(flags)[self.ends].diff() > 0


def _ends(counts: Tensor) -> Tensor:
    """[N] -> [N + 1], from 0."""
    return pad(counts.cumsum(0), (1, 0))
