"""Gated DeltaNet in an exact engine: its gates, and a token of each sequence from cached states.

The updates have the bits of `causal_conv1d` and `linear_recurrence` at the same place of a
sequence. They run on a CPU without a gradient, and can be captured (`Graph`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._backend import native
from ._library import custom_op
from ._per_token import unit_inner_stride


def delta_gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return g = -exp(log_rate) softplus(a + bias) and beta = sigmoid(b) (arXiv 2412.06464).

    Args:
        a, b: [T, H], float32 or bfloat16.
        log_rate: [H], rounded to the dtype of `a`: an engine may have it in float32.
        bias: [H] of the dtype of `a`.

    Returns:
        [T, H] float32 each, differentiable. The bits of an element depend on its operands alone.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Example:
        >>> zero = torch.zeros(1, 1)
        >>> [x.item() for x in delta_gates(zero - 100, zero, zero[0], zero[0])]
        [-0.0, 0.5]
    """
    if native() is None or not a.is_cpu:
        rate = log_rate.to(a.dtype).float().exp()
        return -rate * F.softplus(a.float() + bias.float()), b.float().sigmoid()
    gates: tuple[Tensor, Tensor] = _gates(a, b, log_rate.float(), bias)
    return gates


@custom_op("hybridengine::delta_gates", mutates_args=())
def _gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    rows = map(unit_inner_stride, (a, b))
    gates: tuple[Tensor, Tensor] = _native().delta_gates(*rows, log_rate, bias)
    return gates


@_gates.register_fake
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = (a.new_empty(a.shape, dtype=torch.float32) for _ in range(2))
    return g, beta


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, _, log_rate, bias = inputs
    ctx.save_for_backward(a, log_rate, bias, *output)


def _backward(ctx: Any, grad_g: Tensor, grad_beta: Tensor) -> tuple[Tensor, ...]:
    a, log_rate, bias, g, beta = ctx.saved_tensors
    rate = log_rate.to(a.dtype).float().exp()
    grad_a = -grad_g * rate * (a.float() + bias.float()).sigmoid()
    grad_b = grad_beta * beta * (1 - beta)
    of_heads = (grad_g * g).sum(0), grad_a.sum(0).to(bias.dtype)
    return grad_a.to(a.dtype), grad_b.to(a.dtype), *of_heads


_gates.register_autograd(_backward, setup_context=_setup_context)


def causal_conv1d_update(x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Return silu of the convolution of a token of each sequence, and move it into the cache.

    Args:
        x: [T, C] with inner stride 1.
        weight: [C, W] of the dtype of `x`, W from 2 to 4.
        cache: [N, W - 1, C] of the dtype of `x` with contiguous rows, of each sequence its last
            ones, oldest first.
        slots: [T] int32, the places of the sequences in the cache, all different.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or a slot outside of the cache.
    """
    out: Tensor = _native().causal_conv1d_update(x, weight, cache, slots, True)
    return out


def linear_recurrence_update(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """Return `linear_recurrence` with `l2_norm` for a token of each sequence; update the states.

    Args:
        q, k: [T, H_k, D_k]; v: [T, H_v, D_v], with inner stride 1.
        g, beta: [T, H_v] float32.
        states: [N, H_v, D_k, D_v] float32 with contiguous rows.
        slots: [T] int32, the places of the sequences in `states`, all different.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or a slot outside of the states.
    """
    options = (q.shape[2] ** -0.5, True, True)
    out: Tensor = _native().linear_recurrence_update(q, k, v, g, beta, states, slots, *options)
    return out


def _native() -> Any:
    extension = native()
    if extension is None:
        raise RuntimeError("Gated DeltaNet's updates need hybridengine._C, which is not built")
    return extension
