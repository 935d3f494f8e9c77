"""Proof, at planning time, that every element of every engine tensor is written exactly once, and
that every element of every trained parameter is read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from hybridengine.sharding.copies import Copy
from hybridengine.sharding.geometry import contiguous_strides, reach
from hybridengine.sharding.layout import EngineLayout, LayoutError, TensorSpec

__all__ = ["check_coverage", "check_sources", "describe_differences"]

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


def check_sources(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Sequence[EngineLayout],
    unused: Set[str] = frozenset(),
) -> None:
    """Raise LayoutError for a trained parameter of which no engine reads some element.

    shapes: parameter → global shape. layouts: of all TP ranks. unused: what need not be read. What
    an engine's own loader gets (fallback) counts as read.
    """
    copies: dict[str, list[Copy]] = defaultdict(list)
    exempt = set(unused)
    for layout in layouts:
        exempt |= layout.fallback.keys()
        for c in layout.copies:
            copies[c.source].append(c)
    proved: set[tuple] = set()  # the layers of a model repeat
    for name, shape in shapes.items():
        regions = {(c.source_offset, c.sizes, c.source_strides) for c in copies[name]}
        case = (shape, frozenset(regions))
        if name in exempt or case in proved:
            continue
        if unread := _count_unread(shape, sorted(regions)):
            total = math.prod(shape)
            parts = ", ".join(_describe_reach(shape, copies[name])) or "parts of it"
            what = f"only {parts}" if copies[name] else "nothing"
            raise LayoutError(
                f"the engine reads {what} of the trained parameter {name!r} of shape {shape}: "
                f"{unread} of its {total} elements are used by no engine tensor, so the engine is "
                "smaller than, or built otherwise than, the trained model. Build both from one "
                "configuration."
            )
        proved.add(case)


def _count_unread(shape: tuple[int, ...], regions: Sequence[_Region]) -> int:
    if not regions:
        return math.prod(shape)
    whole = (0, shape, contiguous_strides(shape))
    grain = math.gcd(*(n for region in (whole, *regions) for n in _borders(region)))
    read = np.zeros(math.prod(shape) // grain, np.bool_)
    for region in regions:
        offset, sizes, strides = _coarse(region, grain)
        np.lib.stride_tricks.as_strided(read[offset:], sizes, strides)[...] = True
    return int(read.size - read.sum()) * grain


def _describe_reach(shape: tuple[int, ...], copies: Sequence[Copy]) -> Iterator[str]:
    """How far the copies reach on each dimension that they do not reach the end of."""
    blocks = [c.block(shape) for c in copies]
    for dim, size in enumerate(shape):
        if blocks and (end := max(reach(block, dim)[1] for block in blocks)) < size:
            yield f"the first {end} of {size} positions on dimension {dim}"


_INCIDENTAL = ("_token_id", "dtype", "version", "name_or_path", "use_cache", "architectures")


def describe_differences(trained: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """A sentence with the configuration keys, in both, whose values differ; "" where none does."""
    ours, theirs = (dict(_flatten(config)) for config in (trained, engine))
    found = [
        f"{key} ({value} in the trained model, {theirs[key]} in the engine)"
        for key, value in ours.items()
        if key in theirs and theirs[key] != value and not key.endswith(_INCIDENTAL)
    ]
    return f" Their configurations differ in {', '.join(found[:5])}." if found else ""


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value


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
