"""Trained parameters as views of the engine's tensors, where an engine holds them as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hybridengine.sharding.copies import Copy
from hybridengine.sharding.geometry import contiguous_strides
from hybridengine.sharding.layout import EngineLayout, LayoutError, Shape


def parameter_views(
    layout: EngineLayout,
    weights: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return every parameter as a contiguous view of the engine's tensors.

    A part of a fused tensor (q, k and v; gate and up) is such a view if its rows are together.

    weights: the engine's tensors by the names of the layout.
    shapes: of the parameters.
    dtype: of the trainer's computation.

    Raises LayoutError for a parameter that the engine holds in another form.
    """
    copies: dict[str, list[Copy]] = {name: [] for name in shapes}
    for copy in layout.copies:
        if copy.source in copies:
            copies[copy.source].append(copy)
    return {n: _view(n, shapes[n], own, layout, weights, dtype) for n, own in copies.items()}


def _view(
    name: str,
    shape: Shape,
    copies: list[Copy],
    layout: EngineLayout,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    views = []
    for copy in copies:
        tensor = weights[copy.destination]
        if copy.destination in layout.quantized:
            raise LayoutError(f"the engine holds {name!r} quantized")
        if tensor.dtype != dtype:
            raise LayoutError(
                f"the engine holds {name!r} in {tensor.dtype}, and the trainer computes in {dtype}"
            )
        if not _is_contiguous(copy, math.prod(shape)):
            raise LayoutError(
                f"the engine holds {name!r} in another order, or in several parts, in "
                f"{copy.destination!r}"
            )
        offset = tensor.storage_offset() + copy.destination_offset
        views.append(tensor.as_strided(shape, contiguous_strides(shape), offset))
    if name in layout.fallback or not views:
        raise LayoutError(f"the engine does not hold {name!r} as it is")
    if len({view.data_ptr() for view in views}) > 1:
        raise LayoutError(f"the engine holds {name!r} {len(views)} times")
    return views[0]


def _is_contiguous(copy: Copy, numel: int) -> bool:
    """Return whether it copies all `numel` elements of its source to consecutive addresses."""
    axes = zip(copy.sizes, copy.source_strides, copy.destination_strides, strict=True)
    steps = [axis for axis in axes if axis[0] > 1]  # the strides of one step have no meaning
    contiguous = contiguous_strides(tuple(size for size, _, _ in steps))
    strides = ((source, destination) for _, source, destination in steps)
    return copy.numel == numel and list(strides) == [(step, step) for step in contiguous]
