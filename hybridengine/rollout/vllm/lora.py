"""Adapters alone into vLLM's LoRA slots: from memory, a new adapter with every version.

vLLM itself loads adapters from folders only, and keeps serving the old one under a known id. Here
each version is an adapter of its own, so neither a slot nor a cached prefix of an older one is met.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch

from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.layout import LayoutError

__all__ = ["LoraSlot", "slot_options"]


def slot_options(rank: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one slot that holds adapters of up to `rank`.

    shapes: of the trained parameters. Raises LayoutError for a rank, or a model, without slots.
    """
    from vllm.config.lora import MaxLoRARanks

    if not rank:
        return {}
    fits = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not fits:
        raise LayoutError(
            f"lora_rank: vLLM's slots hold at most rank {max(get_args(MaxLoRARanks))}, got {rank}; "
            "merge the adapters instead (reshard.lora=merged)"
        )
    if any(".experts." in name for name in shapes) and not torch.cuda.is_available():
        raise LayoutError(
            "vLLM has no CPU kernel for experts beside LoRA slots, whatever they adapt; merge the "
            "adapters instead (reshard.lora=merged)"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(fits)}


class LoraSlot:
    """The one LoRA slot of a vLLM model runner."""

    def __init__(self, runner: Any) -> None:
        self._manager = runner.lora_manager._adapter_manager
        mapper = getattr(runner.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()
        self.request: Any = None

    def fill(
        self, adapters: Iterable[tuple[str, Adapter]], version: int, dtype: torch.dtype
    ) -> None:
        """Put whole adapters, by parameter name, into the slot and make `request` select them.

        Raises LayoutError for a parameter that vLLM has no slot for.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights
        from vllm.lora.request import LoRARequest
        from vllm.lora.utils import parse_fine_tuned_lora_name

        packed = {part for parts in self._manager.packed_modules.values() for part in parts}
        layers = {}
        for name, adapter in adapters:
            of_peft = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            module, _ = parse_fine_tuned_lora_name(of_peft, self._mapper)
            if module not in packed and module not in self._manager.modules:
                raise LayoutError(
                    f"vLLM has no LoRA slot for {name!r}; leave it out of target_modules, or merge "
                    "the adapters (reshard.lora=merged)"
                )
            left = (adapter.left.float() * adapter.scale).to(dtype)
            right = adapter.right.to(dtype, copy=True)
            rank = right.shape[0]
            layers[module] = LoRALayerWeights(module, rank, rank, right, left, scaling=1.0)
        number = version + 1  # vLLM counts from 1
        self._manager.remove_all_adapters()
        rank = max(layer.rank for layer in layers.values())
        self._manager.add_adapter(LoRAModel(number, rank, layers))
        self._manager.activate_adapter(number)
        self.request = LoRARequest(f"version-{version}", number, "held in memory")
