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

_VLLM_ON_CPU = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with Gated DeltaNet
_CPU_HEAD_SIZES = ((64, 64), (128, 128))  # of keys and values


class HybridModels(ModelExtension):
    """Types of models whose layers with a state along the sequence take packed batches."""

    stateful_model_types = MODEL_TYPES

    def check(self, config: JobConfig, model: PretrainedConfig) -> None:
        from hybridengine.train.choices import engine_name  # it asks the models

        if carried_state(model) is None:
            return
        if isinstance(config, RLConfig) and engine_name(config) == "vllm":
            _check_vllm(config, model.get_text_config())
        if (size := config.sequence_parallel_size) > 1:
            raise ModelError(
                f"ulysses_sequence_parallel_size is {size}, expected 1 for a model of type "
                f"{model.model_type!r}: a rank would need the last state of the rank before it"
            )

    def prepare(self, model: Any) -> None:
        if model.config.get_text_config().model_type in MODEL_TYPES:
            pack_linear_attention(model)
            model._supports_attention_backend = True  # the classes do not state it


def _check_vllm(config: RLConfig, text: PretrainedConfig) -> None:
    """Raise ModelError for what vLLM does not compute as the trainer does, or not at all."""
    from hybridengine.train.choices import Machine, resolve_dtypes

    rollout = config.rollout
    if rollout.servers:  # whoever starts them chooses
        return
    if rollout.enable_prefix_caching and not rollout.enable_chunked_prefill:
        raise ModelError(
            "rollout.enable_chunked_prefill is false, but vLLM caches prefixes of a model of type "
            f"{text.model_type!r} only in chunks; set it to true, or "
            "rollout.enable_prefix_caching to false"
        )
    if torch.cuda.is_available():
        return
    if text.model_type not in _VLLM_ON_CPU:
        raise ModelError(
            "rollout.name is vllm, which on a CPU was compared for models of the types "
            f"{_VLLM_ON_CPU}, and this one is of {text.model_type!r}; set rollout.name=hf"
        )
    dtype = resolve_dtypes(config, Machine.here()).rollout.dtype
    if dtype != "bfloat16":
        raise ModelError(
            "rollout.name is vllm, whose Gated DeltaNet on a CPU computes in bfloat16, and "
            f"rollout.dtype is {dtype}; set it to bfloat16, or rollout.name=hf"
        )
    sizes = text.linear_key_head_dim, text.linear_value_head_dim
    if sizes not in _CPU_HEAD_SIZES:
        raise ModelError(
            "rollout.name is vllm, whose Gated DeltaNet on a CPU has linear_key_head_dim and "
            f"linear_value_head_dim of {_CPU_HEAD_SIZES}, and they are {sizes}; set rollout.name=hf"
        )


extension = HybridModels()
