"""Whether the frozen base of a LoRA run is the engine's weights (`model.share_engine_weights`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hybridengine.config import ConfigError, RLConfig
from hybridengine.model.validation import check_model
from hybridengine.rollout import RolloutEngine
from hybridengine.sharding import LayoutError
from hybridengine.trainer.build import engine_name
from hybridengine.trainer.build_models import num_shards

_MASTER_BYTES = 4  # of a weight in the trainer's shards
_KEY = "model.share_engine_weights"


class SharedBase(NamedTuple):
    """The base of the policy.

    memory: parameter → its view of the engine's tensors; empty: the trainer has shards of its own.
    reason: why it has; empty if it has none.
    """

    memory: Mapping[str, torch.Tensor] = MappingProxyType({})
    reason: str = ""


def share_base(config: RLConfig, engine: RolloutEngine) -> SharedBase:
    """Take the engine's weights as the base of the policy where `unshared_reason` is None.

    Raises ConfigError: `model.share_engine_weights` is on, and the engine holds a parameter in
    another form.
    """
    if reason := unshared_reason(config):
        return SharedBase(reason=reason)
    from hybridengine.rollout.vllm.engine import VllmEngine

    assert isinstance(engine, VllmEngine)
    try:
        return SharedBase(engine.share_weights(getattr(torch, config.sharding.dtype)))
    except LayoutError as error:
        return SharedBase(reason=_refuse(config, str(error)))


def unshared_reason(config: RLConfig) -> str | None:
    """Return why the trainer keeps shards of the base, as far as the configuration tells.

    None if the engine's weights are the base. Raises ConfigError:
    `model.share_engine_weights` is on, and that is impossible.
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
            f"{_KEY} is on, but {obstacle}; set it to auto, which shards a base of the trainer's "
            "own there"
        )
    return obstacle


def _obstacle(config: RLConfig) -> str | None:
    """Return what makes the engine's weights other values than the base, or keeps them away."""
    rollout, sharding = config.rollout, config.sharding
    dtypes = {rollout.dtype, sharding.dtype} - {"auto"}
    if not config.model.lora_rank:
        return "model.lora_rank is 0: all weights are trained"
    if config.reshard.lora != "adapters":
        return "reshard.lora is merged: the engine's weights contain the adapters"
    if config.overlaps:
        return "the engines are on other ranks"
    if engine_name(config) != "vllm":
        return "rollout.name is hf, which applies no adapters"
    if (size := rollout.tensor_model_parallel_size) > 1:
        return f"rollout.tensor_model_parallel_size is {size}: an engine rank has a part of them"
    if rollout.quantization:
        return f"rollout.quantization is {rollout.quantization}"
    if len(dtypes) > 1:
        return (
            f"rollout.dtype is {rollout.dtype}, and the trainer computes in {sharding.dtype} "
            "(actor.fsdp_config.dtype)"
        )
    if sharding.expert_parallel_size > 1:
        return "actor.fsdp_config.expert_parallel_size divides the experts over ranks"
    model = check_model(config.model.path, config.model.trust_remote_code)
    stored: Any = model.dtype or model.get_text_config().dtype or torch.float32
    if dtypes and torch.promote_types(dtype := getattr(torch, dtypes.pop()), stored) != dtype:
        return (
            f"the weights of {config.model.path!r} are {stored}, of which {dtype} would lose bits "
            "in exports"
        )
    return None


def _cost(config: RLConfig) -> str | None:
    """Return why sharing would take more memory in the update than shards do.

    A GPU's engine frees its weights for the update (`rollout.free_cache_engine`) unless they are
    shared; shards are in float32.
    """
    frees = torch.cuda.is_available() and config.rollout.free_cache_engine
    if not frees or config.rollout.dtype == "auto":
        return None
    itemsize = getattr(torch, config.rollout.dtype).itemsize
    shard = _MASTER_BYTES / num_shards(config)
    if itemsize <= shard:
        return None
    return (
        f"the engine frees its weights for the update, which takes {shard:g} bytes per weight in "
        f"shards and would take {itemsize} in the engine's; set {_KEY}=true to gather nothing"
    )
