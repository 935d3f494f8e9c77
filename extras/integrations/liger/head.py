"""What the fused losses share: log-probs from hidden states, and gradients made in the forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import linear_token_log_probs

IGNORE_INDEX = -100


def head_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden and weight in one dtype, autocast's where it is enabled, and a bias that fits.

    Logits are float32 in any case.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    if bias is not None:
        bias = bias.to(torch.promote_types(bias.dtype, dtype))
    return hidden.to(dtype), weight.to(dtype), bias


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy [...] of hidden [..., H], 0 where ignored; differentiable."""
    hidden, weight, bias = head_operands(hidden, weight, bias)
    return linear_token_log_probs(
        hidden, weight, token_ids, float(temperature), bias=bias, ignore_index=ignore_index
    )


def sum_of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the sum of all logits of hidden [..., H], a 0-d tensor without gradient.

    The sum over tokens and vocabulary is the product of two sums: no logits are needed.
    """
    with torch.no_grad():
        hidden = hidden.flatten(0, -2)
        total = hidden.sum(0, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
        if bias is not None:
            total = total + hidden.shape[0] * bias.sum(dtype=torch.float32)
        return total


def loss_and_gradients(
    compute: Callable[..., tuple[Tensor, Any]], tensors: Sequence[Tensor | None]
) -> tuple[Tensor, Any, list[Tensor | None]]:
    """Call compute(*tensors) -> (loss, others) and differentiate the loss at once.

    An autograd.Function calls this in its forward and saves the gradients, so that the logits of
    the head are gone before the model's backward begins.

    Returns:
        (loss, others, gradients: None for tensors that need none).
    """
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with torch.enable_grad():
        loss, others = compute(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
    grads = [None if t is None or not t.requires_grad else next(found) for t in leaves]
    return loss.detach(), others, grads


class GradientsInForward(torch.autograd.Function):
    """A loss whose forward saves its gradients, those of hidden states, weight and bias.

    num_targets: how many arguments are between weight and bias.
    """

    num_targets = 1

    @classmethod
    def backward(cls, ctx: Any, grad_loss: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward saved, times that of the loss."""
        scaled = (None if grad is None else grad * grad_loss for grad in ctx.saved_tensors)
        grad_input, grad_weight, grad_bias = scaled
        grads = (grad_input, grad_weight, *[None] * cls.num_targets, grad_bias)
        return grads + (None,) * (len(ctx.needs_input_grad) - len(grads))


def detached(results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return results without gradient."""
    return tuple(result.detach() for result in results)
