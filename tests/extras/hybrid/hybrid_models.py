"""Tiny models of every type with linear attention: packed, and transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hybridengine.hybrid import pack_linear_attention
from hybridengine.model.attention import ATTENTION
from tests.architectures.catalogue import CATALOGUE
from tests.tiny_models import SIZES

__all__ = ["TYPES", "hybrid_config", "hybrid_models"]

_LINEAR = dict(
    **dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32),
    **dict(linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"]),
)
_MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
_OTHERS = {
    "olmo_hybrid": _LINEAR | dict(linear_allow_neg_eigval=True),
    "kimi_linear": dict(
        **_MOE,
        **dict(linear_num_heads=2, linear_head_dim=32, n_routed_experts=4, n_shared_experts=1),
        **dict(layer_types=["linear_attention", "full_attention"], n_group=1, topk_group=1),
        **dict(mlp_layer_types=["dense", "sparse"], q_lora_rank=None, kv_lora_rank=64),
        **dict(qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_key_value_heads=4),
    ),
    "minimax": _MOE | dict(layer_types=["linear_attention", "full_attention"], block_size=8),
}
_CHANGES = {
    "qwen3_next": _LINEAR | dict(num_hidden_layers=2),
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "nemotron_h": _MOE
    | dict(
        **dict(hybrid_override_pattern="M*-E", num_hidden_layers=4, moe_latent_size=48),
        **dict(n_routed_experts=4, n_group=1, topk_group=1, moe_shared_expert_intermediate_size=64),
    ),
}
TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "jamba",
    "mamba2",
    "minimax",
)


def hybrid_config(kind: str, **changes: Any) -> PretrainedConfig:
    """Return a tiny configuration with layers of every kind that the type has."""
    if kind in _OTHERS:
        return AutoConfig.for_model(kind, **SIZES | _OTHERS[kind] | changes)
    entry = CATALOGUE[kind]
    return AutoConfig.for_model(kind, **entry.overrides | _CHANGES.get(kind, {}) | changes)


def hybrid_models(kind: str, seed: int = 0, **changes: Any):
    """Two models with the same random weights: over packed batches, and transformers' own.

    changes: of the configuration.
    """
    torch.manual_seed(seed)
    config = hybrid_config(kind, **changes)
    own = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "A_log" in name:  # decays slow enough that a state of another sequence shows
                parameter.uniform_(-2, 0)
            elif parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            elif "conv" in name:
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    packed = AutoModelForCausalLM.from_config(
        copy.deepcopy(own.config), attn_implementation=ATTENTION
    )
    packed.load_state_dict(own.state_dict())
    pack_linear_attention(packed)
    return packed.eval(), own.eval()
