"""tree_attention: exact causal attention over packed sequences that may share prefixes.

A packed forest lists every node (a run of tokens) before its children, so that the tokens that
attend to a key are those from the key to the end of its node's subtree: one integer per key
describes the mask. Packed sequences without shared prefixes are the special case of trees of one
node. Softmax and backward are those of FlashAttention (Dao 2023, arXiv 2307.08691): scores are
recomputed from the saved log-sum-exp, and no [T, T] tensor exists.

A sink is a logit of a head that joins the denominator of the softmax: that of a key whose value is
zero (Agarwal et al. 2025, arXiv 2508.10925, section 2.2). The saved log-sum-exp includes it, so the
gradients of query, key and value have the same formula with and without sinks.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .._library import custom_op
from .._once import once
from .._per_token import compute_dtype, unit_inner_stride
from . import reference
from .flash import takes

OP = "tree_attention"
register_backends(OP, cpu=("cpp", "reference"), cuda=("triton", "reference"))

OPTIONS = (
    "Tensor subtree_ends, Tensor? position_ids, float softmax_scale, int? window_size, "
    "float? softcap, str backend"
)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_ends: Tensor,
    position_ids: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    flash: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute softmax(scale q . k) v over the keys that each token sees.

    Token i sees key j if j <= i < subtree_ends[j], and with a window also
    position_ids[i] - position_ids[j] < window_size. With sinks the softmax of head h is over the
    scores and sinks[h], whose weight is then left out.

    Args:
        query: [T, H, D]; key: [T, H_kv, D]; value: [T, H_kv, D_v], of one dtype, any strides. H is
            a multiple of H_kv, and consecutive query heads share a key-value head. Or, as
            transformers passes them, [B, H, L, D], [B, H_kv, L, D] and [B, H_kv, L, D_v], rows of
            T = B L tokens: autograd then has no nodes for their views.
        subtree_ends: [T] int32 or int64, the end of the subtree of each token's node, in packed
            order; for packed sequences the end of the token's sequence. Every token sees itself.
        position_ids: [T] int32 or int64, the depth of each token in its tree; needed with
            window_size or batch_invariant, else unused.
        sinks: [H] of any floating-point dtype, a logit per query head, neither scaled nor capped.
            -inf is no sink, bit for bit; NaN and inf spoil the results of their own head alone.
        softmax_scale: None is D ** -0.5.
        window_size: number of positions that a token sees, its own included; None is all.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.
        batch_invariant: on a GPU, too, the result of a token does not depend on other sequences or
            on whether prefixes are shared, bit for bit, and is that of `paged_attention`; for head
            sizes up to 256. Gradients are those without it. A query, key, value or gradient that is
            not finite gives NaN to the tokens that see each other, and reaches no other.
        flash: on a GPU, where the backend is `triton`, let FlashAttention compute it, in one call
            per level of the forest, if it can (16 bits, D = D_v, no window, soft-cap or sinks) and
            levels are few and long. Its backward adds in the order in which blocks finish, unless
            `torch.use_deterministic_algorithms` is on. Waits for the device once per forest.
        backend: `cpp`, `triton` or `reference`; None takes the best one.

    Returns:
        [T, H, D_v], or [B, L, H, D_v], of the same dtype, contiguous, differentiable (once, in
        reverse mode) in query, key, value and sinks. Sums are float32 (float64 for float64 inputs,
        and for the gradient of sinks) and run in a fixed order. On a CPU the result and the
        gradients of a sequence do not depend on the others, and the result and the gradient of
        query not on whether prefixes are shared, bit for bit; a key or value that is not finite
        gives NaN to the tokens that see it and reaches no other.

    Raises:
        ValueError: shapes, dtypes, devices or numbers that do not fit; on a CPU also a value of
            subtree_ends outside i < end <= T, or (the C++ backend) subtrees that are not nested.

    Example:
        A prompt of two tokens with two responses of one token:

        >>> q, k, v = torch.zeros(4, 1, 8), torch.zeros(4, 1, 8), torch.eye(4)[:, None]
        >>> tree_attention(q, k, v, torch.tensor([4, 4, 3, 4]))[3, 0].mul(3).round().tolist()
        [1.0, 1.0, 0.0, 1.0]
    """
    options = (softmax_scale, window_size, softcap, batch_invariant, flash, backend)
    attend = prepare((query, key, value, sinks), subtree_ends, position_ids, *options)
    return attend(query, key, value, sinks)


