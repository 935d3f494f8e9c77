"""Operators of a delta weight sync: find what changed, follow strided slices, code positions."""

from .changed import Changes, changed_elements
from .gaps import decode_gaps, encode_gaps
from .table import ChangeTable

__all__ = ["ChangeTable", "Changes", "changed_elements", "decode_gaps", "encode_gaps"]
