"""Tiny mixtures whose log-probs are compared with vLLM's, bit for bit."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.architectures.catalogue import CATALOGUE

__all__ = ["KINDS", "mixture_config"]

KINDS = (
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "mixtral",
    "granitemoe",
    "glm4_moe",
    "qwen3_5_moe_text",
)

# A token takes four experts, whose sum shows its order; their width is no multiple of a vector.
_ROUTED = dict(
    num_experts=8,
    num_local_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=96,
    num_hidden_layers=2,
    initializer_range=0.1,
    max_position_embeddings=512,
)
_GROUPED = dict(n_routed_experts=8, n_group=4, topk_group=2)
_CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": _GROUPED,
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}


def mixture_config(kind: str) -> PretrainedConfig:
    """Return a tiny configuration of the type `kind`."""
    overrides = CATALOGUE[kind].overrides | _ROUTED | _CHANGES.get(kind, {})
    return AutoConfig.for_model(kind, **overrides)
