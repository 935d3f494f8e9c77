"""The names and shapes of a model's checkpoint, without its weights."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

__all__ = ["checkpoint_shapes"]


def checkpoint_shapes(
    config: PretrainedConfig, trust_remote_code: bool = False
) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape of the causal LM of `config`; tied weights once, under one name."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
