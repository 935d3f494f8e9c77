"""Where a trainer places its parameters, from their shapes: FSDP2, alone or over TP or EP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hybridengine.sync.shards import Holders, ShardSpec, Split

_EXPERT_DIMS = 3  # a fused weight of experts has at least so many dimensions


@dataclass(frozen=True)
class TrainerLayout:
    """Replicas (HSDP) of `fsdp_size` contiguous ranks; rank r of one has inner rank r % inner_size.

    inner_dims: parameter → the dimension that tensor or expert parallelism over `inner_size` ranks
      divides before FSDP2 divides the rest.
    shares_inner: FSDP2 divides all other parameters over all ranks of a replica (expert
      parallelism), else over ranks of equal inner rank (tensor parallelism, where each of them
      holds the parameter in full).
    """

    world_size: int
    fsdp_size: int
    inner_size: int
    inner_dims: Mapping[str, int]
    shares_inner: bool

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        sliced: Mapping[str, int],
        world_size: int,
        fsdp_size: int,
        tp_size: int = 1,
        ep_size: int = 1,
    ) -> TrainerLayout:
        """Return the layout of FSDP2 over tensor parallelism or over expert parallelism.

        sliced: parameter → dimension that the engine slices (`EngineLayout.sliced_dims`); tensor
        parallelism of the trainer divides the same.

        Raises ValueError for sizes that do not divide `fsdp_size`, for both kinds at once, and
        where the engine does not tell which dimensions tensor parallelism divides.
        """
        for name, size in (("train_tp", tp_size), ("train_ep", ep_size)):
            if size < 1 or fsdp_size % size:
                raise ValueError(
                    f"{name}: got {size}, expected a divisor of the {fsdp_size} ranks of a replica"
                )
        if tp_size > 1 and ep_size > 1:
            raise ValueError(
                f"train_tp and train_ep: got {tp_size} and {ep_size}, expected at most one above 1"
            )
        if tp_size > 1 and not sliced:
            raise ValueError(
                f"train_tp: got {tp_size} for an engine of TP 1. The trainer is taken to divide "
                "the weights on the dimensions that the engine slices: give tp"
            )
        experts = {name: 0 for name, shape in shapes.items() if len(shape) >= _EXPERT_DIMS}
        inner_dims = dict(sliced) if tp_size > 1 else experts if ep_size > 1 else {}
        return cls(world_size, fsdp_size, max(tp_size, ep_size), inner_dims, ep_size > 1)

    def sources(
        self, shapes: Mapping[str, tuple[int, ...]], on_dim1: Iterable[str] = ()
    ) -> dict[str, ShardSpec]:
        """Return the placement of every parameter. on_dim1: those that FSDP2 shards on dim 1."""
        on_dim1 = set(on_dim1)
        return {n: self._place(n, shape or (1,), int(n in on_dim1)) for n, shape in shapes.items()}

    def _place(self, name: str, shape: tuple[int, ...], dim: int) -> ShardSpec:
        inner, outer = self.inner_size, self.fsdp_size // self.inner_size
        holders = self._holders
        if name not in self.inner_dims:
            way = "outer, inner" if self.shares_inner else "outer"
            return ShardSpec.along(shape, torch.float32, dim, holders[way])
        inner_dim = self.inner_dims[name]
        splits: tuple[Split, ...]
        if inner_dim == dim:
            splits = (Split(dim, (inner, outer)),)
        else:
            splits = tuple(sorted((Split(dim, (outer,)), Split(inner_dim, (inner,)))))
        way = "outer, inner" if dim < inner_dim else "inner, outer"
        return ShardSpec(shape, torch.float32, splits, holders[way])

    @cached_property
    def _holders(self) -> dict[str, Holders]:
        """Holders by the order in which shards are numbered: outer rank, inner rank, or both."""
        inner, outer = self.inner_size, self.fsdp_size // self.inner_size
        ranks = np.arange(self.world_size).reshape(-1, outer, inner)  # replica, outer, inner
        by_order = {
            "outer": ranks.transpose(1, 0, 2).reshape(outer, -1),
            "outer, inner": ranks.transpose(1, 2, 0).reshape(outer * inner, -1),
            "inner, outer": ranks.transpose(2, 1, 0).reshape(outer * inner, -1),
        }
        return {
            order: tuple(tuple(shard) for shard in by_shard.tolist())
            for order, by_shard in by_order.items()
        }