class TreeAttention:
    """`tree_attention` over one forest, for tensors and options that were checked.

    options: the arguments of the op after `sinks`.
    """

    __slots__ = ("options",)

    def __init__(self, *options: Any) -> None:
        self.options = options

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is not None:
            sinks = sinks.to(compute_dtype(query)).contiguous()
        return _forward_op(query, key, value, sinks, *self.options)[0]


def prepare(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    subtree_ends: Tensor,
    position_ids: Tensor | None,
    *options: Any,
) -> TreeAttention:
    """Check all arguments once for the layers that share a forest, options, shapes and dtypes.

    Args:
        tensors: query, key, value and sinks of one of the layers.
        options: softmax_scale, window_size, softcap, batch_invariant, flash and backend.
    """
    query, key, value, sinks = tensors
    given = check.signature(OP, query=query, key=key, value=value, sinks=sinks)
    check.not_none(OP, subtree_ends=subtree_ends)

    def checked(ends: Tensor, positions: Tensor | None) -> TreeAttention:
        return _checked(*tensors, ends, positions, *options)

    return once((given, options), checked, subtree_ends, position_ids)


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    subtree_ends: Tensor,
    position_ids: Tensor | None,
    softmax_scale: float | None,
    window_size: int | None,
    softcap: float | None,
    batch_invariant: bool,
    flash: bool,
    backend: str | None,
) -> TreeAttention:
    check.not_none(OP, query=query, key=key, value=value)
    check.same_device(
        OP,
        query=query,
        key=key,
        value=value,
        sinks=sinks,
        subtree_ends=subtree_ends,
        position_ids=position_ids,
    )
    check.floats(OP, query=query, sinks=sinks)
    sizes: check.Sizes = {}
    pattern = "B {} L {}" if query.dim() == 4 else "T {} {}"
    check.shape(OP, "query", query, pattern.format("H", "D"), sizes)
    check.shape(OP, "key", key, pattern.format("H_kv", "D"), sizes)
    check.shape(OP, "value", value, pattern.format("H_kv", "D_v"), sizes)
    if query.dim() == 4:
        sizes["T"] = (query.shape[0] * query.shape[2], "query")
    check.dtype(OP, "key", key, (query.dtype,))
    check.dtype(OP, "value", value, (query.dtype,))
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or heads % kv_heads or query.shape[-1] == 0:
        raise ValueError(
            f"{OP}: query has shape {list(query.shape)} and key {list(key.shape)}; expected D of "
            "at least 1 and a number of heads that is a multiple of the key's: repeat key heads."
        )
    if sinks is not None:
        check.shape(OP, "sinks", sinks, "H", sizes)
    check.shape(OP, "subtree_ends", subtree_ends, "T", sizes)
    ends, positions = once("ends", _int32_ends, subtree_ends), None
    if window_size is not None:
        window_size = check.integer(OP, "window_size", window_size, at_least=1)
    if window_size is not None or batch_invariant:
        check.not_none(OP, position_ids=position_ids)
        assert position_ids is not None
        check.shape(OP, "position_ids", position_ids, "T", sizes)
        positions = once("positions", _int32_positions, position_ids)
    if softcap is not None:
        softcap = check.number(OP, "softcap", softcap, above=0)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scale = check.number(OP, "softmax_scale", scale)
    backend = choose_backend(OP, query.device, backend, query.dtype)
    if flash and not batch_invariant and takes(query, value, sinks, scale, window_size, softcap):
        backend = "flash" if backend == "triton" else backend
    return TreeAttention(ends, positions, scale, window_size, softcap, backend, batch_invariant)


def _int32_positions(position_ids: Tensor) -> Tensor:
    # Not the same tensor, which would be kept by what is kept for it.
    return check.int32(OP, "position_ids", position_ids).detach()


def _int32_ends(subtree_ends: Tensor) -> Tensor:
    ends = check.int32(OP, "subtree_ends", subtree_ends)
    if check.readable(ends):
        _check_ends(ends)
    return ends.detach()


def _check_ends(ends: Tensor) -> None:
    tokens = torch.arange(ends.shape[0])
    wrong = (ends <= tokens) | (ends > ends.shape[0])
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"{OP}: subtree_ends[{i}] is {int(ends[i])}; expected more than {i} and at most "
            f"{ends.shape[0]}, the number of tokens: the end of the subtree, in packed order."
        )


