"""Losses whose gradients are computed in their forward: the tie of these gradients to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _check as check
from .._backend import has_triton
from .._per_token import compute_dtype
from .arguments import empty_gradients

Differentiated = Sequence[Tensor | None]  # hidden, weight, bias or None


def wanted_gradients(op: str, tensors: Differentiated, prefix: str = "") -> list[bool]:
    """Return which gradients autograd will ask for.

    prefix: of the tensors' names in the error where they are batched.
    """
    enabled = torch.is_grad_enabled()
    wanted = [t is not None and enabled and t.requires_grad for t in tensors]
    if any(wanted):
        names = ("hidden", "weight", "bias")
        named = {prefix + name: tensor for name, tensor in zip(names, tensors, strict=True)}
        check.untransformed(op, **named)
    return wanted


def fake_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wide_weight_grad: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return fake gradients, as `LinearGradients` returns them."""
    grads = empty_gradients((hidden, weight, bias), wanted)
    if wide_weight_grad:
        grads[1] = grads[1].to(compute_dtype(weight))
    return grads


def attach_gradients(
    loss: Tensor,
    tensors: Differentiated,
    grads: Sequence[Tensor],
    main_grad: Tensor | None,
    grad_scale: float,
) -> Tensor:
    """Return the scalar `loss` with these gradients with respect to `tensors`.

    grads: of hidden, weight and bias for an incoming gradient of grad_scale, empty where not
      wanted; the backward scales them in place.
    main_grad: the weight gradient is added to it.
    """
    # Tensors without elements have the autograd edges of the inputs, for `differentiable_once`, and
    # none of their memory.
    anchors = [None if t is None else t[:0].clone() for t in tensors]
    return _AttachGradients.apply(loss, *tensors, main_grad, grad_scale, *grads, *anchors)


class _AttachGradients(torch.autograd.Function):
    """Return the loss, with gradients that are already computed, times grad_scale."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, loss, hidden, weight, bias, main_grad, grad_scale, *grads_and_anchors
    ):
        ctx.save_for_backward(*grads_and_anchors)
        ctx.main_grad, ctx.grad_scale = main_grad, grad_scale
        return loss.clone()

    @staticmethod
    @check.differentiable_once("a loss from hidden states")
    def backward(ctx: Any, grad_loss: Tensor):  # type: ignore[no-untyped-def]
        grads, factor = ctx.saved_tensors[:3], grad_loss / ctx.grad_scale
        needs = list(ctx.needs_input_grad[1:4])
        if ctx.main_grad is not None and needs[1]:
            needs[1] = False
            ctx.main_grad.addcmul_(grads[1], factor)
        scaled = iter(
            _scaled([grad for grad, need in zip(grads, needs, strict=True) if need], factor)
        )
        return None, *(next(scaled) if need else None for need in needs), *(None,) * 8


def _scaled(grads: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """Return grads * factor, in place where no other backward can read them again.

    That saves a copy of the weight gradient. Where the factor is 1 the gradients are not even read;
    the host does not wait for the factor's value on a GPU, nor read it in a traced graph.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return [grad * factor for grad in grads]
    if factor.is_cuda and has_triton():
        from .rescale import rescale_

        return [rescale_(grad, factor) for grad in grads]
    if check.readable(factor) and factor.item() == 1:
        return grads
    return [grad.mul_(factor) for grad in grads]
