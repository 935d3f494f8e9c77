"""Checks at planning time: engine tensors are written exactly once, trained parameters are read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from hybridengine.sync.copies import Copy, Region
from hybridengine.sync.geometry import contiguous_strides, reach
from hybridengine.sync.layout import EngineLayout, LayoutError, TensorSpec

if TYPE_CHECKING:
    from hybridengine.sync.plan.buckets import Bucket


def check_coverage(layout: EngineLayout) -> None:
    """Raise LayoutError unless every element of every engine tensor is written exactly once.

    A constant region (vocabulary padding) may be overwritten by a copy. Tensors that the engine's
    own loader writes (fallback) are not checked.
    """
    copies: dict[str, list[Region]] = defaultdict(list)
    constants: dict[str, list[Region]] = defaultdict(list)
    for c in layout.copies:
        copies[c.destination].append(c.written)
    for name, offset, sizes, strides, _ in layout.constants:
        constants[name].append((offset, sizes, strides))
    checked: set[tuple] = set()  # layers of a model repeat
    for name, spec in layout.destinations.items():
        case = (spec.shape, spec.stride, tuple(copies[name]), tuple(constants[name]))
        if name in layout.by_loader or case in checked or math.prod(spec.shape) == 0:
            continue
        _check_tensor(name, spec, copies[name], constants[name])
        checked.add(case)


def _check_tensor(
    name: str, spec: TensorSpec, copies: Sequence[Region], constants: Sequence[Region]
) -> None:
    """Check one tensor, counting in runs of `grain` elements, which no region cuts."""
    full = (0, spec.shape, spec.stride)
    grain = math.gcd(*(n for region in (full, *copies, *constants) for n in _run_lengths(region)))
    last = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    count = np.zeros(last // grain + 1, np.uint8)

    for region in copies:
        _view(count, region, grain)[...] += 1
    twice = bool(count.max() > 1)
    for region in constants:
        _view(count, region, grain)[...] = 1
    missing = int((_view(count, full, grain) == 0).sum()) * grain
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
    """Raise LayoutError for a trained parameter that the engines read only in part.

    shapes: parameter → global shape.
    layouts: the engine layouts of all TP ranks.
    unused: parameters that need not be read.
    Parameters of a fallback count as read.
    """
    copies: dict[str, list[Copy]] = defaultdict(list)
    exempt = set(unused)
    for layout in layouts:
        exempt |= layout.fallback.keys()
        for c in layout.copies:
            copies[c.source].append(c)
    checked: set[tuple] = set()  # layers of a model repeat
    for name, shape in shapes.items():
        regions = {c.read for c in copies[name]}
        case = (shape, frozenset(regions))
        if name in exempt or case in checked:
            continue
        if unread := _count_unread(shape, sorted(regions)):
            total = math.prod(shape)
            parts = ", ".join(_describe_reach(shape, copies[name])) or "parts of it"
            what = f"only {parts}" if copies[name] else "nothing"
            raise LayoutError(
                f"the engine reads {what} of the trained parameter {name!r} of shape {shape}: "
                f"{unread} of its {total} elements are used by no engine tensor. The engine is "
                "smaller than the trained model or has another structure. Build both from one "
                "configuration."
            )
        checked.add(case)


def _count_unread(shape: tuple[int, ...], regions: Sequence[Region]) -> int:
    if not regions:
        return math.prod(shape)
    full = (0, shape, contiguous_strides(shape))
    grain = math.gcd(*(n for region in (full, *regions) for n in _run_lengths(region)))
    read = np.zeros(math.prod(shape) // grain, np.bool_)
    for region in regions:
        _view(read, region, grain)[...] = True
    return int(read.size - read.sum()) * grain


def _describe_reach(shape: tuple[int, ...], copies: Sequence[Copy]) -> Iterator[str]:
    """Yield how far the copies reach on each dimension that they do not read to the end."""
    blocks = [c.block(shape) for c in copies]
    for dim, size in enumerate(shape):
        if blocks and (end := max(reach(block, dim)[1] for block in blocks)) < size:
            yield f"the first {end} of {size} positions on dimension {dim}"


def check_casts(buckets: Iterable[Bucket]) -> None:
    """Raise LayoutError for a parameter that cannot be cast to the engine's dtype."""
    for bucket in buckets:
        source, engine = bucket.source_dtype, bucket.engine_dtype
        if source != engine and not source.is_floating_point:
            name, _ = bucket.chunks[0]
            raise LayoutError(
                f"parameter {name!r} is {source}, which cannot be cast to the engine's "
                f"{engine}: a quantized model cannot be synced. Train in a floating-point "
                "dtype."
            )


def _run_lengths(region: Region) -> Iterator[int]:
    """Yield numbers that a run length has to divide, so that the region consists of full runs."""
    offset, sizes, strides = region
    axes = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    yield offset
    yield from (s for _, s in axes if s != 1)
    yield next((n for n, s in axes if s == 1), 1)


def _view(cells: np.ndarray, region: Region, grain: int) -> np.ndarray:
    """Return the cells (one byte each) of a region; a cell stands for `grain` elements."""
    offset, sizes, strides = region
    axes = [
        (n // grain, 1) if s == 1 and n != 1 else (n, s // grain)
        for n, s in zip(sizes, strides, strict=True)
    ]
    shape, steps = zip(*axes, strict=True) if axes else ((), ())
    return np.lib.stride_tricks.as_strided(cells[offset // grain :], shape, steps)
