"""The weights of verl's FSDP2 engine as the shards of each rank, where verl gathers full tensors.

verl hands its rollout, or a checkpoint engine, the result of `FSDPEngine.get_per_tensor_param`: an
iterator that gathers one parameter after another. With `PATCHES.patch()` the result is a
`ShardedWeights`, which gathers only if it is iterated over, and which gives the sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridengine.integrations._patching import Patches
from hybridengine.sync.layout import LayoutError

_TARGET = "workers.engine.fsdp.transformer_impl.FSDPEngine.get_per_tensor_param"


class ShardedWeights:
    """The current weights of a training engine of verl.

    engine: verl's `FSDPEngine`.
    gather: returns verl's own iterator of names and full tensors.
    """

    def __init__(
        self, engine: Any, gather: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    ) -> None:
        self._engine, self._gather = engine, gather

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._gather())

    @contextmanager
    def module(self) -> Iterator[torch.nn.Module]:
        """Give the sharded model; shards that verl keeps in host memory are on the device.

        Raises LayoutError for an engine whose shards cannot be read.
        """
        from verl.utils import fsdp_utils

        engine = self._engine
        if (version := fsdp_utils.fsdp_version(engine.module)) != 2:
            raise LayoutError(
                f"actor.strategy: got FSDP{version}, expected fsdp2, whose parameters the exact "
                "weight sync reads as DTensors: set actor_rollout_ref.actor.strategy=fsdp2"
            )
        if engine._uses_fsdp2_cpu_offload_policy:
            raise LayoutError(
                "actor.fsdp_config.offload_policy: got True, expected False. The exact weight sync "
                "reads shards on the device: set param_offload=True instead, which moves them there"
            )
        if engine._is_offload_param:
            fsdp_utils.load_fsdp_model_to_gpu(engine.module)
        try:
            yield engine.module
        finally:
            if engine._is_offload_param:
                fsdp_utils.offload_fsdp_model_to_cpu(engine.module)


def _get_per_tensor_param(
    self: Any, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
) -> tuple[ShardedWeights, None]:
    """Return the weights without gathering any; LoRA adapters are merged as they are sent."""

    def gather() -> Any:
        original = PATCHES.original(_TARGET)
        weights, _ = original(
            self, layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs
        )
        return weights

    return ShardedWeights(self, gather), None


PATCHES = Patches("verl", {"weights": {_TARGET: _get_per_tensor_param}})
