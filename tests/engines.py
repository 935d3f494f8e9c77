"""Engines for tests on ranks, built as jobs build them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tests.loading import load_sharded

__all__ = ["build_engine", "engine_options", "synced_engine"]


def engine_options(path: str, **settings: Any) -> Any:
    """Return the `EngineOptions` of a small engine for the model in `path`.

    settings: fields of `EngineOptions`, and keys of the group rollout.
    """
    from hybridengine.engine.interface import EngineOptions
    from hybridengine.model.parameters import checkpoint_layout_from_config
    from hybridengine.model.validation import check_model
    from hybridengine.run.config.rl import EngineKwargsConfig, ModelConfig, RolloutConfig

    own, keys = ({field.name for field in fields(x)} for x in (EngineOptions, RolloutConfig))
    rollout = {"dtype": "float32", "max_model_len": 64, "kv_cache_gib": 8 / 1024} | {
        name: settings.pop(name) for name in sorted(settings.keys() & keys - own)
    }
    rollout["engine_kwargs"] = EngineKwargsConfig(rollout.get("engine_kwargs", {}))
    if "checkpoint" not in settings:
        settings["checkpoint"] = checkpoint_layout_from_config(check_model(path))
    model = ModelConfig(path=path, keep_vision_tower=settings.get("preparer") is not None)
    return EngineOptions(model, RolloutConfig(**{"enforce_eager": True, **rollout}), **settings)


def build_engine(kind: str, path: str, **settings: Any) -> Any:
    """Return an engine without weights; kind: vllm or hf, settings: as of `engine_options`."""
    from hybridengine.engine.vllm.engine import VllmEngine
    from hybridengine.hf.engine import HfEngine

    return {"vllm": VllmEngine, "hf": HfEngine}[kind](engine_options(path, **settings))


def synced_engine(kind: str, path: str, **settings: Any) -> Any:
    """Return an engine with the weights of the model in `path`, sharded over all ranks."""
    import torch.distributed as dist

    from hybridengine.model import parameter_shards, sharding_mesh
    from hybridengine.sync.resharder import Resharder

    engine = build_engine(kind, path, **settings)
    mesh = sharding_mesh("cpu", dist.get_world_size())
    model = load_sharded(path, mesh=mesh)
    Resharder(lambda: parameter_shards(model), engine, 1 << 20).sync(1)
    return engine
