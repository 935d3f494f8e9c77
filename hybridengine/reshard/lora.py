"""Low-rank adapters merged into their base weights shard by shard, as a sync packs them.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): W + (alpha / r) B A. A rank forms only the
rows (or columns) it holds, as much as fits a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from hybridengine.reshard.geometry import contiguous_strides, reach
from hybridengine.reshard.plan import Bucket, Piece
from hybridengine.reshard.shards import ShardSpec

__all__ = ["Adapter", "Merger", "Slab"]

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
        slab = _local(base).narrow(dim, low - origin, high - low)
        left, right = (
            _local(factor).narrow(dim, low - origin, high - low)
            if _split_alike(factor, base, axis, dim)
            else _whole(factor).narrow(
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
        whole = _whole(base)
        return self.gathered().merge(whole, 0, 0, 0, whole.shape[0])

    def gathered(self) -> Adapter:
        """The same adapter, whole on every rank; collective."""
        return Adapter(_whole(self.left), _whole(self.right), self.scale)

    def bytes_gathered(self, base: torch.Tensor, dim: int) -> int:
        """What `merge` receives from other ranks."""
        return sum(
            (factor.numel() - _local(factor).numel()) * factor.element_size()
            for axis, factor in enumerate((self.left, self.right))
            if not _split_alike(factor, base, axis, dim)
        )


class Slab(NamedTuple):
    """[low, high) on the sharded dimension of `source`; this rank's shard begins at `origin`."""

    source: str
    origin: int
    low: int
    high: int


class Merger:
    """Forms what this rank sends of the weights that have an adapter.

    parameters, specs: every trained parameter and where its shards are. adapters: by parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        specs: Mapping[str, ShardSpec],
        adapters: Mapping[str, Adapter],
        rank: int,
    ) -> None:
        self.adapters = adapters
        self._parameters, self._specs, self._rank = parameters, specs, rank

    def slabs(self, bucket: Bucket) -> list[Slab]:
        """What is merged for a bucket; as many entries on every rank."""
        slabs = []
        for unit in bucket.units if bucket.merged else ():
            spec = self._specs[unit.source]
            shard = spec.held_by(self._rank)
            held = (0, 0, 0)
            if shard is not None:
                held = (spec.interval(shard)[0], *spec.part(shard, unit.part, unit.parts))
            slabs.append(Slab(unit.source, *held))
        return slabs

    def form(
        self, slabs: Sequence[Slab], adapters: Mapping[str, Adapter] | None = None
    ) -> list[torch.Tensor]:
        """The merged slabs; collective, unless the adapters given are whole."""
        merged = []
        for name, *place in slabs:
            adapter = (adapters or self.adapters)[name]
            merged.append(adapter.merge(self._parameters[name], self._specs[name].dim, *place))
        return merged

    def locate(self, piece: Piece, slabs: Sequence[Slab]) -> tuple[int, int, list[int]]:
        """(index of the slab that holds `piece`, offset in it, strides)."""
        spec = self._specs[piece.source]
        first = reach(piece.block, spec.dim)[0]
        index = next(
            i
            for i, (name, _, low, high) in enumerate(slabs)
            if name == piece.source and low <= first < high
        )
        _, _, low, high = slabs[index]
        origin, shape = list(spec.origin(piece.shard)), list(spec.shape)
        origin[spec.dim], shape[spec.dim] = low, high - low
        return index, *piece.block.address(contiguous_strides(tuple(shape)), tuple(origin))

    def bytes_gathered(self, slabs: Sequence[Slab]) -> int:
        """What this rank receives of adapters to form `slabs`."""
        return sum(
            self.adapters[s.source].bytes_gathered(
                self._parameters[s.source], self._specs[s.source].dim
            )
            for s in slabs
        )

    def frozen_state(self) -> list[int]:
        """Changes when anything writes to a parameter that is not sent at every sync."""
        return [
            _local(self._parameters[name])._version
            for name, spec in self._specs.items()
            if spec.frozen
        ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
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
