"""Drop-in for flash_attn.bert_padding (2.7 and later): same names and results.

    from hybridengine.integrations.flash_attn import pad_input, unpad_input

`hybridengine.integrations.flash_attn_2_6` has the 4-tuple of flash-attn 2.6.3.
"""

import math

import torch
from torch import Tensor

from hybridengine.kernels import _check as check
from hybridengine.kernels import pack
from hybridengine.kernels.packing import inverse_order
from hybridengine.kernels.packing.op import move

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
    """Pack the tokens of a padded batch; differentiable.

    Args:
        hidden_states: [B, L, ...].
        attention_mask: [B, L], 1 for tokens.
        unused_mask: [B, L], 1 for further tokens that are packed but not counted in seqused.

    Returns:
        (x [T, ...], indices int64 [T] into the flattened batch, cu_seqlens int32 [B + 1],
        max_seqlen, seqused int32 [B]: the tokens of attention_mask alone).
    """
    op = "unpad_input"
    _check_mask(op, hidden_states, "attention_mask", attention_mask)
    used = packed_mask = check.mask(op, "attention_mask", attention_mask)
    if unused_mask is not None:
        _check_mask(op, hidden_states, "unused_mask", unused_mask)
        packed_mask = used | check.mask(op, "unused_mask", unused_mask)
    packed = pack([hidden_states], packed_mask)
    seqused = used.sum(dim=-1, dtype=torch.int32)
    return packed.values[0], packed.indices, packed.cu_seqlens, packed.max_seqlen, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Copy [T, ...] back to [batch, seqlen, ...], zero elsewhere; differentiable.

    indices: int32 or int64 [T], a distinct row of the flattened batch for every token. Others raise
    an IndexError on the CPU and fail an assertion on the device elsewhere: rows would be lost.
    """
    check.integer("pad_input", "batch", batch, at_least=0)
    check.integer("pad_input", "seqlen", seqlen, at_least=0)
    return _scatter("pad_input", "hidden_states", hidden_states, indices, [batch, seqlen])


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Return x[indices] along the first axis. A repeated index gets the sum of the gradients."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros [first_axis_dim, ...] with `values` at `indices`; differentiable.

    indices: as in `pad_input`.
    """
    op = "index_put_first_axis"
    check.integer(op, "first_axis_dim", first_axis_dim, at_least=0)
    return _scatter(op, "values", values, indices, [first_axis_dim])


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the tokens of a padded batch whose rows hold several sequences; differentiable.

    Args:
        hidden_states: [B, L, ...].
        attention_mask_in_length: [B, L] integers; the non-zero ones of a row are the lengths of
            the sequences that fill it from the left.

    Returns:
        (x [T, ...], indices, cu_seqlens int32 [sequences + 1], max_seqlen).
    """
    op = "unpad_input_for_concatenated_sequences"
    lengths_BL = check.ids(op, "attention_mask_in_length", attention_mask_in_length)
    _check_mask(op, hidden_states, "attention_mask_in_length", lengths_BL)
    seqlen = lengths_BL.size(1)
    filled = lengths_BL.sum(dim=1, keepdim=True)
    # The size of the result waits for a GPU anyway, so reading costs nothing more.
    if bool((lengths_BL < 0).any()) or bool((filled > seqlen).any()):
        raise ValueError(
            f"{op}: attention_mask_in_length has rows whose lengths are negative or add up to more "
            f"than the {seqlen} tokens of a row; expected the lengths of the sequences in it."
        )
    packed = pack([hidden_states], torch.arange(seqlen, device=filled.device) < filled)
    lengths = lengths_BL[lengths_BL != 0]
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=filled.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return packed.values[0], packed.indices, cu_seqlens, max_seqlen


def _check_mask(op: str, hidden_states: Tensor, name: str, mask: Tensor) -> None:
    check.same_device(op, hidden_states=hidden_states, **{name: mask})
    if mask.dim() != 2 or hidden_states.shape[:2] != mask.shape:
        raise ValueError(
            f"{op}: {name} has shape {list(mask.shape)} and hidden_states "
            f"{list(hidden_states.shape)}; expected [B, L] and [B, L, ...]."
        )


def _scatter(op: str, name: str, values: Tensor, indices: Tensor, shape: list[int]) -> Tensor:
    """Return zeros [*shape, ...] with row t of `values` at row indices[t], all distinct."""
    check.same_device(op, **{name: values}, indices=indices)
    check.no_forward_ad(op, **{name: values})
    if values.dim() == 0 or indices.dim() != 1 or indices.numel() != values.shape[0]:
        raise ValueError(
            f"{op}: indices has shape {list(indices.shape)} and {name} {list(values.shape)}; "
            "expected [T] and [T, ...]."
        )
    indices, rows = check.ids(op, "indices", indices), math.prod(shape)
    valid = (indices >= 0) & (indices < rows)
    inverse = inverse_order(torch.where(valid, indices, -1), rows)
    if rows:
        position = torch.arange(indices.numel(), device=indices.device)
        valid = valid & (inverse[indices.clamp(0, rows - 1)] == position)
    if not check.readable(valid):
        torch._assert_async(valid.all(), f"{op}: an index outside [0, {rows}), or given twice")
    elif not valid.all():
        t = int((~valid).nonzero()[0])
        raise IndexError(
            f"{op}: indices[{t}] is {int(indices[t])}; expected 0 <= index < {rows}, every index "
            f"once: two rows of {name} do not fit into one."
        )
    return move([values], inverse, indices, 1, shape, 0.0, None)[0]
