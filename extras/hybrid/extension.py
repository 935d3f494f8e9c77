"""What models with linear attention add to the core: `hybrid` in `hybridengine.models`."""

from __future__ import annotations

from typing import Any

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
        from hybridengine.hybrid.engine import check_vllm
        from hybridengine.train.choices import (  # it asks the models
            Machine,
            engine_name,
            resolve_dtypes,
        )

        if carried_state(model) is None:
            return
        if isinstance(config, RLConfig) and engine_name(config) == "vllm":
            dtype = resolve_dtypes(config, Machine.here()).rollout.dtype
            check_vllm(config.rollout, dtype, model.get_text_config())
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
