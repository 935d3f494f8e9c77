"""Blocks against brute force: every element of a view, cut along any dimension."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.blocks import (
    NotABlock,
    contiguous_strides,
    count_below,
    cut,
    factor,
    reach,
)
from tests.sync.brute_force import walk


@st.composite
def views(draw) -> tuple[tuple[int, ...], torch.Tensor]:
    """A view of a contiguous tensor as loaders take them: narrow, transpose, split, flatten."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    view = torch.arange(int(np.prod(shape))).reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["narrow", "transpose", "split", "flatten", "select"]))
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else 0
        if kind == "narrow" and view.dim():
            start = draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "transpose" and view.dim() > 1:
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "split" and view.dim():
            n = view.shape[dim]
            parts = draw(st.sampled_from([p for p in range(1, n + 1) if n % p == 0]))
            view = view.unflatten(dim, (parts, n // parts))
        elif kind == "flatten" and view.is_contiguous() and view.dim():
            view = view.view(-1)
        elif kind == "select" and view.dim() > 1:
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
    return shape, view


@settings(max_examples=300, deadline=None)
@given(views(), st.data())
def test_cut_keeps_exactly_the_interval(case, data) -> None:
    shape, view = case
    dense = contiguous_strides(tuple(view.shape))
    try:
        block = factor(shape, view.storage_offset(), view.shape, view.stride(), 0, dense)
    except NotABlock:
        return  # refusing is allowed; a wrong answer is not
    dim = data.draw(st.integers(0, len(shape) - 1))
    low = data.draw(st.integers(0, shape[dim]))
    high = data.draw(st.integers(low, shape[dim]))
    strides = contiguous_strides(shape)
    got: list[tuple[int, int]] = []
    for part in cut(block, dim, low, high):
        offset, steps = part.address(strides, (0,) * len(shape))
        source = walk(offset, part.sizes, steps)
        target = walk(part.offset, part.sizes, part.strides)
        got += zip(source.tolist(), target.tolist(), strict=True)
    values = view.reshape(-1).tolist()
    coordinate = [v // strides[dim] % shape[dim] for v in values]
    expected = [(v, i) for i, v in enumerate(values) if low <= coordinate[i] < high]
    assert sorted(got) == sorted(expected)
    below = count_below(block, dim, np.array([low, high]))
    per_position = np.prod([axis.size for axis in block.axes if axis.dim != dim], dtype=int)
    assert (below[1] - below[0]) * per_position == len(expected)
    assert reach(block, dim) == (min(coordinate), max(coordinate) + 1)


def test_plain_loader_views_are_all_blocks() -> None:
    """The views vLLM's loaders take of a weight must never fall back."""
    weight = torch.arange(12 * 8).reshape(12, 8)
    for view in (
        weight,
        weight[3:7],
        weight[:, 2:6],
        weight.view(-1),
        weight.t(),
        weight.view(3, 4, 8)[1:, 2],
        weight.view(3, 4, 8).transpose(0, 1),
    ):
        factor((12, 8), view.storage_offset(), view.shape, view.stride(), 0, view.stride())
