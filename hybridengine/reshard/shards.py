"""How a checkpoint tensor lies on the training ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridengine.reshard.geometry import Block, reach
from hybridengine.reshard.layout import LayoutError

__all__ = ["Placement", "ShardSpec", "find_change", "local_shard"]


@dataclass(frozen=True)
class ShardSpec:
    """One checkpoint tensor on the training ranks.

    dim: the sharded dimension, split as torch.chunk does (the last shards may be short or empty).
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
    def of(
        cls,
        name: str,
        tensor: torch.Tensor,
        world_size: int,
        adapters: Container[str] = (),
        frozen: bool = False,
    ) -> ShardSpec:
        """Read the placement of an FSDP2 parameter (a DTensor) or of a replicated tensor.

        adapters: names of the parameters that an adapter is merged into; where any has one, or if
        `frozen`, the others do not change.
        """
        spec = cls._of(name, tensor, world_size)
        merged = name in adapters
        return replace(spec, merged=merged, frozen=(frozen or bool(adapters)) and not merged)

    @classmethod
    def _of(cls, name: str, tensor: torch.Tensor, world_size: int) -> ShardSpec:
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(shape, tensor.dtype, 0, (tuple(range(world_size)),))
        sharded = [
            (axis, p) for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate)
        ]
        if len(sharded) > 1 or any(type(p) is not Shard for _, p in sharded):
            raise LayoutError(
                f"parameter {name!r} has placements {tensor.placements}; expected at most one "
                "Shard(dim), the rest Replicate. Shard it with fully_shard over a 1-D or HSDP mesh."
            )
        ranks = tensor.device_mesh.mesh
        if not sharded:
            return cls(shape, tensor.dtype, 0, (tuple(ranks.flatten().tolist()),))
        axis, placement = sharded[0]
        by_shard = ranks.movedim(axis, 0).reshape(ranks.shape[axis], -1)
        holders = tuple(tuple(shard) for shard in by_shard.tolist())
        return cls(shape, tensor.dtype, placement.dim, holders)

    @property
    def _chunk(self) -> int:
        """Positions on `dim` per shard."""
        size = self.shape[self.dim] if self.shape else 1
        return max(1, -(-size // len(self.holders)))

    def interval(self, shard: int) -> tuple[int, int]:
        """[low, high) on `dim` that this shard holds."""
        size = self.shape[self.dim] if self.shape else 1
        return min(shard * self._chunk, size), min((shard + 1) * self._chunk, size)

    def part(self, shard: int, part: int, parts: int) -> tuple[int, int]:
        """[low, high) on `dim` of one of `parts` nearly equal parts of a shard."""
        low, high = self.interval(shard)
        return low + (high - low) * part // parts, low + (high - low) * (part + 1) // parts

    def shards_touched(self, block: Block) -> range:
        """The shards that hold some of `block`."""
        if not self.shape:
            return range(1)
        low, high = reach(block, self.dim)
        return range(low // self._chunk, (high - 1) // self._chunk + 1)

    def origin(self, shard: int) -> tuple[int, ...]:
        """The global coordinate of the shard's first element."""
        origin = [0] * len(self.shape)
        if self.shape:
            origin[self.dim] = self.interval(shard)[0]
        return tuple(origin)

    def held_by(self, rank: int) -> int | None:
        return next((s for s, ranks in enumerate(self.holders) if rank in ranks), None)

    def sender(self, shard: int, receiver: int) -> int:
        """Which holder serves `receiver`: itself if it can, else the replicas in turn."""
        ranks = self.holders[shard]
        return receiver if receiver in ranks else ranks[receiver % len(ranks)]


@dataclass(frozen=True)
class Placement:
    """What the plan relies on of one parameter on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple | None
    mesh: object
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Placement:
        local, sharded = local_shard(tensor), isinstance(tensor, DTensor)
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            tuple(tensor.placements) if sharded else None,
            tensor.device_mesh if sharded else None,
            tuple(local.shape),
            tuple(local.stride()),
        )


def find_change(
    planned: Mapping[str, Placement], parameters: Mapping[str, torch.Tensor]
) -> str | None:
    """How a parameter differs from what was planned for; None if all are as they were."""
    if planned.keys() != parameters.keys():
        gone, new = (
            sorted(a.keys() - b.keys()) for a, b in ((planned, parameters), (parameters, planned))
        )
        return f"parameter {(gone or new)[0]!r} was {'removed' if gone else 'added'}"
    for name, tensor in parameters.items():
        now, then = Placement.of(tensor), planned[name]
        if now != then:
            what = next(f for f in vars(then) if getattr(now, f) != getattr(then, f))
            return (
                f"parameter {name!r} changed its {what} from {getattr(then, what)} to "
                f"{getattr(now, what)}"
            )
    return None


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
