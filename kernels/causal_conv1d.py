"""causal_conv1d: a depthwise causal convolution over packed segments, with its activation.

The short convolution before the recurrence of Mamba2, Gated DeltaNet and KDA, and the mixer of
LFM2. The rows before a segment are the last ones of its parent, so that a prompt is convolved once
for all its responses; no row of one sequence reaches another.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op
from ._per_token import unit_inner_stride
from .linear_recurrence import check_parents

OP = "causal_conv1d"
register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))

_WIDTHS = (2, 3, 4)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    parents: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Convolve each channel over the tokens of each segment and those before them.

    out[t] = activation(bias + sum_j weight[:, W - 1 - j] x[t - j]), 0 <= j < W, in float32.

    Args:
        x: [T, C] (float64: on the reference backend).
        weight: [C, W], W from 2 to 4; bias: [C] or None.
        cu_seqlens: [S + 1] int32 or int64, 0 and the end of every segment; a segment may be empty.
        parents: [S] int32 or int64, the earlier segment that a segment continues; -1: none, the
            rows before it are those of `initial_state`. None: -1 for all.
        initial_state: [S, W - 1, C], the rows before segments without a parent, oldest first, of
            the dtype of x; None is 0.
        activation: `silu` or None.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None takes the best one.

    Returns:
        [T, C] of the dtype of x, differentiable (once, in reverse mode) in x, weight, bias and
        initial_state. The bits of a token depend on its own path alone.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a width outside 2 to 4, or a parent
            that is not an earlier segment.

    Example:
        Two responses of one token after a prompt of one token:

        >>> x, ends = torch.tensor([[1.0], [10.0], [20.0]]), torch.tensor([0, 1, 2, 3])
        >>> parents = torch.tensor([-1, 0, 0])
        >>> causal_conv1d(x, torch.ones(1, 2), cu_seqlens=ends, parents=parents).flatten().tolist()
        [1.0, 11.0, 21.0]
    """
    check.not_none(OP, x=x, weight=weight, cu_seqlens=cu_seqlens)
    tensors = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    check.same_device(OP, **tensors, cu_seqlens=cu_seqlens, parents=parents)
    check.reverse_mode_only(OP, **tensors)
    check.floats(OP, **tensors)
    sizes: check.Sizes = {}
    check.shape(OP, "x", x, "T C", sizes)
    check.shape(OP, "weight", weight, "C W", sizes)
    if weight.shape[1] not in _WIDTHS:
        raise ValueError(f"{OP}: weight has shape {list(weight.shape)}; expected [C, W], W 2 to 4.")
    if bias is not None:
        check.shape(OP, "bias", bias, "C", sizes)
    ends = check.cu_seqlens(OP, cu_seqlens, x.shape[0])
    segments = ends.shape[0] - 1
    if parents is not None:
        parents = check_parents(OP, parents, segments)
    if initial_state is not None:
        expected = (segments, weight.shape[1] - 1, x.shape[1])
        if initial_state.shape != expected:
            raise ValueError(
                f"{OP}: initial_state has shape {list(initial_state.shape)}; expected "
                f"{list(expected)}: [S, W - 1, C]."
            )
        check.dtype(OP, "initial_state", initial_state, (x.dtype,))
        initial_state = initial_state.contiguous()
    if activation not in ("silu", None):
        raise ValueError(f"{OP}: activation is {activation!r}; expected 'silu' or None.")
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.t().to(wide).contiguous()
    bias = None if bias is None else bias.to(wide).contiguous()
    chosen = choose_backend(OP, x.device, backend, x.dtype)
    run = _reference if chosen == "reference" else _forward_op
    out: Tensor = run(x, taps, bias, ends, parents, initial_state, activation == "silu")
    return out


def kernels_for(x: Tensor) -> Any:
    """Return what has the kernels for the device of x."""
    if not x.is_cuda:
        return native()
    from . import causal_conv1d_triton

    return causal_conv1d_triton


_ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor? parents, "
    "Tensor? initial_state, bool silu"
)


@custom_op(f"hybridengine::{OP}", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _forward_op(x: Tensor, *arguments: Any) -> Tensor:
    out: Tensor = kernels_for(x).causal_conv1d(unit_inner_stride(x), *arguments)
    return out


@_forward_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@custom_op(
    f"hybridengine::{OP}_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, {_ARGUMENTS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(grad_out: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of x, weight, bias and initial_state; those not `wanted` are empty."""
    operands = map(unit_inner_stride, (grad_out, x))
    grads = kernels_for(x).causal_conv1d_backward(*operands, *arguments)
    *first, grad_initial = (x.new_empty(0) if grad is None else grad for grad in grads)
    return *first, grad_initial.to(x.dtype)


@_backward_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor, wanted: list[bool]
) -> tuple[Tensor, ...]:
    given = zip((x, weight, bias, initial_state), wanted, strict=True)
    return tuple(y.new_empty(y.shape) if want else x.new_empty(0) for y, want in given)


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


@check.differentiable_once(OP)
def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    *of_operands, _, _, of_state = ctx.needs_input_grad[:6]
    wanted = [*of_operands, of_state]
    grads = _backward_op(grad_out, *ctx.saved_tensors, ctx.silu, wanted)
    *of_operands, of_state = (g if want else None for g, want in zip(grads, wanted, strict=True))
    return *of_operands, None, None, of_state


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
) -> Tensor:
    """A segment at a time, after the last rows of its path."""
    before = weight.shape[0] - 1
    zeros = x.new_zeros(before, x.shape[1], dtype=weight.dtype)
    outs, paths = [x[:0].to(weight.dtype)], list[Tensor]()
    bounds = ends.tolist()
    for segment, (begin, end) in enumerate(itertools.pairwise(bounds)):
        parent = -1 if parents is None else int(parents[segment])
        past = zeros if initial_state is None else initial_state[segment].to(weight.dtype)
        if parent >= 0:
            past = paths[parent][-before:]
        path = torch.cat([past, x[begin:end].to(weight.dtype)])
        paths.append(path)
        size = end - begin
        taps = [path[j : j + size] * weight[j] for j in range(before + 1)]
        outs.append(torch.stack(taps).sum(0) + (0 if bias is None else bias))
    out = torch.cat(outs)
    return (F.silu(out) if silu else out).to(x.dtype)
