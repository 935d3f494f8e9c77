"""verl's entry points to flash-attn's bert_padding: `verl.utils.attention_utils`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridengine.integrations import flash_attn

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def unpad_input(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """`hybridengine.integrations.flash_attn.unpad_input`."""
    return flash_attn.unpad_input(*args, **kwargs)


def pad_input(*args: Any, **kwargs: Any) -> Tensor:
    """`hybridengine.integrations.flash_attn.pad_input`."""
    return flash_attn.pad_input(*args, **kwargs)


def index_first_axis(*args: Any, **kwargs: Any) -> Tensor:
    """`hybridengine.integrations.flash_attn.index_first_axis`."""
    return flash_attn.index_first_axis(*args, **kwargs)


def num_padding(engine: Any, num_tokens: int) -> int:
    """Return the number of tokens that verl appends to a packed micro-batch."""
    padding: int = engine._get_packed_pad_size(num_tokens)
    return padding + -(num_tokens + padding) % engine.ulysses_sequence_parallel_size
