"""What models with linear attention add to the core: `hybrid` in `hybridengine.models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from hybridengine.hybrid.exact import exact_forwards
from hybridengine.hybrid.layers import MODEL_TYPES, pack_linear_attention
from hybridengine.model.extensions import ModelExtension
from hybridengine.model.validation import carried_state
from hybridengine.run.config import JobConfig, RLConfig
from hybridengine.run.errors import ModelError

__all__ = ["HybridModels", "extension"]

# Names of the number of heads with a state.
_HEADS = ("linear_num_value_heads", "linear_num_heads", "mamba_num_heads", "mamba_n_heads")


class HybridModels(ModelExtension):
    """Types of models whose layers with a state along the sequence take packed batches."""

    stateful_model_types = MODEL_TYPES
    exact_model_types = ("qwen3_5_text", "qwen3_5_moe_text")  # tests/extras/hybrid

    def check(self, config: JobConfig, model: PretrainedConfig, engine: str, exact: bool) -> None:
        from hybridengine.hybrid.engine import check_vllm

        if carried_state(model) is None:
            return
        if isinstance(config, RLConfig) and engine == "vllm":
            check_vllm(config.rollout, exact, model.get_text_config())
        text, size = model.get_text_config(), config.sequence_parallel_size
        heads = {name: getattr(text, name) for name in _HEADS if hasattr(text, name)}
        if text.model_type == "jamba":
            heads["mamba_expand * hidden_size"] = text.mamba_expand * text.hidden_size
        for name, number in heads.items():
            if number % size:
                raise ModelError(
                    f"ulysses_sequence_parallel_size is {size}, which does not divide {name} of "
                    f"the model of type {text.model_type!r}, {number}; choose a divisor"
                )

    def exactness_obstacle(self, config: JobConfig, model: PretrainedConfig) -> str | None:
        if carried_state(model) is None:
            return None
        if torch.cuda.is_available():
            return "on a GPU bits of linear attention depend on where a sequence is cut"
        return None

    def exact_forwards(self, model: Any, splits: Mapping[str, int]) -> Mapping[Any, Any]:
        return exact_forwards(model)

    def prepare(self, model: Any) -> None:
        if model.config.get_text_config().model_type in MODEL_TYPES:
            pack_linear_attention(model)
            model._supports_attention_backend = True  # the classes do not state it


extension = HybridModels()
