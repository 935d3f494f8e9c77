"""Configurations that several benchmarks share."""

from __future__ import annotations

from typing import Any

__all__ = ["smollm2_135m"]


def smollm2_135m(**options: Any) -> Any:
    """Return the configuration of SmolLM2-135M."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
    sizes |= dict(vocab_size=49_152, num_attention_heads=9, num_key_value_heads=3)
    return LlamaConfig(**sizes, tie_word_embeddings=True, **options)
