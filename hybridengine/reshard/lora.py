"""Low-rank adapters merged into their base weights shard by shard, as a sync packs them.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): W + (alpha / r) B A. A rank forms only the
rows (or columns) it holds, as much as fits a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from hybridengine.reshard.layout import EngineLayout, identity_layout
from hybridengine.reshard.shards import local_shard

__all__ = ["Adapter", "factors_of", "gathered", "sums_of_bits", "with_factors", "with_whole"]

_CHUNK = 1 << 18  # elements in float64 at a time
_ROW = 1 << 10  # 64-bit words of a checksum's table row
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd


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


def with_factors(layout: EngineLayout, factors: Mapping[str, torch.Tensor]) -> EngineLayout:
    """The layout of an engine that has every factor whole beside its weights."""
    own = identity_layout(
        {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in factors.items()}
    )
    return replace(
        layout,
        destinations=layout.destinations | own.destinations,
        copies=layout.copies + own.copies,
    )


def with_whole(
    adapters: Mapping[str, Adapter], arrived: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Adapter]]:
    """The adapters, by parameter, made of the factors taken out of what `arrived`."""
    for name, adapter in adapters.items():
        left, right = (arrived.pop(f"{name}.{side}") for side in ("left", "right"))
        yield name, Adapter(left, right, adapter.scale)


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Per tensor a wrapping checksum of its bits; two passes over the memory.

    It tells a frozen parameter that was written to, which version counters do not: optimizers and
    checkpoint loaders go past them. Words are summed by row and by column of a table, and these
    sums by odd weights, so two words that change places show.
    """

    def of(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        words = flat[: flat.numel() // 8 * 8].view(torch.int64)
        rows = words.numel() // _ROW
        table = words[: rows * _ROW].view(rows, _ROW)
        rest = (words[table.numel() :], flat[words.numel() * 8 :].to(torch.int64))
        return torch.stack([_weighted(t) for t in (table.sum(0), table.sum(1), *rest)]).sum()

    return torch.stack([of(t) for t in tensors]).tolist() if tensors else []


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """int64, wrapping: the sum of the values times odd numbers that depend on their index."""
    weights = torch.arange(values.numel(), device=values.device).mul_(_MIX).mul_(2).add_(1)
    return weights.mul_(values).sum()


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
