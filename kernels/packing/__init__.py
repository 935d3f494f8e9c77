"""Packing: padded [B, L, ...] batches and ragged lists to flat [T, ...], and back."""

from .op import pack, unpack
from .packed import Packed, inverse_order, pack_sequences

__all__ = ["Packed", "inverse_order", "pack", "pack_sequences", "unpack"]
