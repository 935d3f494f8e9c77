"""rms_norm, layer_norm and gated_activation: row operators of a decoder layer, batch-invariant.

An element's bits depend on its row and its place in it alone. So a token has the same values in any
batch: in a trainer's packed sequences and in a decoding step of an engine (csrc/layer).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op
from ._per_token import unit_inner_stride

Activation = Literal["silu", "gelu", "gelu_tanh", "sigmoid", "softplus"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)
_DTYPES = (*_KERNEL_DTYPES, torch.float64)

for _name in ("rms_norm", "layer_norm", "gated_activation"):
    register_backends(_name, cpu=("cpp", "reference"), cuda=("triton", "reference"))


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset) of every row (Zhang and Sennrich 2019).

    Computed in float32 and rounded at the end.

    Args:
        x: [..., H], float32 or bfloat16 (float64: on the reference backend).
        weight: [H] of the dtype of `x`.
        eps: not negative.
        offset: 1 for models whose weights are differences from 1, such as Gemma.
        round_first: round x / sqrt(...) to the dtype before it is multiplied, as Llama does.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None: the best one for the device.

    Returns:
        [..., H], differentiable with respect to x and weight. The gradient of the weight is summed
        in float32, in an order that the number of rows fixes.

    Raises:
        ValueError: shapes, dtypes, devices or numbers do not fit, or the backend cannot run here.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).mul(12.5**0.5)
        tensor([[3., 4.]])
    """
    op = "rms_norm"
    check.same_device(op, x=x, weight=weight)
    sizes: check.Sizes = {}
    check.shape(op, "x", x, "... H", sizes)
    check.shape(op, "weight", weight, "H", sizes)
    check.dtype(op, "x", x, _DTYPES)
    check.dtype(op, "weight", weight, (x.dtype,))
    eps = check.number(op, "eps", eps, at_least=0)
    offset = check.number(op, "offset", offset)
    chosen = choose_backend(op, x.device, backend, x.dtype)
    if chosen == "reference":
        return _rms_norm_reference(x, weight, eps, offset, round_first)
    out, _ = _rms_norm(_rows(x), weight, eps, offset, round_first)
    return _in_shape(out, x)


def inference_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, **options: Any
) -> Tensor:
    """Return `rms_norm` of x, or of x + residual, which becomes the residual; without a gradient.

    On a CPU that is one call without checks in Python, which take longer than a row.
    """
    extension = native()
    if extension is not None and x.device.type == "cpu" and x.dtype in _KERNEL_DTYPES:
        offset, round_first = options.get("offset", 0.0), options.get("round_first", False)
        rows = None if residual is None else residual.view(-1, residual.shape[-1])
        given = x if x.dim() == 3 and rows is None else _rows(x)
        out, _ = extension.rms_norm(given, weight, eps, offset, round_first, False, rows)
        return out.view(x.shape)
    if residual is not None:
        x = residual.add_(x)
    return rms_norm(x, weight, eps, **options)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    backend: str | None = None,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias of every row (Ba et al. 2016).

    Computed in float32 and rounded at the end.

    Args:
        x: [..., H], float32 or bfloat16 (float64: on the reference backend).
        weight: [H] of the dtype of `x`; bias: the same, or None.
        eps: not negative.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None: the best one for the device.

    Returns:
        [..., H], differentiable with respect to x, weight and bias. Gradients of weight and bias
        are summed in float32, in an order that the number of rows fixes.

    Raises:
        ValueError: shapes, dtypes, devices or numbers do not fit, or the backend cannot run here.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), None, 0.0)
        tensor([[-1.,  1.]])
    """
    op = "layer_norm"
    check.same_device(op, x=x, weight=weight, bias=bias)
    sizes: check.Sizes = {}
    check.shape(op, "x", x, "... H", sizes)
    check.dtype(op, "x", x, _DTYPES)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check.shape(op, name, parameter, "H", sizes)
            check.dtype(op, name, parameter, (x.dtype,))
    eps = check.number(op, "eps", eps, at_least=0)
    chosen = choose_backend(op, x.device, backend, x.dtype)
    if chosen == "reference":
        return _layer_norm_reference(x, weight, bias, eps)
    out, _ = _layer_norm(_rows(x), weight, bias, eps)
    return _in_shape(out, x)


def row_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Tensor:
    """Return the `layer_norm` of x if `centered`, else its `rms_norm` with these options.

    weight: [H], or [heads, H] for a layer norm of x [..., heads, H] without a bias.
    """
    if not centered:
        return rms_norm(x, weight, eps, backend=backend, **options)
    if weight.dim() > 1:
        ones = weight.new_ones(weight.shape[-1], dtype=torch.float32)
        normed = layer_norm(x.float(), ones, None, eps, backend=backend)
        return (normed * weight.float()).to(x.dtype)
    extension = native() if backend is None and not torch.is_grad_enabled() else None
    if extension is not None and x.device.type == "cpu":  # without checks in Python
        out: Tensor = extension.layer_norm(_rows(x), weight, bias, eps, False)[0]
        return out.view(x.shape)
    return layer_norm(x, weight, bias, eps, backend=backend)


def add_scaled_(out: Tensor, update: Tensor, scale: float) -> None:
    """Add update * scale, rounded to the dtype, to `out`, without a gradient.

    out, update: [T, N] of one dtype, on a CPU float32 or bfloat16 with inner stride 1.
    """
    extension = native()
    if extension is not None and out.device.type == "cpu":
        extension.add_scaled_(out, update, scale)
    else:
        out.add_(update * scale)


def gated_activation(
    gate: Tensor, up: Tensor, activation: Activation = "silu", *, backend: str | None = None
) -> Tensor:
    """Return activation(gate) * up (Shazeer 2020), computed in float32 and rounded once.

    Args:
        gate, up: [..., H] of the same shape and dtype, float32 or bfloat16 (float64: on the
            reference backend).
        activation: `silu`, `gelu`, `gelu_tanh` (GELU by its approximation with tanh), `sigmoid` or
            `softplus`.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None: the best one for the device.

    Returns:
        [..., H], differentiable.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the activation is unknown, or the backend
            cannot run here.

    Example:
        >>> gated_activation(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[0., 0.]])
    """
    op = "gated_activation"
    check.same_device(op, gate=gate, up=up)
    sizes: check.Sizes = {}
    check.shape(op, "gate", gate, "... H", sizes)
    if up.shape != gate.shape:
        raise ValueError(
            f"{op}: up has shape {tuple(up.shape)}; expected {tuple(gate.shape)}, as gate."
        )
    check.dtype(op, "gate", gate, _DTYPES)
    check.dtype(op, "up", up, (gate.dtype,))
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}; expected one of {[*_ACTIVATIONS]}.")
    chosen = choose_backend(op, gate.device, backend, gate.dtype)
    if chosen == "reference":
        return _gated_reference(gate, up, activation)
    # Heads with others' memory in between are read where they are.
    are_heads = gate.dim() == 3 and gate.is_cpu and not gate.is_contiguous()
    rows = map(unit_inner_stride if are_heads else _rows, (gate, up))
    return _in_shape(_gated_activation(*rows, activation), gate)


def _rows(x: Tensor) -> Tensor:
    """Return x as [rows, H] with inner stride 1."""
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return unit_inner_stride(rows)


def _in_shape(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows [R, H] in the shape of `like`; heads, of three dimensions, are as they are."""
    return rows if rows.dim() == like.dim() else rows.view(like.shape)


