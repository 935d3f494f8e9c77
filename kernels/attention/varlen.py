"""Causal attention over packed sequences by FlashAttention's two passes, differentiable.

One Function over plain functions: `torch.nn.attention.varlen.varlen_attn` is a custom op of 14
arguments, whose dispatch takes more host time than both passes here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import _check as check
from .flash import ATEN, FlashPair, Runs
from .op import tokens_first

OP = "flash_attention"


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window_size: int | None = None,
    pair: FlashPair = ATEN,
) -> Tensor:
    """Compute causal attention: query [T, H, D], key and value [T, H_kv, D] -> [T, H, D].

    Or query [B, H, L, D], key and value [B, H_kv, L, D] -> [B, L, H, D], of T = B L tokens. Nothing
    is checked: `FlashKernel.fits` says what the passes take.

    Args:
        cu_seqlens: int32 [N + 1], from 0 to T; max_seqlen: the longest sequence.
        window_size: keys that a token sees, its own included; None: all.
    """
    options = (cu_seqlens, max_seqlen, softmax_scale, window_size, pair)
    if query.dim() == 3 or (query.shape[0] == 1 and not torch.compiler.is_compiling()):
        return _FlashAttention.apply(query, key, value, *options)
    heads = tokens_first(query), tokens_first(key), tokens_first(value)
    out: Tensor = _FlashAttention.apply(*heads, *options)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


class _FlashAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        softmax_scale: float,
        window_size: int | None,
        pair: FlashPair,
    ) -> Tensor:
        ctx.options = (max_seqlen, max_seqlen, True, softmax_scale, window_size)
        ctx.pair = pair
        heads = tokens_first(query), tokens_first(key), tokens_first(value)
        out, lse = pair.forward(*heads, Runs(cu_seqlens, cu_seqlens, *ctx.options))
        if query.dim() == 4:
            out.unsqueeze_(0)  # in place: the result is no view
        ctx.save_for_backward(query, key, value, cu_seqlens, out, lse)
        return out

    @staticmethod
    @check.differentiable_once(OP)
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cu_seqlens, out, lse = ctx.saved_tensors
        runs = Runs(cu_seqlens, cu_seqlens, *ctx.options)
        if query.dim() == 4:
            grad_out, out = grad_out.squeeze(0), out.squeeze(0)
        heads = tokens_first(query), tokens_first(key), tokens_first(value)
        grads = ctx.pair.backward(grad_out, *heads, out, lse, runs)
        if query.dim() == 4:
            grads = tuple([x.transpose(0, 1).unsqueeze(0) for x in grads])
        return (*grads, *[None] * 5)
