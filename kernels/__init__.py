"""The operators of LLM reinforcement learning, one file each.

Every operator is a public function over a `torch.library` op with a fake kernel, an autograd
formula and a plain-PyTorch `reference` backend that is its specification.
"""

from ._backend import backend_table, choose_backend
from .packing import Packed, pack, pack_sequences, unpack
from .strided_copy import strided_copy

__all__ = [
    "Packed",
    "backend_table",
    "choose_backend",
    "pack",
    "pack_sequences",
    "strided_copy",
    "unpack",
]
