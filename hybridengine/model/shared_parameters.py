"""Unsharded parameters in memory that somebody else owns: the weights of the rollout engine.

FSDP2 computes with what it gathers from the shards. After a weight sync the engine on the same rank
holds these bits, so they are taken from there: nothing is gathered, cast or copied. Gradients are
reduced into the shards as ever. Of FSDP2 this uses the extensions of a sharded tensor
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`) and `set_custom_all_gather`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridengine.errors import ModelError
from hybridengine.model.offload import on_device
from hybridengine.model.parameters import unwrapped_name
from hybridengine.sharding.shards import ShardSpec
from hybridengine.sharding.weight_target import StaleWeightsError, WeightTarget

_TESTED = ("2.13.",)  # versions of torch; the extensions are no stable interface
_BITS = {2: torch.int16, 4: torch.int32}


def untested_torch() -> str | None:
    """Return why this version of torch cannot share parameters; None if it can."""
    if torch.__version__.startswith(_TESTED):
        return None
    return f"torch is {torch.__version__}, and FSDP2's extensions were tested with 2.13"


class SharedParameters:
    """Makes `memory` the unsharded parameters of a sharded `model`.

    memory: every parameter's contiguous view of the engine's tensors, in the dtype of the
      computation. A weight sync writes it.
    target: the engine's weights.

    A forward after the shards have changed raises StaleWeightsError until the next weight sync.
    """

    def __init__(
        self, model: nn.Module, memory: Mapping[str, Tensor], target: WeightTarget
    ) -> None:
        named = {unwrapped_name(name): p for name, p in model.named_parameters()}
        if named.keys() != memory.keys():
            name = min(named.keys() ^ memory.keys())
            raise ModelError(f"{name!r} is a parameter of the model or of the engine alone")
        self._memory, self._target = memory, target
        self._shards: dict[str, DTensor] = {}
        for name, parameter in named.items():
            assert isinstance(parameter, DTensor)
            self._shards[name] = parameter
            _Extension(memory[name]).attach(parameter)
        modules = [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
        for module in modules:
            module.set_custom_all_gather(_NoGather())
        with on_device(model):
            self._check_addresses(model, modules)
        self._verified: list[int | None] = []  # the state in which shards and `memory` were equal
        self._steps = _count_steps(model)
        # Before FSDP2's own hook: after an error it would be in the middle of a forward.
        model.register_forward_pre_hook(lambda module, args: self._check(), prepend=True)

    def _check_addresses(self, model: nn.Module, modules: Sequence[fsdp.FSDPModule]) -> None:
        """Raise ModelError if FSDP2 computes with other memory. Not collective."""
        for module in modules:
            module.unshard()
        for name, parameter in model.named_parameters():
            expected = self._memory[unwrapped_name(name)]
            if (parameter.data_ptr(), parameter.dtype, parameter.shape) != (
                expected.data_ptr(),
                expected.dtype,
                expected.shape,
            ):
                raise ModelError(f"FSDP2 of torch {torch.__version__} does not share {name!r}")
        for module in modules:
            module.reshard()

    def _check(self) -> None:
        """Raise StaleWeightsError unless `memory` has the bits of this rank's shards.

        They are compared again after a sync, a step of an optimizer, or a write that torch counts.
        """
        target = self._target
        target.check_complete()
        versions = [p._version + p._local_tensor._version for p in self._shards.values()]
        state = [target.weight_version, target.updates_begun, self._steps[0], *versions]
        if state == self._verified:
            return
        differs = torch.stack([self._differs(name) for name in self._shards])
        if differs.any():
            name = [*self._shards][int(differs.int().argmax())]
            raise StaleWeightsError(
                f"{name!r} has changed since the sync to weight version {target.weight_version}, "
                "and the forward reads what that sync has written: sync the weights after every "
                "optimizer step, or set model.share_engine_weights=false"
            )
        self._verified = state

    @torch.no_grad()
    def _differs(self, name: str) -> Tensor:
        shard, memory = self._shards[name], self._memory[name]
        spec = ShardSpec.of(name, shard, dist.get_world_size())
        box = spec.box(spec.shard_of(dist.get_rank()))
        own = memory[tuple(slice(*rows) for rows in box)]
        bits = _BITS[memory.itemsize]
        return (shard.to_local().to(memory.dtype).view(bits) != own.view(bits)).any()


class _Extension:
    """Gives FSDP2 `memory` as the unsharded form of a parameter."""

    def __init__(self, memory: Tensor) -> None:
        # FSDP2 reads it from the beginning of its storage. A view of a fused tensor begins later in
        # its own; the alias that DLPack makes begins at the view, and keeps its memory.
        self._alias = torch.from_dlpack(memory.detach())
        self._nothing = torch.zeros(1, dtype=torch.bool, device=memory.device)

    def attach(self, parameter: DTensor) -> None:
        local: Any = parameter._local_tensor
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self._before, self._after

    def _before(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """Return what FSDP2 gathers, which may not be empty."""
        return (self._nothing,), None

    def _after(
        self, gathered: Any, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Return the unsharded parameter and what FSDP2 may free; `out` is what it had before."""
        return None if out is not None else (self._alias, ())


class _NoGather(AllGather):
    """The all-gather of a group whose parameters all have an `_Extension`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        if input_tensor.dtype != torch.bool:
            raise ModelError(
                "the parameters of the model were replaced, by load_state_dict(assign=True) or a "
                "cast; they are views of the engine's weights, so write into them"
            )


def _count_steps(model: nn.Module) -> list[int]:
    """Return [number of steps that any optimizer has made since], while `model` is in use.

    The fused steps of sharded parameters do not change the versions of tensors.
    """
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    weakref.finalize(model, register_optimizer_step_post_hook(add).remove)
    return count
