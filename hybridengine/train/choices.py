"""Whether the trainer computes with the engine's weights (`model.share_engine_weights`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hybridengine.engine.interface import RolloutEngine
from hybridengine.model.shared.dequantized import DequantizedWeights
from hybridengine.model.shared.shared_parameters import untested_torch
from hybridengine.model.shared.slices import SlicedWeights
from hybridengine.model.validation import check_model
from hybridengine.run.all_ranks import all_gather_values
from hybridengine.run.config import ConfigError, RLConfig
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.weight_target import WeightTarget
from hybridengine.train.build import engine_name
from hybridengine.train.build_models import num_shards
from hybridengine.train.memory import GIB, memory_gib

_MASTER_BYTES = 4  # of a weight in the trainer's shards
_USABLE = 0.9  # of a GPU's memory; the rest is context and fragments
_KEY = "model.share_engine_weights"


class SharedWeights(NamedTuple):
    """What the policy uses of the engine's weights.

    base: frozen parameter of a LoRA run → its view of the engine's tensors, or `LayeredWeights`.
    unsharded: trained parameter → the view that it is computed with, or `SlicedWeights`.
    target: the engine's weights.
    reason: why both are empty, and the policy is computed with what it gathers.
    """

    base: Mapping[str, torch.Tensor] = MappingProxyType({})
    unsharded: Mapping[str, torch.Tensor] = MappingProxyType({})
    target: WeightTarget | None = None
    reason: str = ""

    def describe(self) -> str:
        """Return a line of the plan of the run."""
        if self.reason:
            return f"gathered from shards: {self.reason}"
        weights, by = self.base or self.unsharded, ""
        if isinstance(weights, SlicedWeights):
            by = ", joined by its tensor-parallel ranks"
        elif isinstance(weights, DequantizedWeights):
            by = ", dequantized layer by layer"
        return f"the engine's{by}{', as the base of the adapters' if self.base else ''}"


def share_weights(config: RLConfig, engine: RolloutEngine) -> SharedWeights:
    """Take the engine's weights where `unshared_reason` is None on all ranks. Collective.

    Raises ConfigError: `model.share_engine_weights` is on, and the engine holds a parameter in
    another form.
    """
    reasons = all_gather_values(unshared_reason(config) or "", str)
    if reason := max(reasons):
        return SharedWeights(reason=reason)
    from hybridengine.engine.vllm.engine import VllmEngine

    assert isinstance(engine, VllmEngine)
    frozen = config.model.lora_rank > 0
    try:
        views = engine.share_weights(getattr(torch, config.sharding.dtype), frozen)
    except LayoutError as error:
        return SharedWeights(reason=_refuse(config, str(error)))
    return SharedWeights(base=views) if frozen else SharedWeights({}, views, engine.target)


def unshared_reason(config: RLConfig) -> str | None:
    """Return why the trainer gathers weights from shards, as far as the configuration tells.

    None if it uses the engine's. Raises ConfigError: `model.share_engine_weights` is on, and that
    is impossible.
    """
    chosen = config.model.share_engine_weights
    if chosen == "off":
        return f"{_KEY} is off"
    if obstacle := _obstacle(config):
        return _refuse(config, obstacle)
    return _cost(config) if chosen == "auto" else None


def _refuse(config: RLConfig, obstacle: str) -> str:
    if config.model.share_engine_weights == "on":
        raise ConfigError(
            f"{_KEY} is on, but {obstacle}; set it to auto, which gathers weights from shards there"
        )
    return obstacle


def _obstacle(config: RLConfig) -> str | None:
    """Return what makes the engine's weights other values than the policy's, or keeps them away."""
    rollout, sharding = config.rollout, config.sharding
    dtypes = {rollout.dtype, sharding.dtype} - {"auto"}
    lora = config.model.lora_rank > 0
    if lora and config.reshard.lora != "adapters":
        return "reshard.lora is merged: the engine's weights contain the adapters"
    if config.overlaps:
        return "the engines are on other ranks"
    if engine_name(config) != "vllm":
        return "rollout.name is hf, and only vllm's weights are shared"
    if rollout.quantization and (not lora or (size := rollout.tensor_model_parallel_size) > 1):
        other = f"rollout.tensor_model_parallel_size is {size}" if lora else "model.lora_rank is 0"
        return f"rollout.quantization is {rollout.quantization}, and {other}"
    if rollout.quantization and config.model.share_engine_weights == "auto":
        return (
            f"rollout.quantization is {rollout.quantization}: the base would be the engine's "
            f"weights, dequantized; set {_KEY}=true to train adapters of these"
        )
    if len(dtypes) > 1:
        return (
            f"rollout.dtype is {rollout.dtype}, and the trainer computes in {sharding.dtype} "
            "(actor.fsdp_config.dtype)"
        )
    if sharding.expert_parallel_size > 1:
        return "actor.fsdp_config.expert_parallel_size divides the experts over ranks"
    if not lora:
        return untested_torch()
    if rollout.quantization:
        return None  # exports have the dequantized base
    model = check_model(config.model.path, config.model.trust_remote_code)
    stored: Any = model.dtype or model.get_text_config().dtype or torch.float32
    if dtypes and torch.promote_types(dtype := getattr(torch, dtypes.pop()), stored) != dtype:
        return (
            f"the weights of {config.model.path!r} are {stored}, of which {dtype} would lose bits "
            "in exports"
        )
    return None


def _cost(config: RLConfig) -> str | None:
    """Return why sharing would save nothing, or take too much memory in the update.

    A GPU's engine frees its weights for the update (`rollout.free_cache_engine`) unless they are
    shared; shards are in float32.
    """
    tp_size, lora = config.rollout.tensor_model_parallel_size, config.model.lora_rank > 0
    if not lora and 1 < tp_size >= num_shards(config):
        return (
            f"the engine's {tp_size} ranks have all shards among them, so that as much would be "
            f"received; set {_KEY}=true to join it all the same"
        )
    frees = torch.cuda.is_available() and config.rollout.free_cache_engine
    if not frees or "auto" in (config.rollout.dtype, config.sharding.dtype):
        return None
    if not lora:
        parts = memory_gib(config, shares_base=False)
        allowed = _USABLE * torch.cuda.get_device_properties().total_memory / GIB
        if (needed := sum(parts.values())) <= allowed:
            return None
        return (
            f"the engine's weights, {parts['engine weights']:.1f} GiB, would stay in memory for "
            f"the update, which would need {needed:.1f} of {allowed:.1f} GiB; set {_KEY}=true to "
            "gather nothing"
        )
    itemsize = getattr(torch, config.rollout.dtype).itemsize / tp_size
    shard = _MASTER_BYTES / num_shards(config)
    if itemsize <= shard:
        return None
    return (
        f"the engine frees its weights for the update, which takes {shard:g} bytes per weight in "
        f"shards and would take {itemsize:g} in the engine's; set {_KEY}=true to gather nothing"
    )
