"""The arguments that the operators over hidden states share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _check as check
from .._library import CustomOp
from .._per_token import compute_dtype
from ..logprob.options import RowOptions


def check_linear(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    name: str = "token_ids",
    hidden_index: Tensor | None = None,
) -> Tensor:
    """Check that the arguments fit each other; return token_ids as int64. name: that of those."""
    tensors = {"hidden": hidden, "weight": weight, name: token_ids, "hidden_index": hidden_index}
    check.same_device(op, **tensors, bias=bias, main_grad=main_grad)
    check.reverse_mode_only(op, hidden=hidden, weight=weight, bias=bias)
    check.floats(op, hidden=hidden)
    sizes: check.Sizes = {}
    check.shape(op, "hidden", hidden, "... H" if hidden_index is None else "D H", sizes)
    check.shape(op, "weight", weight, "V H", sizes)
    check.dtype(op, "weight", weight, (hidden.dtype,))
    check.shape(op, name, token_ids, "...", sizes)
    if bias is not None:
        check.shape(op, "bias", bias, "V", sizes)
        check.dtype(op, "bias", bias, (hidden.dtype, compute_dtype(hidden)))
    if main_grad is not None:
        check.shape(op, "main_grad", main_grad, "V H", sizes)
        check.dtype(op, "main_grad", main_grad, (compute_dtype(weight),))
        if not main_grad.is_contiguous():
            raise ValueError(f"{op}: main_grad is not contiguous; expected a contiguous tensor.")
    if hidden_index is not None:
        check.shape(op, "hidden_index", hidden_index, "...", sizes)
    return check.ids(op, name, token_ids)


def check_budget(op: str, hidden: Tensor, budget_bytes: int | None) -> int:
    """Return the budget in bytes: if None, 256 MiB on a CPU, 5% of a GPU's memory up to 4 GiB.

    Of a GPU's total memory, not of what is free: chunks, and so the last bits of results, must not
    depend on what else is allocated.
    """
    if budget_bytes is not None:
        return check.integer(op, "budget_bytes", budget_bytes, at_least=1)
    if hidden.is_cuda:
        return min(torch.cuda.get_device_properties(hidden.device).total_memory // 20, 2**32)
    return 2**28


def check_active_rows(op: str, active_rows: Tensor, token_ids: Tensor) -> Tensor:
    """Return the index of active rows as int64: [A], ascending, below the number of tokens."""
    check.same_device(op, token_ids=token_ids, active_rows=active_rows)
    check.shape(op, "active_rows", active_rows, "A", {})
    rows, index = token_ids.numel(), check.ids(op, "active_rows", active_rows)
    if index.numel() > rows:
        raise ValueError(
            f"{op}: active_rows has {index.numel()} entries; expected at most {rows}, the tokens."
        )
    if check.readable(index):
        ends = index.new_tensor([-1]), index.new_tensor([rows])
        if not (torch.cat([ends[0], index, ends[1]]).diff() > 0).all():
            raise ValueError(
                f"{op}: active_rows must be ascending row numbers from 0 to {rows - 1}, each once."
            )
    return index


def empty_gradients(tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """Return fake gradients of hidden, weight and bias: empty if None or not wanted."""
    assert tensors[0] is not None
    return [
        tensors[0].new_empty(0) if tensor is None or not want else torch.empty_like(tensor)
        for tensor, want in zip(tensors, wanted, strict=True)
    ]


def register_linear_autograd(
    op: str,
    ops: tuple[CustomOp, CustomOp],
    from_results: Callable[[Sequence[Tensor]], Sequence],
    more_grads: int = 0,
) -> None:
    """Register the second of `ops` as the gradient of the first, and its fake kernel.

    It takes the arguments of the first (hidden, weight, bias, token_ids, RowOptions, others of
    which one is main_grad), what `from_results` makes of its results, the gradients of log_probs,
    entropy and its last `more_grads` results, and which of the three gradients are wanted; the
    others are empty.
    """
    forward_op, backward_op = ops
    main_grad_at = forward_op.names.index("main_grad") - 5

    def fake(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor | None,
        wanted: list[bool],
    ) -> tuple[Tensor, ...]:
        stored = weight if main_grad is None else None
        return tuple(empty_gradients((hidden, stored, bias), wanted))

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        options, *rest = inputs[4:]
        # main_grad is not saved: other backward calls may add to it before this one.
        saved = [
            x if isinstance(x, Tensor) and i != main_grad_at else None for i, x in enumerate(rest)
        ]
        ctx.rest = [x if s is None else None for x, s in zip(rest, saved, strict=True)]
        options.save(ctx, *inputs[:4], *saved, *output)

    @check.differentiable_once(op)
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *others: Any
    ) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:3])
        incoming = (grad_log_probs, grad_entropy, *others[len(others) - more_grads :])
        if not any(wanted) or all(grad is None for grad in incoming):
            return ()
        options, tensors = RowOptions.restore(ctx)
        end = 4 + len(ctx.rest)
        rest = [x if s is None else s for x, s in zip(ctx.rest, tensors[4:end], strict=True)]
        grads = backward_op(
            *tensors[:4],
            options,
            *rest,
            *from_results(tensors[end:]),
            *incoming,
            wanted,
        )
        wanted[1] = wanted[1] and rest[main_grad_at] is None
        return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))

    backward_op.register_fake(fake)
    forward_op.register_autograd(
        backward, setup_context=setup_context, num_differentiable=None if more_grads else 2
    )
