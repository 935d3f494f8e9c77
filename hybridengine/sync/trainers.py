"""The training ranks of a sync: the tensors that they read, and what they agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridengine.run.failures import CollectiveGuard, Guard, default_groups
from hybridengine.run.messages import (
    all_gather_values,
    host_device,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from hybridengine.sync.adapter import Adapter, adapter_factors
from hybridengine.sync.blocks import Block, reach
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.senders import ranks_per_node
from hybridengine.sync.shards import (
    Box,
    RowRange,
    ShardSpec,
    full_tensor,
    local_shard,
    unite_holders,
)
from hybridengine.sync.weight_target import PlanOutdatedError, ReshardError, bit_checksums

DeltaMode = Literal["auto", "on", "off"]
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
        local = local_shard(tensor)
        strides = (  # a dimension of size 1 has any
            1 if size == 1 else stride
            for size, stride in zip(local.shape, local.stride(), strict=True)
        )
        return cls(
            tuple(tensor.shape) or (1,),
            tensor.dtype,
            local.device,
            getattr(tensor, "placements", None),
            getattr(tensor, "device_mesh", None),
            tuple(local.shape) or (1,),
            tuple(strides) or (1,),
        )


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
        self.read_parameters, self._read_adapters = read_parameters, read_adapters
        self._merge, self._read_frozen = merge, read_frozen
        self.parameters: dict[str, torch.Tensor] = {}  # until the first read

    def read(self) -> None:
        """Request the current tensors and adapters of the model."""
        adapters = self._read_adapters()
        self.merged: Mapping[str, Adapter] = adapters if self._merge else {}
        self.unmerged: Mapping[str, Adapter] = {} if self._merge else adapters
        self.factors = adapter_factors(self.unmerged)
        self.parameters = {**self.read_parameters(), **self.factors}
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
            if adapter.of_experts:
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
            if placement != planned[name]:
                pairs = zip(ShardProperties._fields, planned[name], placement, strict=True)
                what, then, now = next((n, a, b) for n, a, b in pairs if a != b)
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


_NEXT = -1  # in place of a version: the next one


class Trainers:
    """This rank among the training ranks.

    The arguments are those of `Resharder`. Without timeout_s, collectives have their groups' limit.

    Attributes:
        model: the trained tensors that this rank reads.
        guard: the guard of the collectives.
        verify_requested: whether somebody has requested that this sync be verified, on all ranks.
        specs: placement of every parameter, once `compare` has run.
        device: the device of the shards, once `compare` has run.
    """

    def __init__(
        self,
        parameters: Callable[[], Parameters],
        adapters: Callable[[], Mapping[str, Adapter]],
        merge: bool,
        delta: DeltaMode,
        timeout_s: float | None = None,
        frozen: Callable[[], Set[str]] = frozenset,
    ) -> None:
        if delta not in get_args(DeltaMode):
            raise ValueError(f"delta: got {delta!r}, expected one of {get_args(DeltaMode)}")
        self.timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.delta = delta
        self.model = model = TrainedTensors(parameters, adapters, merge, frozen)
        self.guard = CollectiveGuard(
            self.rank,
            self.world_size,
            timeout_s=timeout_s,
            groups=model.groups,
            name=f"trainer rank {self.rank}",
        )
        self.verify_requested = False
        self._frozen_checksums: list[int] | None = None  # as of the last sync

    def compare(self) -> None:
        """Read where every parameter is. Collective. Raises LayoutError on every rank."""
        specs = run_on_all_ranks(partial(self.model.read_specs, self.world_size), LayoutError)
        self.specs = unite_holders(specs)
        self._placements = self.model.placements
        shards = self.model.shards.values()
        self.device = next((t.device for t in shards), torch.device("cpu"))
        self._frozen = [name for name, spec in specs.items() if spec.frozen]

    def plan(
        self,
        make: Callable[[int, list[int]], ReshardPlan],
        bucket_bytes: int | None,
        default_bytes: int,
    ) -> ReshardPlan:
        """Return the plan, the same on every rank. Collective.

        make: plans for a bucket size and the nodes.
        bucket_bytes: None: the least of the ranks' `default_bytes`.
        Raises LayoutError on every rank.
        """
        own = default_bytes, self.rank // ranks_per_node(self.world_size)
        defaults, nodes = zip(*all_gather_values(own, tuple[int, int]), strict=True)
        size = min(defaults) if bucket_bytes is None else bucket_bytes
        plan = run_on_all_ranks(lambda: make(size, list(nodes)), LayoutError)
        digests = all_gather_values((plan.digest, self.delta), tuple[str, str])
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise LayoutError(
                f"ranks {odd} made another reshard plan than rank 0: their model, engine or "
                "bucket size differs. Start every rank with the same configuration."
            )
        return plan

    def start(
        self,
        version: int | None,
        check: Callable[[bool], bool],
        remedy: str,
        next_version: int = 0,
        remembers: bool = True,
    ) -> tuple[int, bool]:
        """Read the model; continue only if no rank has a problem. Collective.

        version: None: the highest `next_version`.
        check: gets whether the frozen parameters of this rank are those of the last sync.
        remedy: for a model that differs from the plan.
        remembers: whether a sync may leave out what has not changed; if not, no checksum is
          computed.
        Return the version, and whether `check` returned True on all ranks.
        """
        problem: Exception | None = None
        is_kept, checksums = False, None
        try:
            self.model.read()
            if changed := self.model.describe_change(self._placements):
                raise PlanOutdatedError(f"{changed} {remedy}")
            frozen = self._frozen if remembers else []
            checksums = bit_checksums([self.model.shards[name] for name in frozen])
            is_kept = check(checksums == self._frozen_checksums)
        except Exception as error:
            problem = error
        given = _NEXT if version is None else version
        problems = problem is not None, isinstance(problem, PlanOutdatedError)
        requested = self.guard.activity.verify_requested()
        state = [*problems, not is_kept, requested, given, -given, next_version]
        flags = torch.tensor(state, device=host_device())
        with self.guard.collective("agreeing to start"):
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True)
            self.guard.wait(work, flags.device)
            failed, outdated, differs, requested, highest, lowest, next_version = flags.tolist()
            if failed:
                raise_on_all_ranks(problem, PlanOutdatedError if outdated else LayoutError)
        if highest != -lowest:
            raise ReshardError(
                f"rank {self.rank} syncs to version {version}, other ranks to versions between "
                f"{-lowest} and {highest}: every rank must call sync() with the same version"
            )
        self._frozen_checksums, self.verify_requested = checksums, bool(requested)
        if requested:
            self.guard.activity.verify_begun()
        return next_version if version is None else version, not differs
