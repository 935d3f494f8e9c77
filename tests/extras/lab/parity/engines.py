"""A tiny trained model and a vLLM engine of its weights, in the process of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.vllm_llm import open_llm

PROMPTS = [list(range(5, 45)), list(range(60, 99))]


def open_parity(path: str, *, prefix_caching: bool = False) -> tuple[Any, Any, Any]:
    """Return (Parity, vLLM's model, the trained model)."""
    from transformers import AutoModelForCausalLM

    from hybridengine.lab.parity import attach
    from hybridengine.lab.parity.points import engine_model
    from hybridengine.model.attention import ATTENTION

    options = {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}
    llm = open_llm(path, "float32", enable_prefix_caching=prefix_caching, **options)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()
    return attach(model, llm), engine_model(llm), model


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While open, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def written(tensor: torch.Tensor, write: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """While open, a tensor has what `write` makes of it."""
    before = tensor.detach().clone()
    with torch.no_grad():
        write(tensor.data)
    try:
        yield
    finally:
        tensor.data.copy_(before)


def exchange_halves(tensor: torch.Tensor, dim: int) -> None:
    first, second = tensor.clone().chunk(2, dim)
    tensor.copy_(torch.cat([second, first], dim))
