"""What models with linear attention add to the core: `hybrid` in `hybridengine.models`."""

from __future__ import annotations

from typing import Any

from hybridengine.hybrid.layers import MODEL_TYPES, pack_linear_attention
from hybridengine.model.extensions import ModelExtension

__all__ = ["HybridModels", "extension"]


class HybridModels(ModelExtension):
    """Types of models whose layers with a state along the sequence take packed batches."""

    stateful_model_types = MODEL_TYPES

    def prepare(self, model: Any) -> None:
        if model.config.get_text_config().model_type in MODEL_TYPES:
            pack_linear_attention(model)
            model._supports_attention_backend = True  # the classes do not state it


extension = HybridModels()
