"""The fast path of LLM reinforcement learning: fused kernels and a zero-redundancy reshard.

Importing this is light: neither vLLM nor transformers is loaded until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridengine.api import Trainer

__version__ = "0.2.0"
__all__ = ["Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the trainer, and with it torch, when it is first used."""
    if name == "Trainer":
        return importlib.import_module("hybridengine.api").Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