def kernels_for(x: Tensor) -> Any:
    """Return what has the kernels for the device of x."""
    if not x.is_cuda:
        return native()
    from . import layer_triton

    return layer_triton


@custom_op("hybridengine::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the normed rows and 1 / rms of each."""
    arguments = (x, weight.contiguous(), eps, offset, round_first, True)
    results: tuple[Tensor, Tensor] = kernels_for(x).rms_norm(*arguments)
    return results


@_rms_norm.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


@custom_op("hybridengine::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = kernels_for(x).rms_norm_backward(
        _rows(grad), x, weight.contiguous(), inverse_rms, offset
    )
    return grads


@_rms_norm_backward.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(weight.shape, dtype=torch.float32)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _norm_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return ()
    x, weight, inverse_rms = ctx.saved_tensors
    grad_x, grad_weight = _rms_norm_backward(grad, x, weight, inverse_rms, ctx.offset)
    return grad_x, grad_weight.to(weight.dtype)


_rms_norm.register_autograd(_norm_gradients, setup_context=_save_norm, num_differentiable=1)


@custom_op("hybridengine::layer_norm", mutates_args=())
def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the normed rows and 1 / (standard deviation) of each."""
    bias = None if bias is None else bias.contiguous()
    results: tuple[Tensor, Tensor] = kernels_for(x).layer_norm(
        x, weight.contiguous(), bias, eps, True
    )
    return results


@_layer_norm.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


@custom_op("hybridengine::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = kernels_for(x).layer_norm_backward(
        _rows(grad), x, weight.contiguous(), inverse
    )
    return grads


@_layer_norm_backward.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_weight = x.new_empty(weight.shape, dtype=torch.float32)
    return x.new_empty(x.shape), of_weight, torch.empty_like(of_weight)


def _save_layer_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _layer_norm_gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return ()
    x, weight, inverse = ctx.saved_tensors
    grad_x, *others = _layer_norm_backward(grad, x, weight, inverse)
    grad_weight, grad_bias = (other.to(weight.dtype) for other in others)
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None


_layer_norm.register_autograd(
    _layer_norm_gradients, setup_context=_save_layer_norm, num_differentiable=1
)


@custom_op("hybridengine::gated_activation", mutates_args=())
def _gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out: Tensor = kernels_for(gate).gated_activation(gate, up, activation)
    return out


@_gated_activation.register_fake
def _(gate: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@custom_op("hybridengine::gated_activation_backward", mutates_args=())
def _gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    rows = map(_rows, (grad, gate, up))
    grad_gate, grad_up = kernels_for(gate).gated_activation_backward(*rows, activation)
    return _in_shape(grad_gate, gate), _in_shape(grad_up, gate)


@_gated_activation_backward.register_fake
def _(gate: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _gated_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    return *_gated_activation_backward(grad, gate, up, ctx.activation), None


_gated_activation.register_autograd(_gated_gradients, setup_context=_save_gated)


def _rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype).to(wide.dtype)
    return (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)


def _layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(-1, keepdim=True)
    out = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight
    return (out if bias is None else out + bias).to(x.dtype)


def _gated_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (_ACTIVATIONS[activation](wide) * up.to(wide.dtype)).to(gate.dtype)
