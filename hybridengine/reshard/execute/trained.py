"""The tensors of the trained model, asked for anew at every sync.

`model.cpu().cuda()`, a cast there and back or `load_state_dict(assign=True)` replaces a model's
tensors, so none is kept from one sync to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hybridengine.sharding.adapter import Adapter, factors_of, gathered
from hybridengine.sharding.geometry import Block, reach
from hybridengine.sharding.shards import Placement, ShardSpec, find_change, local_shard

__all__ = ["Parameters", "TrainedTensors"]

Parameters = Mapping[str, torch.Tensor]


class TrainedTensors:
    """What a sync reads on this rank; `read()` renews all of it.

    read_parameters, read_adapters, merge: as `Resharder` takes them.
    parameters: name → tensor, factors of unmerged adapters included. shards: this rank's part of
    each, no copy. merged, unmerged: parameter → adapter. factors: the tensors of `unmerged`.
    """

    parameters: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor]
    merged: Mapping[str, Adapter]
    unmerged: Mapping[str, Adapter]
    factors: dict[str, torch.Tensor]
    placements: dict[str, Placement]

    def __init__(
        self,
        read_parameters: Callable[[], Parameters],
        read_adapters: Callable[[], Mapping[str, Adapter]],
        merge: bool,
    ) -> None:
        for name, given in (("parameters", read_parameters), ("adapters", read_adapters)):
            if not callable(given):
                raise TypeError(
                    f"{name}: got a {type(given).__name__}, expected a function that returns one "
                    "(lambda: parameter_shards(model)): a model's tensors may be replaced, so it "
                    "is called at every sync"
                )
        self._read_parameters, self._read_adapters = read_parameters, read_adapters
        self._merge = merge

    def read(self) -> None:
        """Ask the model for the tensors and adapters that it has now."""
        adapters = self._read_adapters()
        self.merged, self.unmerged = (adapters, {}) if self._merge else ({}, adapters)
        self.factors = factors_of(self.unmerged)
        self.parameters = {**self._read_parameters(), **self.factors}
        self.shards = {name: local_shard(t).detach() for name, t in self.parameters.items()}
        everything = {**self.parameters, **factors_of(self.merged)}
        self.placements = {name: Placement.of(tensor) for name, tensor in everything.items()}

    def specs(self, world_size: int) -> dict[str, ShardSpec]:
        """The placement of every parameter, as the plan needs it. Raises LayoutError."""
        changing = self.merged.keys() | self.factors.keys()
        return {
            name: replace(
                ShardSpec.of(name, tensor, world_size),
                merged=name in self.merged,
                frozen=bool(changing) and name not in changing,
            )
            for name, tensor in self.parameters.items()
        }

    def find_change(self, planned: Mapping[str, Placement]) -> str | None:
        """How a tensor differs from what was planned for; None if all are as they were."""
        return find_change(planned, self.placements)

    def merge(self, name: str, spec: ShardSpec, rank: int, low: int, high: int) -> torch.Tensor:
        """Positions [low, high) of this rank's shard with its adapter merged; collective."""
        base, shard = self.parameters[name].detach(), spec.held_by(rank)
        origin = 0 if shard is None else spec.interval(shard)[0]
        return self.merged[name].merge(base, spec.dim, origin, low, high)

    def bytes_gathered(self, name: str, spec: ShardSpec) -> int:
        """What `merge` receives from other ranks."""
        return self.merged[name].bytes_gathered(self.parameters[name].detach(), spec.dim)

    def slice(
        self, name: str, spec: ShardSpec, shard: int, block: Block, adapter: Adapter | None
    ) -> torch.Tensor:
        """A block of a parameter that this rank holds. adapter: the gathered one, if merged."""
        held, origin = self.shards[name], list(spec.origin(shard))
        strides = self.placements[name].local_stride
        if adapter is not None:
            low, high = reach(block, spec.dim)
            base = self.parameters[name].detach()
            held = adapter.merge(base, spec.dim, origin[spec.dim], low, high)
            origin[spec.dim], strides = low, held.stride()
        offset, strides = block.address(strides, tuple(origin))
        return held.as_strided(block.sizes, strides, held.storage_offset() + offset)

    def unsharded(self, name: str) -> torch.Tensor:
        """The full parameter; collective. In memory of its own: some loaders zero in place what
        belongs to another rank.
        """
        tensor = self.parameters[name].detach()
        if name in self.merged:
            return self.merged[name].merge_whole(tensor)
        full = gathered(tensor)
        here, own = (t.untyped_storage().data_ptr() for t in (full, self.shards[name]))
        return full.clone() if here == own else full
