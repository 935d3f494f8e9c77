"""linear_recurrence: gated linear attention over packed segments, with or without the delta rule.

One family per head with a state S [D_k, D_v]: Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464,
equation 10), KDA (Kimi Linear, arXiv 2510.26692), Mamba2 (Dao and Gu 2024, arXiv 2405.21060) and
lightning attention (Qin et al. 2024, arXiv 2401.04658). A segment starts from the state in which
its parent ended, so a prompt that several responses share is computed once.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends
from ._library import custom_op
from ._per_token import unit_inner_stride

OP = "linear_recurrence"
register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))

_NORM_EPS = 1e-6  # of flash-linear-attention's l2norm


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    parents: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    delta_rule: bool = True,
    l2_norm: bool = False,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a gated linear recurrence over the tokens of each segment.

    For each token: S = exp(g) S, then S = S + k (beta (v - S^T k))^T, or without the delta rule
    S = S + k (beta v)^T, and out = scale S^T q. Gated DeltaNet has a g per head, KDA one per
    channel of the key. Mamba2 is delta_rule=False, q = C, k = B, v = x dt, g = A dt, scale = 1.

    Args:
        q, k: [T, H_k, D_k]; v: [T, H_v, D_v], of one dtype (float64: on the reference backend). H_v
            is a multiple of H_k, and consecutive heads of v share a head of q and k.
        g: [T, H_v] or [T, H_v, D_k], the log of the decay, at most 0.
        beta: [T, H_v]; None is 1.
        cu_seqlens: [S + 1] int32 or int64, 0 and the end of every segment; a segment may be empty.
        parents: [S] int32 or int64, the earlier segment from whose last state a segment starts;
            -1: from `initial_state`. None: -1 for all.
        initial_state: [S, H_v, D_k, D_v], read for segments without a parent; None is 0.
        scale: None is D_k ** -0.5.
        l2_norm: divide q and k by sqrt(sum of squares + 1e-6) first.
        output_final_state: also return the last state of every segment.
        backend: `cpp` (CPU), `triton` (CUDA) or `reference`; None takes the best one.

    Returns:
        (out [T, H_v, D_v] of the dtype of v, final states [S, H_v, D_k, D_v] or None),
        differentiable (once, in reverse mode) in all tensors but cu_seqlens and parents. States
        are float32 (float64 for float64 inputs) and sums run in a fixed order: the bits of a token
        and of a state depend on the segment's own past alone, and gradients on its own tree alone.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that do not fit, or a parent that is not an
            earlier segment.

    Example:
        A prompt of one token with two responses of one token; a state that only adds up:

        >>> x = torch.ones(3, 1, 1)
        >>> ends, parents = torch.tensor([0, 1, 2, 3]), torch.tensor([-1, 0, 0])
        >>> out, _ = linear_recurrence(
        ...     x, x, x, torch.zeros(3, 1), cu_seqlens=ends, parents=parents, delta_rule=False
        ... )
        >>> out.flatten().tolist()
        [1.0, 2.0, 2.0]
    """
    check.not_none(OP, q=q, k=k, v=v, g=g, cu_seqlens=cu_seqlens)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    check.same_device(OP, **tensors, cu_seqlens=cu_seqlens, parents=parents)
    check.reverse_mode_only(OP, **tensors)
    check.floats(OP, **tensors)
    sizes: check.Sizes = {}
    for name, x, dims in (("q", q, "H_k D_k"), ("k", k, "H_k D_k"), ("v", v, "H_v D_v")):
        check.shape(OP, name, x, f"T {dims}", sizes)
        check.dtype(OP, name, x, (q.dtype,))
    if 0 in q.shape[1:] or 0 in v.shape[1:] or v.shape[1] % q.shape[1]:
        raise ValueError(
            f"{OP}: q has shape {list(q.shape)} and v {list(v.shape)}; expected sizes of at least "
            "1 and a number of heads of v that is a multiple of that of q and k."
        )
    check.shape(OP, "g", g, "T H_v D_k" if g.dim() == 3 else "T H_v", sizes)
    if beta is not None:
        check.shape(OP, "beta", beta, "T H_v", sizes)
    ends = check.cu_seqlens(OP, cu_seqlens, q.shape[0])
    sizes["S"] = (ends.shape[0] - 1, "cu_seqlens")
    if parents is not None:
        parents = check_parents(OP, parents, ends.shape[0] - 1)
    if initial_state is not None:
        check.shape(OP, "initial_state", initial_state, "S H_v D_k D_v", sizes)
    scale = q.shape[2] ** -0.5 if scale is None else check.number(OP, "scale", scale, above=0)
    wide = torch.promote_types(q.dtype, torch.float32)
    g = g.to(wide).contiguous()
    beta, initial_state = (
        None if x is None else x.to(wide).contiguous() for x in (beta, initial_state)
    )
    chosen = choose_backend(OP, q.device, backend, q.dtype)
    if chosen == "reference":
        out, states = _reference(
            q, k, v, g, beta, ends, parents, initial_state, scale, delta_rule, l2_norm
        )
        return out, states if output_final_state else None
    needs_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state)
    )
    arguments = (q, k, v, g, beta, ends, parents, initial_state, scale, delta_rule, l2_norm)
    out, states, _ = _forward_op(*arguments, needs_grad, output_final_state)
    return out, states if output_final_state else None


