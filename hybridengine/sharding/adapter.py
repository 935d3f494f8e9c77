"""Low-rank adapters of weights, and how they merge shard by shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from hybridengine.sharding.shards import local_shard

__all__ = ["Adapter", "factors_of", "gathered"]

_CHUNK = 1 << 18  # elements in float64 at a time


@dataclass(frozen=True)
class Adapter:
    """The update `scale * left @ right` of one weight of shape [out, in].

    left: [out, r], right: [r, in]; each a DTensor, or whole on every rank.
    """

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    @torch.no_grad()
    def merge(self, base: torch.Tensor, dim: int, origin: int, low: int, high: int) -> torch.Tensor:
        """Slab [low, high) on `dim` of the merged weight, in base's dtype, contiguous; collective.

        base: the frozen weight, of which this rank holds `dim` from `origin` on. Every element is
        the float64 sum rounded once, so it does not depend on how the weight is cut.
        """
        slab = local_shard(base).narrow(dim, low - origin, high - low)
        left, right = (
            local_shard(factor).narrow(dim, low - origin, high - low)
            if _split_alike(factor, base, axis, dim)
            else gathered(factor).narrow(
                axis, *((low, high - low) if axis == dim else (0, factor.shape[axis]))
            )
            for axis, factor in enumerate((self.left, self.right))
        )
        merged = torch.empty(slab.shape, dtype=slab.dtype, device=slab.device)
        rows = max(1, _CHUNK // max(slab.shape[1], 1))
        right = right.double() * self.scale
        for i in range(0, slab.shape[0], rows):
            delta = left[i : i + rows].double() @ right
            merged[i : i + rows] = delta.add_(slab[i : i + rows])
        return merged

    def merge_whole(self, base: torch.Tensor) -> torch.Tensor:
        """The whole merged weight on every rank; collective."""
        whole = gathered(base)
        return self.gathered().merge(whole, 0, 0, 0, whole.shape[0])

    def gathered(self) -> Adapter:
        """The same adapter, whole on every rank; collective."""
        return Adapter(gathered(self.left), gathered(self.right), self.scale)

    def bytes_gathered(self, base: torch.Tensor, dim: int) -> int:
        """What `merge` receives from other ranks."""
        return sum(
            (factor.numel() - local_shard(factor).numel()) * factor.element_size()
            for axis, factor in enumerate((self.left, self.right))
            if not _split_alike(factor, base, axis, dim)
        )


def factors_of(adapters: Mapping[str, Adapter]) -> dict[str, torch.Tensor]:
    """Every factor of adapters that travel beside the weights, by a name of its own."""
    return {
        f"{name}.{side}": getattr(adapter, side).detach()
        for name, adapter in adapters.items()
        for side in ("left", "right")
    }


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole parameter on every rank; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _split_alike(factor: torch.Tensor, base: torch.Tensor, axis: int, dim: int) -> bool:
    """Whether each rank holds of `factor` just what goes with its shard of `base`."""
    return (
        axis == dim
        and isinstance(factor, DTensor)
        and isinstance(base, DTensor)
        and factor.placements == base.placements
        and factor.device_mesh == base.device_mesh
    )
