"""Every element of a trained parameter is read by an engine, or the plan is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.checks import check_sources
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError


def reading(name: str, view: torch.Tensor) -> Copy:
    """The copy of a view of parameter `name` into an engine tensor of its shape."""
    strides = contiguous_strides(tuple(view.shape))
    return Copy(name, "engine", view.storage_offset(), 0, tuple(view.shape), view.stride(), strides)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_unread_elements_are_counted(data) -> None:
    """Against marking each element, over several ranks' slices, strided and overlapping too."""
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    marks = torch.zeros(shape)
    layouts = []
    for _ in range(data.draw(st.integers(1, 4))):
        view = marks
        for dim, size in enumerate(shape):
            low = data.draw(st.integers(0, size - 1))
            high = data.draw(st.integers(low + 1, size))
            step = data.draw(st.integers(1, 2))
            view = view[(slice(None),) * dim + (slice(low, high, step),)]
        view.fill_(1)
        layouts.append(EngineLayout({}, [reading("w", view)]))
    unread = int((marks == 0).sum())
    if not unread:
        check_sources({"w": shape}, layouts)
        return
    with pytest.raises(LayoutError) as refused:
        check_sources({"w": shape}, layouts)
    assert f"{unread} of its {math.prod(shape)} elements" in str(refused.value)
    check_sources({"w": shape}, layouts, unused={"w"})
    check_sources({"w": shape}, [*layouts, EngineLayout({}, fallback={"w": "e: computed"})])


def test_the_dimension_that_is_too_short_is_named() -> None:
    gate = torch.empty(160, 128)
    halves = [EngineLayout({}, [reading("gate", gate[low : low + 48])]) for low in (0, 48)]
    text = "the engine reads only the first 96 of 160 positions on dimension 0 of the trained "
    with pytest.raises(LayoutError, match=re.escape(text + "parameter 'gate' of shape (160, 128)")):
        check_sources({"gate": (160, 128)}, halves)
    with pytest.raises(LayoutError, match="reads nothing of the trained parameter 'head'"):
        check_sources({"head": (4, 4)}, halves)
