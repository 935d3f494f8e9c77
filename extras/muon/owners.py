"""Which rank orthogonalizes which matrix, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from hybridengine.sync.shards import ShardSpec

ROUND_BYTES = 32 << 20  # of the matrices that a rank orthogonalizes in one round


class Matrix(NamedTuple):
    """A matrix of a parameter; one of E if the parameter is [E, M, N].

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


def matrices_of(name: str, spec: ShardSpec) -> list[Matrix]:
    *count, rows, columns = spec.shape
    return [Matrix(name, i, (rows, columns), spec.dtype) for i in range(count[0] if count else 1)]


def assign(specs: Mapping[str, ShardSpec], world_size: int) -> list[list[Matrix]]:
    """Return the matrices of each rank.

    Each matrix, the most expensive first, goes to the rank with the least work among those that
    hold a part of it, or among all where that rank would get more than its share.
    """
    holders = {m: h for name, spec in specs.items() for m, h in _holders(name, spec).items()}
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


def _holders(name: str, spec: ShardSpec) -> dict[Matrix, list[int]]:
    """Return the ranks that hold a part of each matrix, ascending."""
    matrices = matrices_of(name, spec)
    ranks: list[set[int]] = [set() for _ in matrices]
    for shard, holders in enumerate(spec.holders):
        *first, rows, columns = spec.box(shard)
        if rows.start < rows.stop and columns.start < columns.stop:
            for number in range(*first[0]) if first else (0,):
                ranks[number].update(holders)
    return {matrix: sorted(some) for matrix, some in zip(matrices, ranks, strict=True)}


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
