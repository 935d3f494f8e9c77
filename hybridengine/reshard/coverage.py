"""Proof, at planning time, that every element of every engine tensor is written exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from hybridengine.reshard.layout import EngineLayout, LayoutError, TensorSpec

__all__ = ["check_coverage"]

_Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides, in elements


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
    """Counts the writes of every grain: a run of elements that no region cuts."""
    whole = (0, spec.shape, spec.stride)
    grain = math.gcd(*(n for region in (whole, *copies, *constants) for n in _borders(region)))
    last = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    count = np.zeros(last // grain + 1, np.uint8)

    def view(region: _Region) -> np.ndarray:
        offset, sizes, strides = _coarse(region, grain)
        return np.lib.stride_tricks.as_strided(count[offset:], sizes, strides)

    for region in copies:
        view(region)[...] += 1
    twice = bool(count.max() > 1)
    for region in constants:
        view(region)[...] = 1
    missing = int((view(whole) == 0).sum()) * grain
    if twice:
        raise LayoutError(f"engine tensor {name!r}: some elements would be written twice")
    if missing:
        raise LayoutError(
            f"engine tensor {name!r}: {missing} of {math.prod(spec.shape)} elements are written by "
            "no checkpoint tensor"
        )


def _borders(region: _Region) -> Iterator[int]:
    """Numbers that a run has to divide for the region to be made of whole runs."""
    offset, sizes, strides = region
    axes = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    yield offset
    yield from (s for _, s in axes if s != 1)
    yield next((n for n, s in axes if s == 1), 1)


def _coarse(region: _Region, grain: int) -> _Region:
    """The region in runs of `grain` elements instead of elements."""
    offset, sizes, strides = region
    axes = [
        (n // grain, 1) if s == 1 and n != 1 else (n, s // grain)
        for n, s in zip(sizes, strides, strict=True)
    ]
    return offset // grain, tuple(n for n, _ in axes), tuple(s for _, s in axes)
