"""Permutations that an engine applies to its weights after loading, found by content.

A kernel may want the rows of its experts interleaved or its columns in blocks, and the engine then
permutes the loaded weights, often in place: address, shape and stride stay what they were. Here its
processing is run once more over numbered elements, the permutation is read off and written as
strided copies, so that a sync writes each element where the engine keeps it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from hybridengine.sharding.copies import Copy, compose, merge
from hybridengine.sharding.geometry import NotABlock, contiguous_strides
from hybridengine.sharding.layout import EngineLayout, LayoutError

__all__ = ["find_reordering", "reordered_layout", "undo_reordering"]

# Element size → (integer type, first pattern, patterns): all are normal, positive, finite numbers
# in every floating-point type of that size, so that copies keep them.
_PATTERNS = {
    1: (torch.int8, 0x20, 1 << 5),
    2: (torch.int16, 0x1000, 1 << 14),
    4: (torch.int32, 0x20000000, 1 << 24),
}
_CHUNK = 1 << 24  # elements numbered at a time
_MAX_COPIES = 512  # per tensor: more is no regular pattern


class _Axis(NamedTuple):
    """One dimension of a strided copy between two flat arrays."""

    size: int
    source_step: int
    destination_step: int


def find_reordering(
    tensors: Mapping[str, torch.Tensor], process: Callable[[], None]
) -> dict[str, list[Copy]]:
    """For each tensor the copies that `process` does, from it as loaded to it as processed.

    tensors: contiguous; their values are put back. process: what the engine does to them, in place;
    it runs once per digit of an element's number, at most three times for 16-bit elements.

    Raises LayoutError, which begins with a tensor's name, for what is no regular permutation.
    """
    for name, tensor in tensors.items():
        if tensor.itemsize not in _PATTERNS or not tensor.is_contiguous():
            raise LayoutError(f"{name}: {tensor.dtype} with strides {tuple(tensor.stride())}")
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    try:
        for digit in range(max(map(_num_digits, tensors.values()))):
            for tensor in tensors.values():
                _write_digit(tensor, digit)
            process()
            for name, tensor in tensors.items():
                found[name].append(_integers(tensor).clone())
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    copies = {}
    for name, tensor in tensors.items():
        try:
            copies[name] = _copies(name, tensor, found[name][: _num_digits(tensor)])
        except NotABlock as error:
            raise LayoutError(f"{name}: {error}") from None
    return copies


def undo_reordering(processed: torch.Tensor, copies: list[Copy]) -> torch.Tensor:
    """The tensor as it was loaded, of which `copies` made `processed`."""
    loaded = torch.empty_like(processed)
    for c in copies:
        region = loaded.as_strided(c.sizes, c.source_strides, c.source_offset)
        offset = processed.storage_offset() + c.destination_offset
        region.copy_(processed.as_strided(c.sizes, c.destination_strides, offset))
    return loaded


def reordered_layout(
    layout: EngineLayout,
    reorderings: Mapping[str, list[Copy]],
    source_shapes: Mapping[str, tuple[int, ...]],
) -> EngineLayout:
    """The layout of an engine that has applied `reorderings` to some of its tensors.

    source_shapes: trained parameter → shape. Raises LayoutError where the two do not compose.
    """
    moved = reorderings.keys() & layout.destinations.keys()
    if loaded := sorted(moved & layout.by_loader):
        raise LayoutError(
            f"engine tensor {loaded[0]!r} is made by the engine's own loader and reordered after "
            "loading, so it cannot be written in place"
        )
    copies = [c for c in layout.copies if c.destination not in moved]
    constants = [entry for entry in layout.constants if entry[0] not in moved]
    shapes = {name: spec.shape for name, spec in layout.destinations.items()}
    for name in sorted(moved):
        writes = [c for c in layout.copies if c.destination == name]
        fills = [entry for entry in layout.constants if entry[0] == name]
        try:
            parts = [part for read in reorderings[name] for part in compose(read, writes)]
            for part in parts:
                part.block(source_shapes[part.source])
            copies += merge(parts, source_shapes, shapes)
            for _, offset, sizes, strides, value in fills:
                fill = Copy("", name, 0, offset, sizes, contiguous_strides(sizes), strides)
                for read in reorderings[name]:
                    for c in compose(read, [fill]):
                        region = (c.destination_offset, c.sizes, c.destination_strides)
                        constants.append((name, *region, value))
        except NotABlock as error:
            raise LayoutError(
                f"engine tensor {name!r} is reordered after loading in a way that cannot be "
                f"written as strided copies of the trained parameters: {error}"
            ) from None
    return replace(layout, copies=copies, constants=constants).ordered()


def _num_digits(tensor: torch.Tensor) -> int:
    base = _PATTERNS[tensor.itemsize][2]
    digits = 1
    while base**digits < tensor.numel():
        digits += 1
    return digits


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, flat."""
    return tensor.view(-1).view(_PATTERNS[tensor.itemsize][0])


