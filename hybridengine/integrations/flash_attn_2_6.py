"""flash_attn.bert_padding as of 2.6.3, where unpad_input returns four values."""

from torch import Tensor

from . import flash_attn
from .flash_attn import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input_for_concatenated_sequences,
)

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(x [T, ...], indices, cu_seqlens int32 [B + 1], max_seqlen); see flash_attn.unpad_input."""
    return flash_attn.unpad_input(hidden_states, attention_mask)[:4]
