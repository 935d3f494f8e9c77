"""Low-rank adapters of weights, and how they merge into sharded weights.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): W + (alpha / r) B A.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.distributed.tensor import DTensor

from hybridengine.kernels.merged_linear import merge_into
from hybridengine.sync.shards import Box, RowRange, full_tensor, local_shard


@dataclass(frozen=True)
class Adapter:
    """The update `scale * left @ right` of one weight of shape [out, in].

    left: [out, r] (LoRA's B), a DTensor or a full tensor on every rank.
    right: [r, in] (LoRA's A), likewise.
    scale: alpha / r.
    computed_in: the dtype in which a model with exact operators merges it as it computes; None:
      the model adds the update to its outputs.
    of_experts: it is of a weight [E, ...] of fused experts.
    """

    of_experts: ClassVar[bool] = False
    left: torch.Tensor
    right: torch.Tensor
    scale: float
    computed_in: torch.dtype | None = field(default=None, kw_only=True)

    @torch.no_grad()
    def merge(self, base: torch.Tensor, origin: Sequence[int], box: Box) -> torch.Tensor:
        """Return a box of the merged weight, whose last two dimensions are matrices; collective.

        base: the frozen weight; this rank's shard of it begins at position `origin` and contains
        `box`. The result is contiguous, in base's dtype. Each element is summed in float64 and
        rounded once, so it is the same for every sharding; or it is that of `merge_adapter`.
        """
        part = local_shard(base)
        for dim, (low, high) in enumerate(box):
            part = part.narrow(dim, low - origin[dim], high - low)
        merged = torch.empty_like(part, memory_format=torch.contiguous_format)
        matrices = zip(merged, part, strict=True) if part.ndim == 3 else [(merged, part)]
        factors = self.factors_of_box(base, origin, box)
        for (out, weight), (left, right) in zip(matrices, factors, strict=True):
            merge_into(out, weight, left, right, self.scale, self.computed_in)
        return merged

    def factors_of_box(
        self, base: torch.Tensor, origin: Sequence[int], box: Box
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return the factors of every matrix of a box, see `merge`; collective."""
        left, right = (
            local_shard(factor).narrow(axis, low - origin[axis], high - low)
            if _sharded_alike(factor, base, axis)
            else full_tensor(factor).narrow(axis, low, high - low)
            for axis, (factor, (low, high)) in enumerate(
                zip((self.left, self.right), box, strict=True)
            )
        )
        return [(left, right)]

    def merge_full(self, base: torch.Tensor) -> torch.Tensor:
        """Return the full merged weight on every rank; collective."""
        full = full_tensor(base)
        box = tuple(RowRange(0, size) for size in full.shape)
        return self.full().merge(full, (0,) * full.ndim, box)

    def full(self) -> Adapter:
        """Return the same adapter with full factors on every rank; collective."""
        return replace(self, left=full_tensor(self.left), right=full_tensor(self.right))

    def bytes_gathered(self, base: torch.Tensor) -> int:
        """Return how many bytes `merge` receives from other ranks."""
        return sum(
            (factor.numel() - local_shard(factor).numel()) * factor.element_size()
            for axis, factor in enumerate((self.left, self.right))
            if not _sharded_alike(factor, base, axis)
        )


def adapter_factors(adapters: Mapping[str, Adapter]) -> dict[str, torch.Tensor]:
    """Return both factors of every adapter, named `<parameter>.left` and `<parameter>.right`."""
    return {
        f"{name}.{side}": getattr(adapter, side).detach()
        for name, adapter in adapters.items()
        for side in ("left", "right")
    }


def adapters_of_factors(
    scales: Mapping[str, float], factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Adapter]]:
    """Yield each adapter by parameter name with its factors taken (removed) from `factors`.

    scales: parameter → the scale of its adapter.
    factors: named as `adapter_factors` names them.
    """
    for name, scale in scales.items():
        left, right = (factors.pop(f"{name}.{side}") for side in ("left", "right"))
        yield name, Adapter(left, right, scale)


def _sharded_alike(factor: torch.Tensor, base: torch.Tensor, axis: int) -> bool:
    """Whether both are sharded on `axis` alone, so that shards cover the same positions of it."""
    return (
        isinstance(factor, DTensor)
        and isinstance(base, DTensor)
        and factor.placements == base.placements
        and factor.device_mesh == base.device_mesh
        and {getattr(p, "dim", None) for p in base.placements} - {None} == {axis}
    )
