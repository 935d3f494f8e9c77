"""Which rank orthogonalizes which matrix, and when."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from hybridengine.sync.shards import Box, RowRange, ShardSpec

ROUND_BYTES = 32 << 20  # of the matrices that a rank orthogonalizes in one round


class Matrix(NamedTuple):
    """A matrix of a parameter: all of it, one of E of [E, M, N], or some of its rows.

    number: of the matrices of the parameter, in the order of their rows.
    dtype: of the parameter.
    """

    parameter: str
    number: int
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Operations of a Newton-Schulz step; symmetric products count half."""
        short, long = sorted(self.shape)
        return short * short * (3 * long + short)


Round = list[list[Matrix]]
"""For each rank, the matrices that it orthogonalizes at once. All have one shape and dtype."""


def matrices_of(name: str, spec: ShardSpec, rows: int | None = None) -> list[Matrix]:
    """Return the matrices of a parameter, each of `rows` rows; None: of M of [M, N], [E, M, N]."""
    *_, height, columns = spec.shape
    shape = rows or height, columns
    count = math.prod(spec.shape) // math.prod(shape)
    return [Matrix(name, i, shape, spec.dtype) for i in range(count)]


def held_part(matrix: Matrix, spec: ShardSpec, box: Box) -> Box:
    """Return the positions in the parameter that a matrix and the box of a shard share, or ()."""
    number, top = divmod(matrix.number * matrix.shape[0], spec.shape[-2])
    rows, columns = RowRange(top, top + matrix.shape[0]), RowRange(0, spec.shape[-1])
    own = (RowRange(number, number + 1), rows, columns)[-len(box) :]
    part = [
        RowRange(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(own, box, strict=True)
    ]
    return tuple(part) if all(start < stop for start, stop in part) else ()


def assign(
    specs: Mapping[str, ShardSpec], world_size: int, rows: Mapping[str, int] | None = None
) -> list[list[Matrix]]:
    """Return the matrices of each rank.

    rows: of each matrix of a parameter, where it is not one matrix (`matrices_of`).
    Each matrix, the most expensive first, goes to the rank with the least work among those that
    hold a part of it, or among all where that rank would get more than its share.
    """
    holders: dict[Matrix, list[int]] = {}
    for name, spec in specs.items():
        holders |= _holders(matrices_of(name, spec, (rows or {}).get(name)), spec)
    share = sum(matrix.flops for matrix in holders) / world_size
    owned: list[list[Matrix]] = [[] for _ in range(world_size)]
    work = [0] * world_size
    for matrix in sorted(holders, key=lambda m: -m.flops):
        owner = min(holders[matrix], key=work.__getitem__)
        if work[owner] + matrix.flops > share:
            owner = min(range(world_size), key=work.__getitem__)
        owned[owner].append(matrix)
        work[owner] += matrix.flops
    return owned


def _holders(matrices: list[Matrix], spec: ShardSpec) -> dict[Matrix, list[int]]:
    """Return the ranks that hold a part of each matrix, ascending."""
    boxes = [(spec.box(shard), holders) for shard, holders in enumerate(spec.holders)]
    return {
        matrix: sorted({r for box, some in boxes if held_part(matrix, spec, box) for r in some})
        for matrix in matrices
    }


def rounds(owned: list[list[Matrix]], dtype: torch.dtype) -> list[Round]:
    """Divide the work into rounds, so that the ranks have about as much of each.

    dtype: of the computation.
    """
    alike: dict[tuple, Round] = defaultdict(lambda: [[] for _ in owned])
    for rank, matrices in enumerate(owned):
        for matrix in matrices:
            alike[matrix.shape, matrix.dtype][rank].append(matrix)
    result: list[Round] = []
    for (shape, _), by_rank in sorted(alike.items(), key=lambda item: (item[0][0], str(item[0]))):
        at_once = max(1, ROUND_BYTES // (shape[0] * shape[1] * dtype.itemsize))
        count = -(-max(map(len, by_rank)) // at_once)
        for i in range(count):
            parts = [m[len(m) * i // count : len(m) * (i + 1) // count] for m in by_rank]
            result.append(parts)
    return result
