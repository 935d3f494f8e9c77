"""Detect permutations that an engine applies to its weights after loading.

A kernel may want the rows of its experts interleaved or its columns in blocks, and the engine then
permutes the loaded weights, often in place, with address, shape and strides unchanged. Here its
processing runs again over numbered elements; the permutation is read from the result and expressed
as strided copies, so that a sync writes each element to its permuted position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from hybridengine.sync.blocks import NotABlock, contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, compose, merge

# Element size → (integer type, lowest pattern, number of patterns). All patterns are normal,
# positive, finite numbers in every floating-point type of that size, so copies preserve them.
_PATTERNS = {
    1: (torch.int8, 0x20, 1 << 5),
    2: (torch.int16, 0x1000, 1 << 14),
    4: (torch.int32, 0x20000000, 1 << 24),
}
_CHUNK = 1 << 24  # elements numbered at a time
_MAX_COPIES = 512  # per tensor; a permutation that needs more is not regular


class _Axis(NamedTuple):
    """One dimension of a strided copy between two flat arrays."""

    size: int
    source_step: int
    destination_step: int


def find_reordering(
    tensors: Mapping[str, torch.Tensor], process: Callable[[], None]
) -> dict[str, list[Copy]]:
    """Return for each tensor the copies from it as loaded to it as processed.

    tensors: contiguous; their values are restored.
    process: permutes them in place. It is called once per digit of the largest element number, at
      most three times for 16-bit elements.

    Raises LayoutError, whose message begins with the tensor's name, for anything but a regular
    permutation.
    """
    for name, tensor in tensors.items():
        if tensor.itemsize not in _PATTERNS or not tensor.is_contiguous():
            raise LayoutError(f"{name}: {tensor.dtype} with strides {tuple(tensor.stride())}")
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    digits: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    try:
        for digit in range(max(map(_num_digits, tensors.values()))):
            for tensor in tensors.values():
                _write_digit(tensor, digit)
            process()
            for name, tensor in tensors.items():
                digits[name].append(_integers(tensor).clone())
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
    copies = {}
    for name, tensor in tensors.items():
        try:
            copies[name] = _copies(name, tensor, digits[name][: _num_digits(tensor)])
        except NotABlock as error:
            raise LayoutError(f"{name}: {error}") from None
    return copies


def undo_reordering(processed: torch.Tensor, copies: list[Copy]) -> torch.Tensor:
    """Return the loaded tensor from which `copies` made `processed`."""
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
    """Return the layout of an engine that has applied `reorderings` to some of its tensors.

    source_shapes: trained parameter → shape. Raises LayoutError where the two do not compose.
    """
    permuted = reorderings.keys() & layout.destinations.keys()
    if not permuted:
        return layout
    if loaded := sorted(permuted & layout.by_loader):
        raise LayoutError(
            f"engine tensor {loaded[0]!r} is made by the engine's own loader and reordered after "
            "loading, so it cannot be written in place"
        )
    copies = [c for c in layout.copies if c.destination not in permuted]
    constants = [c for c in layout.constants if c[0] not in permuted]
    shapes = {name: spec.shape for name, spec in layout.destinations.items()}
    for name in sorted(permuted):
        writes = [c for c in layout.copies if c.destination == name]
        constants_of_tensor = [c for c in layout.constants if c[0] == name]
        try:
            parts = [part for read in reorderings[name] for part in compose(read, writes)]
            for part in parts:
                part.block(source_shapes[part.source])
            copies += merge(parts, source_shapes, shapes)
            for _, offset, sizes, strides, value in constants_of_tensor:
                fill = Copy("", name, 0, offset, sizes, contiguous_strides(sizes), strides)
                for read in reorderings[name]:
                    constants += [(name, *c.written, value) for c in compose(read, [fill])]
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
    """Return a flat view of the tensor as integers."""
    return tensor.view(-1).view(_PATTERNS[tensor.itemsize][0])


def _write_digit(tensor: torch.Tensor, digit: int) -> None:
    """Set element i to the pattern of digit number `digit` of i."""
    kind, first, base = _PATTERNS[tensor.itemsize]
    for i, part in enumerate(_integers(tensor).split(_CHUNK)):
        number = torch.arange(part.numel(), device=tensor.device) + i * _CHUNK
        part.copy_((number // base**digit % base + first).to(kind))


def _copies(name: str, tensor: torch.Tensor, digits: list[torch.Tensor]) -> list[Copy]:
    """Return the copies that explain the processed elements; experts permuted alike share copies.

    digits: the processed tensor, for each digit of the element numbers.
    """
    experts = tensor.shape[0] if tensor.ndim > 2 else 1
    size = tensor.numel() // experts
    copies = []
    for index, members in _permutations(tensor, digits, experts):
        starts = torch.tensor([lowest for _, lowest in members])
        for source_offset, offset, axes in _strided(index):
            for first_member, count, source_step in _runs(starts):
                run = members[first_member : first_member + count]
                gaps = {after[0] - before[0] for before, after in itertools.pairwise(run)}
                if len(gaps) > 1:
                    raise NotABlock("its experts are permuted without a regular pattern")
                outer = (_Axis(count, source_step, gaps.pop() * size),) if gaps else ()
                strided = zip(*(outer + axes), strict=True)  # sizes, source and own strides
                expert, lowest = run[0]
                copies.append(
                    Copy(name, name, lowest + source_offset, expert * size + offset, *strided)
                )
    if len(copies) > _MAX_COPIES:
        raise NotABlock("its elements are permuted without a regular pattern")
    return copies


def _permutations(
    tensor: torch.Tensor, digits: list[torch.Tensor], experts: int
) -> list[tuple[torch.Tensor, list[tuple[int, int]]]]:
    """Return the distinct permutations of experts (parts along the first dimension).

    Each is (index of the loaded element at every position, minus its lowest; [(expert, lowest)]).
    """
    _, first, base = _PATTERNS[tensor.itemsize]
    size = tensor.numel() // experts
    seen = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    permutations: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []
    for expert in range(experts):
        index = torch.zeros(size, dtype=torch.int64, device=tensor.device)
        for digit, patterns in enumerate(digits):
            part = patterns[expert * size : (expert + 1) * size].to(torch.int64) - first
            if bool(((part < 0) | (part >= base)).any()):
                raise NotABlock("its values are computed, not copied")
            index += part * base**digit
        if int(index.max()) >= tensor.numel():
            raise NotABlock("its values are computed, not copied")
        seen[index] = True
        lowest = int(index.min())
        for known, members in permutations:
            if torch.equal(known, index - lowest):
                members.append((expert, lowest))
                break
        else:
            permutations.append((index - lowest, [(expert, lowest)]))
    if not bool(seen.all()):
        raise NotABlock("some of the loaded elements are dropped")
    return permutations


def _strided(index: torch.Tensor) -> list[tuple[int, int, tuple[_Axis, ...]]]:
    """Return `out[i] = in[index[i]]` as copies (source offset, destination offset, axes).

    Equal runs become an axis, level by level, outermost first. What remains is one copy per run.
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
            moves = list(zip(steps, backward, strict=True))
            source = int(index[start]) + sum(i * a.source_step for i, a in moves)
            offset = start * step + sum(i * a.destination_step for i, a in moves)
            copies.append((source, offset, (*outer, *forward) or (_Axis(1, 1, 1),)))
    return copies


def _runs(index: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (start, size, step) of the ascending arithmetic runs that `index` consists of."""
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
