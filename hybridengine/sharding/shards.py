"""How a trained parameter is sharded over the training ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridengine.sharding.layout import LayoutError


class RowRange(NamedTuple):
    """Rows [start, stop) of a tensor, counted along its sharded dimension."""

    start: int
    stop: int


@dataclass(frozen=True)
class ShardSpec:
    """Placement of one trained parameter on the training ranks.

    shape: global shape, (1,) for a scalar. dim: the sharded dimension. It is split as torch.chunk
    does: the last shards may be smaller or empty. holders: for each shard, the ranks that hold it
    (several under HSDP or replication). frozen: the parameter is sent once. merged: every sync
    sends the sum of the parameter and its adapter; computing it takes memory of the bucket.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    holders: tuple[tuple[int, ...], ...]
    frozen: bool = False
    merged: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, world_size: int) -> ShardSpec:
        """Read the placement of an FSDP2 parameter (a DTensor) or of a replicated tensor.

        Raises LayoutError for more than one sharded mesh dimension.
        """
        shape = tuple(tensor.shape) or (1,)
        if not isinstance(tensor, DTensor):
            return cls(shape, tensor.dtype, 0, _replicated(world_size))
        placements: Iterable[tuple[int, Any]] = enumerate(tensor.placements)
        split = [(axis, p) for axis, p in placements if not isinstance(p, Replicate)]
        if len(split) > 1 or any(type(p) is not Shard for _, p in split):
            raise LayoutError(
                f"parameter {name!r} has placements {tensor.placements}; expected at most one "
                "Shard(dim), the rest Replicate. Shard it with fully_shard over a 1-D or HSDP mesh."
            )
        axis, dim = (split[0][0], split[0][1].dim) if split else (None, 0)
        return cls(shape, tensor.dtype, dim, _holders(tensor.device_mesh, axis))

    @property
    def num_rows(self) -> int:
        """Size of the sharded dimension."""
        return self.shape[self.dim]

    @property
    def _rows_per_shard(self) -> int:
        return max(1, -(-self.num_rows // len(self.holders)))

    def row_range(self, shard: int, part: int = 0, num_parts: int = 1) -> RowRange:
        """Rows of a shard, or of one of `num_parts` nearly equal parts of it."""
        low, high = (min(s * self._rows_per_shard, self.num_rows) for s in (shard, shard + 1))
        size = high - low
        return RowRange(low + size * part // num_parts, low + size * (part + 1) // num_parts)

    def row_ranges(self, part: int = 0, num_parts: int = 1) -> np.ndarray:
        """`row_range` of all S shards: int64 [2, S], starts and stops."""
        edges = np.arange(len(self.holders) + 1) * self._rows_per_shard
        edges = np.minimum(edges, self.num_rows)
        return np.array(
            [edges[:-1] + np.diff(edges) * p // num_parts for p in (part, part + 1)], np.int64
        )

    def shard_of(self, rank: int) -> int | None:
        """The shard that `rank` holds, None if it holds none."""
        return next((s for s, ranks in enumerate(self.holders) if rank in ranks), None)


@lru_cache(maxsize=16)  # one object for all parameters: it has an entry for every rank
def _holders(mesh: DeviceMesh, axis: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that hold each shard of a tensor sharded along `axis` of the mesh.

    axis: None for a replicated tensor.
    """
    if axis is None:
        return (tuple(mesh.mesh.flatten().tolist()),)
    by_shard = mesh.mesh.movedim(axis, 0).reshape(mesh.mesh.shape[axis], -1)
    return tuple(tuple(shard) for shard in by_shard.tolist())


@lru_cache(maxsize=16)
def _replicated(world_size: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(world_size)),)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded parameter on every rank; collective for a DTensor, else no copy."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
