"""Tiny models of types that were compared with vLLM's, bit for bit, besides those of `TINY`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tests.architectures.catalogue import CATALOGUE
from tests.tiny_models import save_tiny

__all__ = ["OTHERS", "save_other"]

_WINDOWS: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
# What makes a tiny model of a type have all that it computes.
OTHERS: dict[str, dict[str, Any]] = {
    # soft-caps that bend the scores and logits of a tiny model
    "gemma2": _WINDOWS
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.5, "num_hidden_layers": 2},
    "cohere": {"use_qk_norm": True},
    "cohere2": _WINDOWS,
    "ernie4_5": {},
    "exaone4": _WINDOWS,
    "gemma3_text": _WINDOWS | {"query_pre_attn_scalar": 48},
    "granite": {
        **dict(embedding_multiplier=12.0, residual_multiplier=0.22),
        **dict(attention_multiplier=0.03, logits_scaling=8.0),
    },
    "glm4": {},
    "hunyuan_v1_dense": {},
    "phi3": {},
    # transformers' models in vLLM
    "glm": {},
    "gpt_neox": {"num_hidden_layers": 2},
    "phi": {"qk_layernorm": True},
    "starcoder2": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def save_other(kind: str, folder: Path, **changes: Any) -> tuple[Any, str]:
    """Return the configuration of a tiny model and the folder that it is written to."""
    options = CATALOGUE[kind].overrides | {"initializer_range": 0.1, "max_position_embeddings": 512}
    config = AutoConfig.for_model(kind, **options | OTHERS[kind] | changes)
    return config, save_tiny(config, folder)