def tokens_first(x: Tensor) -> Tensor:
    """Return [T, H, D] of it, or of [B, H, L, D]."""
    if x.dim() == 3:
        return x
    return x.squeeze(0).transpose(0, 1) if x.shape[0] == 1 else x.transpose(1, 2).flatten(0, 1)


@custom_op(
    f"hybridengine::{OP}",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? sinks, {OPTIONS}, "
    "bool batch_invariant) -> (Tensor, Tensor)",
)
def _forward_op(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """out, and the log-sum-exp of scores and sink [H, T], float32 or float64."""
    *tree, backend, batch_invariant = options
    if backend == "cpp" and (query.dim() == 3 or query.shape[0] == 1):  # takes a row as it is
        given = unit_inner_stride(query), unit_inner_stride(key), unit_inner_stride(value)
        return native().attention_forward(*given, sinks, *tree)
    heads = reference.Heads(tokens_first(query), tokens_first(key), tokens_first(value))
    if backend == "cpp":
        out, lse = native().attention_forward(*map(unit_inner_stride, heads), sinks, *tree)
    elif batch_invariant and backend == "triton":
        from .triton_paths import path_attention

        out, lse = path_attention(heads, reference.TreeOptions(*tree), sinks)
    else:
        module = _module(backend)
        out, lse = module.tree_attention_forward(heads, reference.TreeOptions(*tree), sinks)
    if query.dim() == 4:  # in place: the result is no view
        out.resize_(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return out, lse


def _module(backend: str) -> ModuleType:
    """Return the passes of a backend, of `flash` or, for a backward, of `exact`."""
    module: ModuleType = reference
    if backend == "triton":
        from . import triton as module
    elif backend == "flash":
        from . import flash_forest as module
    elif backend == "exact":
        from . import triton_finite as module
    return module


@_forward_op.register_fake
def _(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    *tokens, heads, _ = (query if query.dim() == 3 else query.transpose(1, 2)).shape
    out = query.new_empty(*tokens, heads, value.shape[-1])
    return out, query.new_empty(heads, math.prod(tokens), dtype=compute_dtype(query))


@custom_op(
    f"hybridengine::{OP}_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, and delta [H, T]: grad_out . out."""
    *tree, backend = options
    operands: tuple[Tensor, ...] = grad_out, query, key, value, out
    in_rows = query.dim() == 4
    if in_rows and (query.shape[0] > 1 or backend != "cpp"):
        operands = grad_out.flatten(0, 1), *map(tokens_first, operands[1:4]), out.flatten(0, 1)
    if backend == "cpp":
        given = [unit_inner_stride(x) for x in operands]
        *grads, delta = native().attention_backward(*given, lse, *tree)
    else:
        grad_out, *heads, out = operands
        run = _module(backend).tree_attention_backward
        options = reference.TreeOptions(*tree)
        grads, delta = run(grad_out, reference.Heads(*heads), out, lse, options)
    if in_rows:
        if grads[0].dim() == 3:
            grads = [x.unflatten(0, (query.shape[0], query.shape[2])) for x in grads]
        grads = [x.transpose(1, 2) for x in grads]
    return *grads, delta


@_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    if query.dim() == 3:
        return tuple(x.new_empty(x.shape) for x in (query, key, value, lse))
    in_order = (x.transpose(1, 2) for x in (query, key, value))
    return *(x.new_empty(x.shape).transpose(1, 2) for x in in_order), lse.new_empty(lse.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.scale, ctx.window_size, ctx.softcap, backend, batch_invariant = inputs
    ctx.backend = "exact" if batch_invariant and backend == "triton" else backend
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


@check.differentiable_once(OP)
def _backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return ()
    query, key, value, sinks, ends, position_ids, out, lse = ctx.saved_tensors
    *grads, delta = _backward_op(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        ends,
        position_ids,
        ctx.scale,
        ctx.window_size,
        ctx.softcap,
        ctx.backend,
    )
    grad_sinks = None
    if ctx.needs_input_grad[3]:
        # Its value is zero: the gradient of its score is p (0 - delta).
        grad_scores = (sinks[:, None] - lse).exp() * -delta
        grad_sinks = grad_scores.sum(1, dtype=torch.float64).to(sinks.dtype)
    return *grads, grad_sinks


_forward_op.register_autograd(_backward, setup_context=_setup_context, num_differentiable=1)
