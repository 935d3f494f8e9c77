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
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
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
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0)
_LATENT = dict(
    **_GROUPED,
    **dict(kv_lora_rank=48, q_lora_rank=40, qk_nope_head_dim=32, qk_rope_head_dim=16),
    **dict(v_head_dim=32, num_key_value_heads=4, head_dim=16),
)
_CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": _GROUPED,
    "gpt_oss": {"intermediate_size": 128, "sliding_window": 16},
    "deepseek_v2": _LATENT | dict(q_lora_rank=None, topk_method="group_limited_greedy"),
    "deepseek_v3": _LATENT
    | dict(
        topk_method="noaux_tc",
        rope_parameters=_YARN
        | dict(mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=128),
    ),
    "glm4_moe_lite": _LATENT,
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}


def mixture_config(kind: str) -> PretrainedConfig:
    """Return a tiny configuration of the type `kind`."""
    overrides = CATALOGUE[kind].overrides | _ROUTED | _CHANGES.get(kind, {})
    return AutoConfig.for_model(kind, **overrides)
