"""Packing: padded batches and ragged lists to flat [T, ...], and back; common prefixes once."""

from .forest import PackedForest, pack_forest
from .op import move_rows, pack, unpack
from .packed import Packed, inverse_order, pack_sequences

__all__ = [
    "Packed",
    "PackedForest",
    "inverse_order",
    "move_rows",
    "pack",
    "pack_forest",
    "pack_sequences",
    "unpack",
]
