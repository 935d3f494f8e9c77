"""What models with linear attention add to the core: `hybrid` in `hybridengine.models`."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from hybridengine.hybrid.layers import MODEL_TYPES, pack_linear_attention
from hybridengine.model.extensions import ModelExtension
from hybridengine.model.validation import carried_state
from hybridengine.run.config import JobConfig
from hybridengine.run.errors import ModelError

__all__ = ["HybridModels", "extension"]


class HybridModels(ModelExtension):
    """Types of models whose layers with a state along the sequence take packed batches."""

    stateful_model_types = MODEL_TYPES

    def check(self, config: JobConfig, model: PretrainedConfig) -> None:
        size = config.sequence_parallel_size
        if size > 1 and carried_state(model) is not None:
            raise ModelError(
                f"ulysses_sequence_parallel_size is {size}, expected 1 for a model of type "
                f"{model.model_type!r}: a rank would need the last state of the rank before it"
            )

    def prepare(self, model: Any) -> None:
        if model.config.get_text_config().model_type in MODEL_TYPES:
            pack_linear_attention(model)
            model._supports_attention_backend = True  # the classes do not state it


extension = HybridModels()
