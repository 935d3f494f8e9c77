"""Values that are not finite reach the tokens that see them, and no other: of exact operators.

A tile of the kernels has tokens of several sequences, and the product of a weight of 0 and such a
value is NaN. Rows that have one are therefore replaced before the kernels read them. The key of a
token becomes NaN and its value 0: scores of tokens that see it are NaN, masked ones are replaced
before they are used. For the backward all rows of a token that has one become 0, those of keys,
too, and the log-sum-exp of such a query NaN, hence its weights of keys that it sees.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import ceil_div, launch, next_power_of_2
from . import triton as tree
from .reference import Heads, TreeOptions
from .triton_tiles import strided

_ROWS = 16


@triton.jit
def is_other(x):
    """Whether an entry is not finite."""
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit(do_not_specialize=["tokens"])
def replace_kernel(
    tensors,
    results,
    lse,
    new_lse,
    tokens,
    MARK_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy rows of a head; programs [heads, T / BLOCK].

    tensors: each [T, heads, width], its strides of a token and a head, and its width. results:
    contiguous. MARK_FIRST: rows of the first one become NaN, not 0.
    """
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_W)[None, :]
    inside = row < tokens
    others = row < 0
    for i in tl.static_range(len(tensors)):
        x, stride, head_stride, width = tensors[i]
        address = x + head * head_stride + row[:, None] * stride + column
        values = tl.load(address, mask=inside[:, None] & (column < width), other=0.0)
        others = others | (tl.max(is_other(values).to(tl.int32), 1) > 0)
    if lse is not None:
        sums = tl.load(lse + head * tokens + row, mask=inside, other=0.0)
        others = others | is_other(sums)
        sums = tl.where(others, float("nan"), sums)
        tl.store(new_lse + head * tokens + row, sums, mask=inside)
    for i in tl.static_range(len(tensors)):
        x, stride, head_stride, width = tensors[i]
        address = x + head * head_stride + row[:, None] * stride + column
        mask = inside[:, None] & (column < width)
        values = tl.load(address, mask=mask, other=0.0)
        given = float("nan") if MARK_FIRST and i == 0 else 0.0
        values = tl.where(others[:, None], given, values).to(values.dtype)
        to = results[i] + (row * heads + head)[:, None] * width + column
        tl.store(to, values, mask=mask)


def replace_rows(
    tensors: tuple[Tensor, ...], lse: Tensor | None = None, mark_first: bool = False
) -> tuple[list[Tensor], Tensor | None]:
    """Return copies of tensors [T, heads, *], and of lse [heads, T], see the module."""
    tokens, heads, _ = tensors[0].shape
    results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    new_lse = None if lse is None else torch.empty_like(lse)
    launch(
        replace_kernel,
        (heads, ceil_div(tokens, _ROWS)),
        tuple((*strided(x), x.shape[2]) for x in tensors),
        *(tuple(results), lse, new_lse, tokens),
        MARK_FIRST=mark_first,
        BLOCK=_ROWS,
        BLOCK_W=next_power_of_2(max(x.shape[2] for x in tensors)),
    )
    return results, new_lse


def tree_attention_backward(
    grad_out: Tensor, heads: Heads, out: Tensor, lse: Tensor, options: TreeOptions
) -> tuple[Heads, Tensor]:
    """Return the gradients of query, key and value, and delta [H, T]: see triton.py."""
    if lse.numel() == 0:
        return tree.tree_attention_backward(grad_out, heads, out, lse, options)
    (query, grad_out, out), marked = replace_rows((heads.query, grad_out, out), lse)
    (key, value), _ = replace_rows((heads.key, heads.value))
    assert marked is not None
    heads = Heads(query, key, value)
    grads, delta = tree.tree_attention_backward(grad_out, heads, out, marked, options)
    return grads, delta.masked_fill_(marked.isnan(), torch.nan)
