"""The tensors of the trained model that a sync reads, requested again at every sync.

`model.cpu().cuda()`, a cast there and back or `load_state_dict(assign=True)` replaces a model's
tensors, so none is kept from one sync to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridengine.run.all_ranks import default_groups
from hybridengine.run.device import Guard
from hybridengine.sync.adapter import Adapter, ExpertAdapter, adapter_factors
from hybridengine.sync.geometry import Block, reach
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.shards import Box, RowRange, ShardSpec, full_tensor, local_shard

Parameters = Mapping[str, torch.Tensor]


class ShardProperties(NamedTuple):
    """The properties of a parameter on this rank that a plan depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    placements: tuple | None
    mesh: object
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ShardProperties:
        local, mesh = local_shard(tensor), getattr(tensor, "device_mesh", None)
        placements = getattr(tensor, "placements", None)
        sizes = (tuple(t) or (1,) for t in (tensor.shape, local.shape, _strides(local)))
        shape, local_shape, stride = sizes
        return cls(shape, tensor.dtype, local.device, placements, mesh, local_shape, stride)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides; of a dimension of size 1, which has any, that of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        strides.append(step if size == 1 else stride)
        step = strides[-1] * size
    return tuple(reversed(strides))


class TrainedTensors:
    """This rank's view of the trained model; `read()` renews it.

    read_parameters, read_adapters, merge, read_frozen: see `Resharder`.
    parameters: name → tensor, including the factors of unmerged adapters.
    shards: this rank's part of each, not copied.
    merged, unmerged: parameter → adapter.
    factors: the tensors of `unmerged`.
    """

    def __init__(
        self,
        read_parameters: Callable[[], Parameters],
        read_adapters: Callable[[], Mapping[str, Adapter]],
        merge: bool,
        read_frozen: Callable[[], Set[str]] = frozenset,
    ) -> None:
        for name, given in (("parameters", read_parameters), ("adapters", read_adapters)):
            if not callable(given):
                raise TypeError(
                    f"{name}: got a {type(given).__name__}, expected a function that returns one "
                    "(lambda: parameter_shards(model)). It is called at every sync, because a "
                    "model's tensors may be replaced."
                )
        self._read_parameters, self._read_adapters = read_parameters, read_adapters
        self._merge, self._read_frozen = merge, read_frozen
        self.parameters: dict[str, torch.Tensor] = {}  # until the first read

    def read(self) -> None:
        """Request the current tensors and adapters of the model."""
        adapters = self._read_adapters()
        self.merged: Mapping[str, Adapter] = adapters if self._merge else {}
        self.unmerged: Mapping[str, Adapter] = {} if self._merge else adapters
        self.factors = adapter_factors(self.unmerged)
        self.parameters = {**self._read_parameters(), **self.factors}
        self.shards = {name: local_shard(t).detach() for name, t in self.parameters.items()}
        tensors = {**self.parameters, **adapter_factors(self.merged)}
        self.placements = {name: ShardProperties.of(tensor) for name, tensor in tensors.items()}

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups that gather parameters, and the default group."""
        meshes = {t.device_mesh for t in self.parameters.values() if isinstance(t, DTensor)}
        return [g for mesh in meshes for g in mesh.get_all_groups()] + default_groups()

    def read_specs(self, world_size: int) -> dict[str, ShardSpec]:
        """Read, and return the sharding of every parameter for the plan. Raises LayoutError."""
        self.read()
        for name, adapter in self.unmerged.items():
            if isinstance(adapter, ExpertAdapter):
                raise LayoutError(
                    f"the adapter of {name!r} is of experts, which an engine gets with their "
                    "weights only; merge the adapters (reshard.lora=merged)"
                )
        trained, frozen = self.merged.keys() | self.factors.keys(), self._read_frozen()
        return {
            name: replace(
                ShardSpec.of(name, tensor, world_size),
                merged=name in self.merged,
                frozen=name not in trained if trained else name in frozen,
            )
            for name, tensor in self.parameters.items()
        }

    def describe_change(self, planned: Mapping[str, ShardProperties]) -> str | None:
        """Return how a tensor differs from the planned placements, None if none differs."""
        for name in sorted(planned.keys() ^ self.placements.keys()):
            return f"parameter {name!r} was {'removed' if name in planned else 'added'}"
        for name, placement in self.placements.items():
            for what, then, now in zip(
                ShardProperties._fields, planned[name], placement, strict=True
            ):
                if now != then:
                    return f"parameter {name!r} changed its {what} from {then} to {now}"
        return None

    def merge(
        self, name: str, spec: ShardSpec, rank: int, box: Box, guard: Guard
    ) -> tuple[torch.Tensor, int]:
        """Return a box of this rank's shard with its adapter merged, and the bytes received for it.

        Collective.
        """
        base, adapter = self.parameters[name].detach(), self.merged[name]
        origin = [r.start for r in spec.box(spec.shard_of(rank))]
        with guard.collective(f"gathering the adapter of {name!r}"):
            return adapter.merge(base, origin, box), adapter.bytes_gathered(base)

    def slice(
        self, name: str, spec: ShardSpec, shard: int, block: Block, adapter: Adapter | None
    ) -> torch.Tensor:
        """Return a block of a shard that this rank holds.

        adapter: the full adapter of a merged parameter.
        """
        held, origin = self.shards[name], [r.start for r in spec.box(shard)]
        strides = self.placements[name].local_stride
        if adapter is not None:
            box = list(spec.box(shard))
            for dim in spec.split_dims:
                box[dim] = RowRange(*reach(block, dim))
            held = adapter.merge(self.parameters[name].detach(), origin, tuple(box))
            origin, strides = [r.start for r in box], held.stride()
        offset, steps = block.address(strides, tuple(origin))
        return held.as_strided(block.sizes, steps, held.storage_offset() + offset)

    def unsharded(self, name: str) -> torch.Tensor:
        """Return the full parameter, merged with its adapter if there is one; collective.

        It never shares memory with the shard: some loaders write to the tensors they get.
        """
        tensor = self.parameters[name].detach()
        if name in self.merged:
            return self.merged[name].merge_full(tensor)
        full = full_tensor(tensor)
        here, own = (t.untyped_storage().data_ptr() for t in (full, self.shards[name]))
        return full.clone() if here == own else full
