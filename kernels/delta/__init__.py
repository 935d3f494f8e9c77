"""Operators of a delta weight sync: follow changes through strided slices, code positions."""

from .gaps import decode_gaps, encode_gaps
from .table import ChangeTable

__all__ = ["ChangeTable", "decode_gaps", "encode_gaps"]
