"""Low-rank adapters of weights, and how they merge into sharded weights.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): W + (alpha / r) B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from hybridengine.sharding.shards import full_tensor, local_shard

_CHUNK = 1 << 18  # elements computed in float64 at a time


@dataclass(frozen=True)
class Adapter:
    """The update `scale * left @ right` of one weight of shape [out, in].

    left: [out, r] (LoRA's B). right: [r, in] (LoRA's A). Each is a DTensor, or a full tensor on
    every rank. scale: alpha / r.
    """

    left: torch.Tensor
    right: torch.Tensor
    scale: float

    @torch.no_grad()
    def merge(
        self, base: torch.Tensor, dim: int, shard_start: int, low: int, high: int
    ) -> torch.Tensor:
        """Return positions [low, high) on `dim` of the merged weight; collective.

        base: the frozen weight; this rank holds positions of `dim` from `shard_start` on. The
        result is contiguous, in base's dtype. Each element is summed in float64 and rounded once,
        so it is the same for every sharding.
        """
        rows_of_base = local_shard(base).narrow(dim, low - shard_start, high - low)
        left, right = (
            local_shard(factor).narrow(dim, low - shard_start, high - low)
            if _sharded_alike(factor, base, axis, dim)
            else full_tensor(factor).narrow(
                axis, *((low, high - low) if axis == dim else (0, factor.shape[axis]))
            )
            for axis, factor in enumerate((self.left, self.right))
        )
        merged = torch.empty_like(rows_of_base, memory_format=torch.contiguous_format)
        step = max(1, _CHUNK // max(rows_of_base.shape[1], 1))
        right = right.double() * self.scale
        for i in range(0, rows_of_base.shape[0], step):
            delta = left[i : i + step].double() @ right
            merged[i : i + step] = delta.add_(rows_of_base[i : i + step])
        return merged

    def merge_full(self, base: torch.Tensor) -> torch.Tensor:
        """Return the full merged weight on every rank; collective."""
        full = full_tensor(base)
        return self.full().merge(full, 0, 0, 0, full.shape[0])

    def full(self) -> Adapter:
        """Return the same adapter with full factors on every rank; collective."""
        return Adapter(full_tensor(self.left), full_tensor(self.right), self.scale)

    def bytes_gathered(self, base: torch.Tensor, dim: int) -> int:
        """Return how many bytes `merge` receives from other ranks."""
        return sum(
            (factor.numel() - local_shard(factor).numel()) * factor.element_size()
            for axis, factor in enumerate((self.left, self.right))
            if not _sharded_alike(factor, base, axis, dim)
        )


def adapter_factors(adapters: Mapping[str, Adapter]) -> dict[str, torch.Tensor]:
    """Return both factors of every adapter, named `<parameter>.left` and `<parameter>.right`."""
    return {
        f"{name}.{side}": getattr(adapter, side).detach()
        for name, adapter in adapters.items()
        for side in ("left", "right")
    }


def adapters_of_factors(
    adapters: Mapping[str, Adapter], factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Adapter]]:
    """Yield each adapter by parameter name with its factors taken (removed) from `factors`.

    adapters: gives names and scales. factors: named as `adapter_factors` names them.
    """
    for name, adapter in adapters.items():
        left, right = (factors.pop(f"{name}.{side}") for side in ("left", "right"))
        yield name, Adapter(left, right, adapter.scale)


def _sharded_alike(factor: torch.Tensor, base: torch.Tensor, axis: int, dim: int) -> bool:
    """Whether each rank's shard of `factor` covers the same positions as its shard of `base`."""
    return (
        axis == dim
        and isinstance(factor, DTensor)
        and isinstance(base, DTensor)
        and factor.placements == base.placements
        and factor.device_mesh == base.device_mesh
    )
