"""flash_attn.bert_padding (2.7 and later), same names and tuples, one pass over memory each.

    from hybridengine.integrations.flash_attn import pad_input, unpad_input

`hybridengine.integrations.flash_attn_2_6` has the 4-tuple of flash-attn 2.6.3.
"""

import torch
from torch import Tensor

from hybridengine.kernels import pack
from hybridengine.kernels.packing import inverse_order

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Tokens of a padded batch, one after the other; differentiable.

    Args:
        hidden_states: [B, L, ...].
        attention_mask: [B, L], 1 for tokens.
        unused_mask: [B, L], 1 for places that are kept in the result but not used.

    Returns:
        (x [T, ...], indices int64 [T] into the flattened batch, cu_seqlens int32 [B + 1],
        max_seqlen, seqused int32 [B]: the tokens of attention_mask alone).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    packed = pack([hidden_states], kept)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    return packed.values[0], packed.indices, packed.cu_seqlens, packed.max_seqlen, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """[T, ...] back to [batch, seqlen, ...], zero elsewhere, in one pass; differentiable."""
    inverse = inverse_order(indices, batch * seqlen)
    return torch.ops.hybridengine.move_rows(
        [hidden_states], inverse, indices, None, 1, [batch, seqlen], [0.0], [0], None
    )[0]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices] along the first axis. An index given twice gets the sum of both gradients."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with `values` at `indices`, in one pass; differentiable."""
    inverse = inverse_order(indices, first_axis_dim)
    return torch.ops.hybridengine.move_rows(
        [values], inverse, indices, None, 1, [first_axis_dim], [0.0], [0], None
    )[0]


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Like unpad_input where rows hold several sequences.

    Args:
        hidden_states: [B, L, ...].
        attention_mask_in_length: [B, L] integers; the non-zero ones of a row are the lengths of
            the sequences that fill it from the left.

    Returns:
        (x [T, ...], indices, cu_seqlens int32 [sequences + 1], max_seqlen).
    """
    filled = attention_mask_in_length.sum(dim=1, keepdim=True)
    places = torch.arange(attention_mask_in_length.size(1), device=filled.device)
    packed = pack([hidden_states], places < filled)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=filled.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return packed.values[0], packed.indices, cu_seqlens, max_seqlen
