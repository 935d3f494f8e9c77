"""tree_attention by FlashAttention (`cascade.py`) where that is worth it, else by `triton.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._once import once
from .._per_token import unit_inner_stride
from . import triton as tree
from .cascade import cascade_backward, cascade_forward
from .cascade_tables import Cascade, cascades_of
from .flash_choice import flash_pair
from .reference import Heads, TreeOptions


def tree_attention_forward(
    heads: Heads, options: TreeOptions, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and the log-sum-exp of scores, [H, T] float32.

    Of a forest that no cascade is worth it for, and in a CUDA graph, which cannot wait for the
    device, by the kernels of triton.py.
    """
    if cascades := _cascades(options.subtree_ends):
        pair = flash_pair(heads.query.device, heads.query.shape[2])
        return cascade_forward(heads, options.softmax_scale, cascades[0], pair)
    return tree.tree_attention_forward(heads, options, sinks)


def tree_attention_backward(
    grad_out: Tensor, heads: Heads, out: Tensor, lse: Tensor, options: TreeOptions
) -> tuple[Heads, Tensor]:
    """Return the gradients of query, key and value, and zeros: delta is for sinks alone."""
    if cascades := _cascades(options.subtree_ends):
        pair = flash_pair(heads.query.device, heads.query.shape[2])
        scale, grad_out = options.softmax_scale, unit_inner_stride(grad_out)
        grads = cascade_backward(grad_out, heads, out, lse, scale, cascades[0], pair)
        return grads, torch.zeros_like(lse)
    return tree.tree_attention_backward(grad_out, heads, out, lse, options)


def _cascades(subtree_ends: Tensor) -> tuple[Cascade, ...]:
    if subtree_ends.numel() == 0:
        return ()
    if subtree_ends.is_cuda and torch.cuda.is_current_stream_capturing():
        return ()
    return once("cascades", cascades_of, subtree_ends)
