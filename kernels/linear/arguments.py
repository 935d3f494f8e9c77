"""The arguments that the operators over hidden states share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _check as check
from ..logprob.row_options import ROW_SCHEMA, RowOptions

# What the operators over hidden states begin with.
LINEAR_SCHEMA = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor token_ids, {ROW_SCHEMA}, "
    "int budget_bytes, bool deterministic"
)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Of sums and results."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_linear(
    op: str, hidden: Tensor, weight: Tensor, token_ids: Tensor, bias, main_grad
) -> Tensor:
    """token_ids as int64, after checking that the arguments fit each other."""
    check.same_device(
        op, hidden=hidden, weight=weight, token_ids=token_ids, bias=bias, main_grad=main_grad
    )
    check.no_forward_ad(op, hidden=hidden, weight=weight, bias=bias)
    check.floats(op, hidden=hidden)
    sizes: check.Sizes = {}
    check.shape(op, "hidden", hidden, "... H", sizes)
    check.shape(op, "weight", weight, "V H", sizes)
    check.dtype(op, "weight", weight, (hidden.dtype,))
    check.shape(op, "token_ids", token_ids, "...", sizes)
    if bias is not None:
        check.shape(op, "bias", bias, "V", sizes)
        check.dtype(op, "bias", bias, (hidden.dtype, wide_dtype(hidden)))
    if main_grad is not None:
        check.shape(op, "main_grad", main_grad, "V H", sizes)
        check.dtype(op, "main_grad", main_grad, (wide_dtype(weight),))
        if not main_grad.is_contiguous():
            raise ValueError(f"{op}: main_grad is not contiguous; expected a contiguous tensor.")
    return check.ids(op, "token_ids", token_ids)


def budget(op: str, hidden: Tensor, given: int | None) -> int:
    if given is None:
        return 2**30 if hidden.is_cuda else 2**28
    return check.integer(op, "budget_bytes", given, at_least=1)


def split_row_options(arguments: Sequence) -> tuple[RowOptions, Sequence]:
    """What follows the tensors in LINEAR_SCHEMA: the row options, and the rest."""
    count = len(RowOptions._fields)
    return RowOptions(*arguments[:count]), arguments[count:]
