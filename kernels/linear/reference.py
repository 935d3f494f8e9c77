"""The logits of the reference backends: a product that autograd can differentiate any number of
times."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .._library import custom_op
from .._per_token import compute_dtype


def reference_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ignored: Tensor
) -> Tensor:
    """Compute logits [..., V], float32 (float64 for float64), of hidden [..., H] and weight [V, H].

    ignored: [...] bool, rows whose hidden states are taken as 0.
    """
    dtype = compute_dtype(hidden)
    rows = hidden.masked_fill(ignored.unsqueeze(-1), 0).to(dtype)
    flat = rows if rows.dim() == 2 else rows.flatten(0, -2)
    logits = _product(flat, weight.to(dtype), None if bias is None else bias.to(dtype))
    return logits if rows.dim() == 2 else logits.unflatten(0, rows.shape[:-1])


@custom_op("hybridengine::reference_product", mutates_args=())
def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a [m, k] @ b [n, k].T + bias [n]."""
    return F.linear(a, b, bias)


@_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (a, b), needs = ctx.saved_tensors, ctx.needs_input_grad
    return (
        _product(grad, b.t(), None) if needs[0] else None,
        _product(grad.t(), a.t(), None) if needs[1] else None,
        grad.sum(0) if needs[2] else None,
    )


_product.register_autograd(_backward, setup_context=_setup_context)
