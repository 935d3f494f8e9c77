"""Tiny configurations whose rotary frequencies depend on the length of a sequence."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from tests.tiny_models import SIZES

__all__ = ["DYNAMIC", "LIMIT", "LONG_ROPE", "MSCALE", "ORIGINAL", "tiny"]

ORIGINAL, LIMIT = 32, 128
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + 0.02 * i for i in range(16)],
    "long_factor": [1 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MSCALE = {"short_mscale": 1.1, "long_mscale": 1.3}


def tiny(kind: str, rope: dict[str, Any], **changes: Any) -> PretrainedConfig:
    changes = {"max_position_embeddings": LIMIT, "initializer_range": 0.1, **changes}
    if kind == "phi3":  # whose entry of its own takes precedence
        changes["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return AutoConfig.for_model(kind, **SIZES | changes, rope_parameters=dict(rope))
