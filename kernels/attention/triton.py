"""tree_attention in Triton, for CUDA: the forward and backward of op.py.

The kernels are in triton_forward.py and triton_backward.py, a forward whose bits do not depend on
the packing in triton_paths.py. Which key blocks a block of queries visits is computed on the device
(triton_tables.py), so the host never waits, and a CUDA graph can capture all of it. Sums are
float32; P and dS are rounded to the dtype of the inputs; products of float32 inputs are exact,
without tensor cores. No autotuning: tiles depend on the head size, the dtype and the GPU alone, so
results do not depend on timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._launch import ceil_div, launch
from . import reference
from .reference import Heads, TreeOptions
from .triton_backward import delta_kernel, key_grad_kernel, query_grad_kernel
from .triton_forward import forward_kernel
from .triton_tables import block_tables
from .triton_tiles import (
    MAX_HEAD_SIZE,
    Tiles,
    block_sizes,
    capability_of,
    choose_tiles,
    scale_arguments,
    strides,
)

_DELTA_BLOCK = 64


class _Problem(NamedTuple):
    """Arguments that the kernels share. sign: factor of the caller's query, for a scale <= 0."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    sign: float
    sizes: dict[str, Any]
    flags: dict[str, Any]

    def tiles(self, kernel: str) -> Tiles:
        head_size = max(self.query.shape[2], self.value.shape[2])
        plain = not (self.flags["HAS_WINDOW"] or self.flags["HAS_CAP"])
        capability = capability_of(self.query)
        return choose_tiles(kernel, head_size, self.query.dtype.itemsize, capability, plain)


def _problem(inputs: Heads, options: TreeOptions) -> _Problem:
    query, key, value = inputs
    _, _, softmax_scale, window_size, softcap = options
    width, value_width = query.shape[2], value.shape[2]
    query, scores = scale_arguments(query, softmax_scale, softcap)
    query, key, value = map(_unit_stride, (query, key, value))
    sizes = {
        **{"group": query.shape[1] // key.shape[1], "width": width, "value_width": value_width},
        **strides(query=query, key=key, value=value),
        **{"window_size": window_size or 0, **scores},
    }
    flags = {
        **{"HAS_WINDOW": window_size is not None, "HAS_CAP": softcap is not None},
        **block_sizes(width, value_width),
    }
    sign = float((softmax_scale > 0) - (softmax_scale < 0))
    return _Problem(query, key, value, abs(softmax_scale) or 1.0, sign, sizes, flags)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _heads_per_program(key_blocks: int, heads: int, kv_heads: int, device: torch.device) -> int:
    """Return how many query heads of a group one program of key_grad_kernel sums over.

    Key blocks of a prompt have many queries, others few: as many programs as balance the GPU.
    """
    group, processors = heads // kv_heads, 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    for splits in range(1, group):
        if group % splits == 0 and key_blocks * kv_heads * splits >= 4 * processors:
            return group // splits
    return 1


def tree_attention_forward(
    inputs: Heads, options: TreeOptions, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D_v] and the log-sum-exp of scores and sink, [H, T] float32."""
    query, _, value = inputs
    (tokens, heads, _), value_width = query.shape, value.shape[2]
    out = query.new_empty(tokens, heads, value_width)
    lse = query.new_empty(heads, tokens, dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    if max(query.shape[2], value_width) > MAX_HEAD_SIZE:
        return reference.tree_attention_forward(inputs, options, sinks)
    subtree_ends, position_ids, _, window_size, _ = options
    problem = _problem(inputs, options)
    tiles = problem.tiles("forward")
    tables = block_tables(subtree_ends, position_ids, window_size, tiles.block_n, tiles.block_m)
    launch(
        forward_kernel,
        (heads, ceil_div(tokens, tiles.block_m)),
        problem.query,
        problem.key,
        problem.value,
        sinks,
        subtree_ends,
        position_ids,
        tables,
        out,
        lse,
        tokens,
        tables.shape[1],
        **problem.sizes,
        **problem.flags,
        HAS_SINKS=sinks is not None,
        **tiles.arguments,
    )
    return out, lse


def tree_attention_backward(
    grad_out: Tensor, inputs: Heads, out: Tensor, lse: Tensor, options: TreeOptions
) -> tuple[Heads, Tensor]:
    """Return the gradients of query, key and value, and delta [H, T]: grad_out . out."""
    grads = Heads(*(x.new_empty(x.shape) for x in inputs))
    delta = torch.empty_like(lse)
    if lse.numel() == 0:
        return grads, delta
    if max(inputs.query.shape[2], inputs.value.shape[2]) > MAX_HEAD_SIZE:
        return reference.tree_attention_backward(grad_out, inputs, out, lse, options)
    subtree_ends, position_ids, _, window_size, _ = options
    problem = _problem(inputs, options)
    grad_out = _unit_stride(grad_out)
    tokens, heads, value_width = out.shape
    launch(
        delta_kernel,
        (heads, ceil_div(tokens, _DELTA_BLOCK)),
        grad_out,
        out,
        delta,
        tokens,
        grad_out.stride(0),
        grad_out.stride(1),
        value_width,
        BLOCK=_DELTA_BLOCK,
        BLOCK_V=problem.flags["BLOCK_V"],
    )
    problem.sizes.update(strides(grad=grad_out), scale=problem.scale)
    rows = (problem.query, problem.key, problem.value, grad_out, lse, delta)
    _query_grad(problem, rows, subtree_ends, position_ids, window_size, grads.query)
    _key_grad(problem, rows, subtree_ends, position_ids, window_size, grads.key, grads.value)
    if problem.sign != 1:
        grads = grads._replace(query=grads.query * problem.sign)
    return grads, delta


def _query_grad(
    problem: _Problem,
    rows: tuple[Tensor, ...],
    ends: Tensor,
    positions: Tensor | None,
    window_size: int | None,
    grad_query: Tensor,
) -> None:
    tokens, heads, _ = grad_query.shape
    tiles = problem.tiles("query_grad")
    tables = block_tables(ends, positions, window_size, tiles.block_n, tiles.block_m)
    launch(
        query_grad_kernel,
        (heads, ceil_div(tokens, tiles.block_m)),
        *rows,
        ends,
        positions,
        tables,
        grad_query,
        tokens,
        tables.shape[1],
        **problem.sizes,
        **problem.flags,
        **tiles.arguments,
    )


def _key_grad(
    problem: _Problem,
    rows: tuple[Tensor, ...],
    ends: Tensor,
    positions: Tensor | None,
    window_size: int | None,
    grad_key: Tensor,
    grad_value: Tensor,
) -> None:
    tiles = problem.tiles("key_grad")
    (tokens, heads, _), kv_heads = rows[0].shape, grad_key.shape[1]
    blocks = ceil_div(tokens, tiles.block_n)
    per_program = _heads_per_program(blocks, heads, kv_heads, ends.device)
    parts = heads // per_program
    sums = grads = [grad_key, grad_value]
    if parts > kv_heads:
        sums = [x.new_empty(tokens, parts, x.shape[2], dtype=torch.float32) for x in grads]
    tables = None
    if window_size is not None:
        tables = block_tables(ends, positions, window_size, tiles.block_n, tiles.block_n)
    launch(
        key_grad_kernel,
        (parts, blocks),
        *rows,
        ends,
        positions,
        tables,
        *sums,
        tokens,
        blocks,
        heads=per_program,
        **problem.sizes,
        **problem.flags,
        **tiles.arguments,
    )
    if parts > kv_heads:
        for grad, partial in zip(grads, sums, strict=True):
            grad.copy_(partial.unflatten(1, (kv_heads, -1)).sum(2))
