"""Trained parameters as views of the engine's tensors, where an engine holds them as they are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, Shape


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
    dtype: of the computation.

    Raises LayoutError for a parameter that the engine holds in another form.
    """
    copies = copies_of(layout, weights, shapes, dtype)
    return {
        name: _view(name, shape, weights[copies[name][0].destination], copies[name])
        for name, shape in shapes.items()
    }


def copies_of(
    layout: EngineLayout,
    weights: Mapping[str, torch.Tensor],
    sources: Collection[str],
    dtype: torch.dtype,
) -> dict[str, list[Copy]]:
    """Return for each of the parameters `sources` the copies that write it into the engine, once.

    Raises LayoutError for a parameter whose values the engine does not have in `dtype`, or twice.
    """
    parts: dict[str, dict[str, list[Copy]]] = {name: defaultdict(list) for name in sources}
    for copy in layout.copies:
        if copy.source in parts:
            parts[copy.source][copy.destination].append(copy)
    found = {}
    for name, by_destination in parts.items():
        if (
            name in layout.fallback
            or not by_destination
            or by_destination.keys() & layout.quantized
        ):
            raise LayoutError(f"the engine does not hold the values of {name!r}")
        first, *others = by_destination
        if other := {weights[destination].dtype for destination in by_destination} - {dtype}:
            raise LayoutError(
                f"the engine holds {name!r} in {other.pop()}, and the trainer computes in {dtype}"
            )
        found[name] = by_destination[first]
        written = {(weights[first].data_ptr(), c.read, c.written) for c in found[name]}
        for destination in others:
            own = by_destination[destination]
            if {(weights[destination].data_ptr(), c.read, c.written) for c in own} != written:
                raise LayoutError(f"the engine holds {name!r} {len(by_destination)} times")
    return found


def _view(name: str, shape: Shape, tensor: torch.Tensor, copies: list[Copy]) -> torch.Tensor:
    """Return the view of an engine's tensor into which `copies` write a parameter."""
    # Element i of the parameter has to be element i + offset of the tensor.
    offsets = {copy.destination_offset - copy.source_offset for copy in copies}
    is_complete = sum(copy.numel for copy in copies) == math.prod(shape)
    if len(offsets) > 1 or not is_complete or not all(map(_keeps_distances, copies)):
        raise LayoutError(f"the engine holds {name!r} in another order, or not all of it")
    offset = tensor.storage_offset() + offsets.pop()
    return tensor.as_strided(shape, contiguous_strides(shape), offset)


def _keeps_distances(copy: Copy) -> bool:
    steps = zip(copy.sizes, copy.source_strides, copy.destination_strides, strict=True)
    return all(size == 1 or source == destination for size, source, destination in steps)
