"""How a checkpoint tensor lies on the training ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridengine.sharding.layout import LayoutError

__all__ = ["Placement", "ShardSpec", "dim1_parameters", "find_change", "local_shard"]


@dataclass(frozen=True)
class ShardSpec:
    """One checkpoint tensor on the training ranks.

    shape: (1,) for a scalar. dim: the sharded dimension, split as torch.chunk does (the last shards
    may be short or empty).
    holders: for each shard the ranks that hold it (several under HSDP or replication).
    frozen: it is sent once. merged: what is sent is formed at every sync from it and an adapter,
    which takes a bucket's memory as well.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    holders: tuple[tuple[int, ...], ...]
    frozen: bool = False
    merged: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, world_size: int) -> ShardSpec:
        """Read the placement of an FSDP2 parameter (a DTensor) or of a replicated tensor."""
        shape = tuple(tensor.shape) or (1,)
        if not isinstance(tensor, DTensor):
            return cls(shape, tensor.dtype, 0, _replicated(world_size))
        sharded = [
            (axis, p) for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate)
        ]
        if len(sharded) > 1 or any(type(p) is not Shard for _, p in sharded):
            raise LayoutError(
                f"parameter {name!r} has placements {tensor.placements}; expected at most one "
                "Shard(dim), the rest Replicate. Shard it with fully_shard over a 1-D or HSDP mesh."
            )
        axis, dim = (sharded[0][0], sharded[0][1].dim) if sharded else (None, 0)
        return cls(shape, tensor.dtype, dim, _holders(tensor.device_mesh, axis))

    @property
    def _chunk(self) -> int:
        """Positions on `dim` per shard."""
        return max(1, -(-self.shape[self.dim] // len(self.holders)))

    def intervals(self, part: int = 0, parts: int = 1) -> np.ndarray:
        """[low, high) on `dim` of one of `parts` nearly equal parts of each shard: int64 [2, S]."""
        edges = np.minimum(np.arange(len(self.holders) + 1) * self._chunk, self.shape[self.dim])
        return np.array([edges[:-1] + np.diff(edges) * p // parts for p in (part, part + 1)])

    def interval(self, shard: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """[low, high) on `dim` that this shard holds, or of a part of it."""
        size = self.shape[self.dim]
        low, high = (min(s * self._chunk, size) for s in (shard, shard + 1))
        return low + (high - low) * part // parts, low + (high - low) * (part + 1) // parts

    def origin(self, shard: int) -> tuple[int, ...]:
        """The global coordinate of the shard's first element."""
        origin = [0] * len(self.shape)
        origin[self.dim] = self.interval(shard)[0]
        return tuple(origin)

    def held_by(self, rank: int) -> int | None:
        return next((s for s, ranks in enumerate(self.holders) if rank in ranks), None)


@lru_cache(maxsize=16)  # one object for all parameters: it has an entry for every rank
def _holders(mesh: DeviceMesh, axis: int | None) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold each shard of a tensor sharded along one axis of the mesh, or none."""
    if axis is None:
        return (tuple(mesh.mesh.flatten().tolist()),)
    by_shard = mesh.mesh.movedim(axis, 0).reshape(mesh.mesh.shape[axis], -1)
    return tuple(tuple(shard) for shard in by_shard.tolist())


@lru_cache(maxsize=16)
def _replicated(world_size: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(world_size)),)


class Placement(NamedTuple):
    """What the plan relies on of one parameter on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placements: tuple | None
    mesh: object
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Placement:
        local, mesh = local_shard(tensor), getattr(tensor, "device_mesh", None)
        placements = getattr(tensor, "placements", None)
        sizes = (tuple(t) or (1,) for t in (tensor.shape, local.shape, local.stride()))
        shape, local_shape, stride = sizes
        return cls(shape, tensor.dtype, local.device, placements, mesh, local_shape, stride)


def dim1_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    sliced: Mapping[str, int],
    num_shards: int,
    *,
    rows: bool = True,
    experts: bool = True,
) -> set[str]:
    """Which parameters move fewer bytes in a sync if FSDP2 shards them on dim 1, where it can.

    sliced: as `EngineLayout.sliced_dims`. rows: weights that the engine slices on dim 1 (row
    parallel). experts: the same of weights with three or more dimensions, and those with fewer
    rows than shards: on dim 0 only the first ranks would hold and send them.
    """

    def chosen(name: str, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or shape[1] % num_shards:  # FSDP2 wants it even
            return False
        if len(shape) == 2:
            return rows and sliced.get(name) == 1
        return experts and (sliced.get(name) == 1 or shape[0] < num_shards)

    return {name for name, shape in shapes.items() if chosen(name, shape)}


def find_change(planned: Mapping[str, Placement], current: Mapping[str, Placement]) -> str | None:
    """How a parameter differs from what was planned for; None if all are as they were."""
    for name in sorted(planned.keys() ^ current.keys()):
        return f"parameter {name!r} was {'removed' if name in planned else 'added'}"
    for name, placement in current.items():
        for what, then, now in zip(Placement._fields, planned[name], placement, strict=True):
            if now != then:
                return f"parameter {name!r} changed its {what} from {then} to {now}"
    return None


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
