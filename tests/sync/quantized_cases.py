"""Models whose engine tensors are quantized in blocks."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.sync.memory_engine import MemoryEngine, expected, shapes_of, values
from tests.tiny_models import tiny_config

# Of all tensors blocks straddle shards: fused ones also parameters, row-parallel ones columns.
SHAPES = shapes_of(
    column={"q": (300, 260), "k": (140, 260)},
    row={"out": (270, 640)},
    replicated={"copied": (200, 130), "norm": (13, 3)},
)
QUANTIZED = ("fused", "out", "copied")


def differing(engine: MemoryEngine, full) -> list[str]:
    return [
        name
        for name, tensor in expected(engine, full).items()
        if not torch.equal(tensor.view(torch.uint8), engine.tensors[name].view(torch.uint8))
    ]


def trained(seed: int, dtype: torch.dtype):
    """Values of very different sizes in neighbouring rows and columns; some blocks are zero."""
    full = values(SHAPES, torch.float32, seed)
    for tensor in full.values():
        tensor *= torch.exp2(torch.arange(len(tensor)) % 19.0)[:, None]
        tensor *= torch.exp2(torch.arange(tensor.shape[1]) // 40.0)
    full["copied"][:128] = 0
    return {name: tensor.to(dtype) for name, tensor in full.items()}


def save(folder: Path) -> str:
    """A model whose layers have several blocks on each of two ranks, none of a full width."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("qwen2")  # biases, untied head
    config.hidden_size, config.intermediate_size = 192, 360
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 6, 2, 32
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)
