"""What models with linear attention add to the core: `hybrid` in `hybridengine.models`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from hybridengine.hybrid.layers import MODEL_TYPES, pack_linear_attention
from hybridengine.model.extensions import ModelExtension
from hybridengine.model.validation import carried_state
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.run.errors import ModelError

__all__ = ["HybridModels", "extension"]


class HybridModels(ModelExtension):
    """Types of models whose layers with a state along the sequence take packed batches."""

    stateful_model_types = MODEL_TYPES

    def check(self, config: JobConfig, model: PretrainedConfig) -> None:
        from hybridengine.train.choices import engine_name  # it asks the models

        if carried_state(model) is None:
            return
        is_rl = isinstance(config, RLConfig)
        if is_rl and not torch.cuda.is_available() and engine_name(config) == "vllm":
            raise ModelError(
                f"rollout.name is vllm, which packs the convolutions of a {model.model_type!r} "
                "model on a CPU as it loads, so that a sync would write another layout; set "
                "rollout.name=hf"
            )
        if (size := config.sequence_parallel_size) > 1:
            raise ModelError(
                f"ulysses_sequence_parallel_size is {size}, expected 1 for a model of type "
                f"{model.model_type!r}: a rank would need the last state of the rank before it"
            )

    def prepare(self, model: Any) -> None:
        if model.config.get_text_config().model_type in MODEL_TYPES:
            pack_linear_attention(model)
            model._supports_attention_backend = True  # the classes do not state it


extension = HybridModels()
