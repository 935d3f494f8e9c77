"""Sharded models for tests and benchmarks on ranks, loaded as jobs load them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

__all__ = ["load_sharded"]


def load_sharded(
    path: str, mesh: Any, param_dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Any:
    """Load the model in `path` onto `mesh`.

    settings: other fields of `LoadOptions`, and keys of the groups model, fsdp_config and
    wrap_policy.
    """
    from hybridengine.model import LoadOptions, load_causal_lm
    from hybridengine.run.config.common import (
        OverrideConfig,
        SFTFsdpConfig,
        TrainedModelConfig,
        WrapPolicyConfig,
    )
    from hybridengine.run.config.rl import FsdpConfig

    def take(schema: Any) -> Any:
        """Return a group of the settings that are its keys."""
        names = [field.name for field in fields(schema) if field.name in settings]
        return schema(**{name: settings.pop(name) for name in names})

    settings |= {"path": path, "dtype": str(param_dtype).removeprefix("torch.")}
    settings |= {"wrap_policy": take(WrapPolicyConfig), "override_config": take(OverrideConfig)}
    model = take(TrainedModelConfig)
    sharding = take(SFTFsdpConfig if "offload_policy" in settings else FsdpConfig)
    return load_causal_lm(LoadOptions(model, sharding, **settings), mesh)