def _write_digit(tensor: torch.Tensor, digit: int) -> None:
    """Give element i the pattern of the `digit`-th digit of i."""
    kind, first, base = _PATTERNS[tensor.itemsize]
    start = 0
    for part in _integers(tensor).split(_CHUNK):
        number = torch.arange(start, start + part.numel(), device=tensor.device)
        part.copy_((number // base**digit % base + first).to(kind))
        start += part.numel()


def _copies(name: str, tensor: torch.Tensor, digits: list[torch.Tensor]) -> list[Copy]:
    """The copies behind the patterns that were found; experts (the first dimension) one by one."""
    _, first, base = _PATTERNS[tensor.itemsize]
    experts = tensor.shape[0] if tensor.ndim > 2 else 1
    size = tensor.numel() // experts
    seen = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    kinds: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []  # pattern, [(expert, lowest)]
    for expert in range(experts):
        index = torch.zeros(size, dtype=torch.int64, device=tensor.device)
        for digit, bits in enumerate(digits):
            part = bits[expert * size : (expert + 1) * size].to(torch.int64) - first
            if bool(((part < 0) | (part >= base)).any()):
                raise NotABlock("its values are computed, not copied")
            index += part * base**digit
        if int(index.max()) >= tensor.numel():
            raise NotABlock("its values are computed, not copied")
        seen[index] = True
        lowest = int(index.min())
        for pattern, members in kinds:
            if torch.equal(pattern, index - lowest):
                members.append((expert, lowest))
                break
        else:
            kinds.append((index - lowest, [(expert, lowest)]))
    if not bool(seen.all()):
        raise NotABlock("some of what is loaded is dropped")
    copies = []
    for pattern, members in kinds:
        starts = torch.tensor([lowest for _, lowest in members])
        for source_offset, offset, axes in _strided(pattern):
            for first_member, count, source_step in _runs(starts):
                run = members[first_member : first_member + count]
                gaps = {after[0] - before[0] for before, after in itertools.pairwise(run)}
                if len(gaps) > 1:
                    raise NotABlock("its experts are permuted without a regular pattern")
                outer = (_Axis(count, source_step, gaps.pop() * size),) if gaps else ()
                copies.append(
                    Copy(
                        name,
                        name,
                        run[0][1] + source_offset,
                        run[0][0] * size + offset,
                        *zip(*(outer + axes), strict=True),
                    )
                )
    if len(copies) > _MAX_COPIES:
        raise NotABlock("its elements are permuted without a regular pattern")
    return copies


def _strided(index: torch.Tensor) -> list[tuple[int, int, tuple[_Axis, ...]]]:
    """`out[i] = in[index[i]]` as copies (source offset, destination offset, axes outermost first).

    Equal runs become an axis, level by level; what then is irregular is one copy per run.
    """
    axes: list[_Axis] = []  # innermost first
    step = 1
    while index.numel() > 1:
        differences = index.diff()
        breaks = (differences != differences[0]).nonzero()
        run = int(breaks[0]) + 1 if len(breaks) else index.numel()
        if run == 1 or index.numel() % run:
            break
        rows = index.view(-1, run)
        if bool((rows.diff(dim=1) != differences[0]).any()):
            break
        axes.insert(0, _Axis(run, int(differences[0]), step))
        index, step = rows[:, 0], step * run
    copies = []
    forward = tuple(a for a in axes if a.source_step > 0)
    backward = [a for a in axes if a.source_step <= 0]
    runs = _runs(index)
    if len(runs) * math.prod(a.size for a in backward) > _MAX_COPIES:
        raise NotABlock("its elements are permuted without a regular pattern")
    for start, size, source_step in runs:
        outer = (_Axis(size, source_step, step),) if size > 1 else ()
        for steps in itertools.product(*(range(a.size) for a in backward)):
            turned = list(zip(steps, backward, strict=True))
            source = int(index[start]) + sum(i * a.source_step for i, a in turned)
            offset = start * step + sum(i * a.destination_step for i, a in turned)
            copies.append((source, offset, (*outer, *forward) or (_Axis(1, 1, 1),)))
    return copies


def _runs(index: torch.Tensor) -> list[tuple[int, int, int]]:
    """(start, size, step) of the ascending arithmetic runs that `index` falls into."""
    if index.numel() > 2 * _MAX_COPIES and int((index.diff().diff() != 0).sum()) > 2 * _MAX_COPIES:
        raise NotABlock("its elements are permuted without a regular pattern")
    values, runs, start = index.tolist(), [], 0
    while start < len(values):
        end = start + 1
        step = values[end] - values[start] if end < len(values) else 0
        while step > 0 and end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        runs.append((start, end - start, step if end - start > 1 else 1))
        start = end
    return runs
