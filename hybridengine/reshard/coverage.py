"""Proof, at planning time, that every element of every engine tensor is written exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hybridengine.reshard.geometry import NotABlock, contiguous_strides, factor
from hybridengine.reshard.layout import EngineLayout, LayoutError, TensorSpec

__all__ = ["check_coverage"]

_Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides, in elements
_Box = tuple[tuple[int, int], ...]  # [low, high) per dimension


def check_coverage(layout: EngineLayout) -> None:
    """Raise LayoutError for an engine element that no copy writes, or that two copies write.

    A constant region (vocabulary padding) counts where no copy writes; tensors of a declared
    fallback are the engine's own business.
    """
    copies: dict[str, list[_Region]] = defaultdict(list)
    constants: dict[str, list[_Region]] = defaultdict(list)
    for c in layout.copies:
        copies[c.destination].append((c.destination_offset, c.sizes, c.destination_strides))
    for name, offset, sizes, strides, _ in layout.constants:
        constants[name].append((offset, sizes, strides))
    proved: set[tuple] = set()  # the layers of a model repeat
    for name, spec in layout.destinations.items():
        case = (spec.shape, spec.stride, tuple(copies[name]), tuple(constants[name]))
        if name in layout.by_loader or case in proved or math.prod(spec.shape) == 0:
            continue
        _check_tensor(name, spec, copies[name], constants[name])
        proved.add(case)


def _check_tensor(
    name: str, spec: TensorSpec, copies: Sequence[_Region], constants: Sequence[_Region]
) -> None:
    boxes = _boxes(spec, copies)
    if boxes is None or constants:
        missing, twice = _by_counting(spec, copies, constants)
    else:
        twice = any(_meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
        volume = sum(math.prod(high - low for low, high in box) for box in boxes)
        missing = math.prod(spec.shape) - volume
    if twice:
        raise LayoutError(f"engine tensor {name!r}: some elements would be written twice")
    if missing:
        raise LayoutError(
            f"engine tensor {name!r}: {missing} of {math.prod(spec.shape)} elements are written by "
            "no checkpoint tensor"
        )


def _boxes(spec: TensorSpec, copies: Sequence[_Region]) -> list[_Box] | None:
    """The copies as boxes of a contiguous tensor; None where one is not a box."""
    if spec.stride != contiguous_strides(spec.shape):
        return None
    boxes = []
    for offset, sizes, strides in copies:
        try:
            block = factor(spec.shape, offset, sizes, strides, 0, strides)
        except NotABlock:
            return None
        dims = [dim for dim, _ in block.axes]
        if any(step != 1 for _, step in block.axes) or len(set(dims)) < len(dims):
            return None
        extent = dict(zip(dims, block.sizes, strict=True))
        boxes.append(tuple((low, low + extent.get(d, 1)) for d, low in enumerate(block.start)))
    return boxes


def _meet(a: _Box, b: _Box) -> bool:
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))


def _by_counting(
    spec: TensorSpec, copies: Sequence[_Region], constants: Sequence[_Region]
) -> tuple[int, bool]:
    """(elements written by nothing, whether any is written twice), one counter per element."""
    span = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    count = np.zeros(span, np.uint8)

    def view(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(count[offset:], sizes, strides)

    for region in copies:
        view(*region)[...] += 1
    twice = bool(count.max() > 1)
    for region in constants:
        view(*region)[...] = 1
    return int((view(0, spec.shape, spec.stride) == 0).sum()), twice
