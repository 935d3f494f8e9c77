"""Packing: padded [B, L, ...] batches and ragged lists to flat [T, ...], and back."""

from .op import Packed, pack, pack_sequences, unpack

__all__ = ["Packed", "pack", "pack_sequences", "unpack"]
