"""tree_attention in Triton, for CUDA: the forward and backward of op.py.

The kernels are in triton_forward.py and triton_backward.py, a forward whose bits do not depend on
the packing in triton_paths.py. Which key blocks a block of queries visits is computed on the device
(triton_tables.py), so the host never waits, and a CUDA graph can capture all of it. Sums are
float32; P and dS are rounded to the dtype of the inputs; products of float32 inputs are exact,
without tensor cores. No autotuning: tiles depend on the head size, the dtype and the GPU alone, so
results do not depend on timing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._launch import ceil_div, launch
from .._once import once
from . import reference
from .reference import Heads, TreeOptions
from .triton_backward import delta_kernel, key_grad_kernel, query_grad_kernel
from .triton_forward import forward_kernel
from .triton_tables import block_tables
from .triton_tiles import (
    MAX_HEAD_SIZE,
    Form,
    Inputs,
    Tiles,
    block_sizes,
    capability_of,
    choose_tiles,
    form_of,
    scale_arguments,
    strided,
)

_DELTA_BLOCK = 64


class _Problem(NamedTuple):
    """Arguments that the kernels share. sign: factor of the caller's query, for a scale <= 0."""

    inputs: Inputs
    options: TreeOptions
    sign: float

    def tiles(self, kernel: str) -> Tiles:
        query, width = self.inputs.query[0], max(self.inputs.width, self.inputs.value_width)
        plain = self.options.window_size is None and self.options.softcap is None
        return choose_tiles(kernel, width, query.dtype.itemsize, capability_of(query), plain)

    def form(self, tiles: Tiles) -> Form:
        window_size, softcap = self.options.window_size, self.options.softcap
        return form_of(self.inputs.width, self.inputs.value_width, window_size, softcap, tiles)

    def trees(self, block_n: int, block_m: int) -> tuple[Tensor, Tensor | None, Tensor]:
        ends, positions, _, window_size, _ = self.options
        sizes = (window_size, block_n, block_m)
        tables = once(sizes, lambda tree, at: block_tables(tree, at, *sizes), ends, positions)
        return ends, positions, tables


def _problem(heads: Heads, options: TreeOptions, grad_out: Tensor | None = None) -> _Problem:
    query, key, value = heads
    scale = options.softmax_scale
    query, scores = scale_arguments(query, scale, options.softcap)
    inputs = Inputs(
        query=strided(query),
        key=strided(key),
        value=strided(value),
        grad_out=None if grad_out is None else strided(grad_out),
        group=query.shape[1] // key.shape[1],
        width=query.shape[2],
        value_width=value.shape[2],
        scale=abs(scale) or 1.0,
        **scores,
    )
    return _Problem(inputs, options, float((scale > 0) - (scale < 0)))


def heads_per_program_of(key_blocks: int, heads: int, kv_heads: int, device: torch.device) -> int:
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
    problem = _problem(inputs, options)
    tiles = problem.tiles("forward")
    trees, grid = (
        problem.trees(tiles.block_n, tiles.block_m),
        (heads, ceil_div(tokens, tiles.block_m)),
    )
    launch(
        forward_kernel,
        grid,
        *(problem.inputs, sinks, trees, out, lse, tokens, trees[2].shape[1]),
        options.window_size or 0,
        form=problem.form(tiles),
        **tiles.options,
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
    problem = _problem(inputs, options, grad_out)
    tokens, heads, value_width = out.shape
    block_v = block_sizes(inputs.query.shape[2], value_width)[1]
    grid = (heads, ceil_div(tokens, _DELTA_BLOCK))
    arguments = (problem.inputs, out, delta, tokens)
    launch(delta_kernel, grid, *arguments, BLOCK=_DELTA_BLOCK, BLOCK_V=block_v)
    _query_grad(problem, lse, delta, grads.query)
    _key_grad(problem, lse, delta, grads.key, grads.value)
    if problem.sign != 1:
        grads = grads._replace(query=grads.query * problem.sign)
    return grads, delta


def _query_grad(problem: _Problem, lse: Tensor, delta: Tensor, grad_query: Tensor) -> None:
    tokens, heads, _ = grad_query.shape
    tiles = problem.tiles("query_grad")
    trees = problem.trees(tiles.block_n, tiles.block_m)
    launch(
        query_grad_kernel,
        (heads, ceil_div(tokens, tiles.block_m)),
        *(problem.inputs, lse, delta, trees, grad_query, tokens, trees[2].shape[1]),
        problem.options.window_size or 0,
        form=problem.form(tiles),
        **tiles.options,
    )


def _key_grad(
    problem: _Problem, lse: Tensor, delta: Tensor, grad_key: Tensor, grad_value: Tensor
) -> None:
    tiles, (heads, tokens), kv_heads = problem.tiles("key_grad"), lse.shape, grad_key.shape[1]
    ends, positions, *_ = problem.options
    blocks = ceil_div(tokens, tiles.block_n)
    per_program = heads_per_program_of(blocks, heads, kv_heads, ends.device)
    parts = heads // per_program
    grads = (grad_key, grad_value)
    sums: tuple[Tensor, ...] = grads
    if parts > kv_heads:
        sums = tuple(x.new_empty(tokens, parts, x.shape[2], dtype=torch.float32) for x in grads)
    window_size = problem.options.window_size
    trees: tuple[Tensor | None, ...] = (ends, positions, None)
    if window_size is not None:
        trees = problem.trees(tiles.block_n, tiles.block_n)
    launch(
        key_grad_kernel,
        (parts, blocks),
        *(problem.inputs, lse, delta, trees, sums, tokens, blocks, per_program, window_size or 0),
        form=problem.form(tiles),
        **tiles.options,
    )
    if parts > kv_heads:
        for grad, partial in zip(grads, sums, strict=True):
            grad.copy_(partial.unflatten(1, (kv_heads, -1)).sum(2))