def check_parents(op: str, parents: Tensor, segments: int) -> Tensor:
    """Check the parents of segments: [S] int32 or int64, earlier segments or -1; return int32."""
    check.shape(op, "parents", parents, "S", {"S": (segments, "cu_seqlens")})
    parents = check.int32(op, "parents", parents).contiguous()
    if not check.readable(parents):
        return parents
    index = torch.arange(segments, device=parents.device)
    wrong = (parents < -1) | (parents >= index)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"{op}: parents[{i}] is {int(parents[i])}; expected an earlier segment, or -1 for none."
        )
    return parents


def kernels_for(x: Tensor) -> tuple[Any, Any]:
    """Return what has the kernels for the device of x, forwards and backwards."""
    if not x.is_cuda:
        return native(), native()
    from . import linear_recurrence_triton, linear_recurrence_triton_backward

    return linear_recurrence_triton, linear_recurrence_triton_backward


_OPTIONS = "float scale, bool delta_rule, bool l2_norm"
_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor cu_seqlens, Tensor? parents, "
    "Tensor? initial_state"
)


@custom_op(
    f"hybridengine::{OP}",
    mutates_args=(),
    schema=f"({_OPERANDS}, {_OPTIONS}, bool keep_states, bool wants_final) "
    "-> (Tensor, Tensor, Tensor)",
)
def _forward_op(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, the last states (empty unless wanted), and the states that the backward starts from."""
    forward, _ = kernels_for(q)
    out, states, final = forward.linear_recurrence(*map(unit_inner_stride, (q, k, v)), *arguments)
    return out, final, states


@_forward_op.register_fake
def _(q: Tensor, v: Tensor, cu_seqlens: Tensor, wants_final: bool) -> tuple[Tensor, Tensor, Tensor]:
    segments = cu_seqlens.shape[0] - 1 if wants_final else 0
    state = (v.shape[1], q.shape[2], v.shape[2])
    kept = torch.library.get_ctx().new_dynamic_size()
    final, states = (q.new_empty(n, *state, dtype=torch.float32) for n in (segments, kept))
    return v.new_empty(v.shape), final, states


@custom_op(
    f"hybridengine::{OP}_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_final, {_OPERANDS}, Tensor states, {_OPTIONS}, "
    "bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    grad_out: Tensor, grad_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, g, beta and initial_state; those not `wanted` are empty."""
    _, backward = kernels_for(q)
    grads = backward.linear_recurrence_backward(
        unit_inner_stride(grad_out), grad_final, *map(unit_inner_stride, (q, k, v)), *arguments
    )
    of_heads = (  # of v, of which several share one of q and k
        None if x is None else x.unflatten(1, (q.shape[1], -1)).sum(2).to(q.dtype)
        for x in grads[:2]
    )
    return tuple(q.new_empty(0) if x is None else x for x in (*of_heads, *grads[2:]))


@_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    given = zip((q, k, v, g, beta, initial_state), wanted, strict=True)
    return tuple(x.new_empty(x.shape) if want else q.new_empty(0) for x, want in given)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale, ctx.delta_rule, ctx.l2_norm, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[2])


@check.differentiable_once(OP)
def _backward(
    ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_final is None:
        return ()
    *tensors, states = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[2])  # of v
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    *of_tokens, _, _, of_state = ctx.needs_input_grad[:8]
    wanted = [*of_tokens, of_state]
    options = (ctx.scale, ctx.delta_rule, ctx.l2_norm)
    grads = _backward_op(grad_out, grad_final, *tensors, states, *options, wanted)
    *of_tokens, of_state = (g if want else None for g, want in zip(grads, wanted, strict=True))
    return *of_tokens, None, None, of_state


_forward_op.register_autograd(_backward, setup_context=_setup_context, num_differentiable=2)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    ends: Tensor,
    parents: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    delta_rule: bool,
    l2_norm: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token, of products that autocast leaves alone."""
    wide = g.dtype
    shared = v.shape[1] // q.shape[1]
    q, k, wide_v = q.to(wide), k.to(wide), v.to(wide)
    if l2_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(shared, 1) for x in (q, k))
    decay = (g if g.dim() == 3 else g[..., None]).exp()[..., None]  # [T, H_v, D_k or 1, 1]
    zeros = q.new_zeros(v.shape[1], q.shape[2], v.shape[2])
    outs, finals = [], list[Tensor]()
    bounds = ends.tolist()
    for segment, (begin, end) in enumerate(itertools.pairwise(bounds)):
        parent = -1 if parents is None else int(parents[segment])
        state = zeros if initial_state is None else initial_state[segment]
        if parent >= 0:
            state = finals[parent]
        for t in range(begin, end):
            state = state * decay[t]
            update = wide_v[t]
            if delta_rule:
                update = update - (state * k[t][:, :, None]).sum(1)
            if beta is not None:
                update = update * beta[t][:, None]
            state = state + k[t][:, :, None] * update[:, None]
            outs.append((state * q[t][:, :, None]).sum(1) * scale)
        finals.append(state)
    out = torch.stack(outs).to(v.dtype) if outs else v.clone()
    return out, torch.stack(finals) if finals else zeros.new_empty(0, *zeros.shape)
