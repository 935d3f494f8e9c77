"""The operators of LLM reinforcement learning, one file each.

Every operator is a public function over a `torch.library` op with a fake kernel, an autograd
formula and a plain-PyTorch `reference` backend that is its specification.
"""

from ._backend import backend_table, choose_backend
from .strided_copy import strided_copy

__all__ = [
    "backend_table",
    "choose_backend",
    "strided_copy",
]
