"""Packed batches of models with linear attention in verl's FSDP engine (verl 0.9.1).

Importing this module in every process of a verl job enables it:

    VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.linear_attention

With `use_remove_padding` the engine packs its batches. A model whose layers would let them leak
from one sequence into the next is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridengine.hybrid import pack_linear_attention, takes_packed
from hybridengine.integrations._patching import Patches
from hybridengine.run.errors import ModelError

__all__ = ["PATCHES"]

_BUILD = "workers.engine.fsdp.transformer_impl.FSDPEngine._build_fsdp_module"


def _build_fsdp_module(self: Any, module: torch.nn.Module) -> torch.nn.Module:
    """Change the layers of the model before it is sharded."""
    if self.use_remove_padding:
        pack_linear_attention(module)
        if takes_packed(module) and self.ulysses_sequence_parallel_size > 1:
            raise ModelError(
                f"ulysses_sequence_parallel_size: got {self.ulysses_sequence_parallel_size}, "
                f"expected 1: {type(module).__name__} carries a state along the sequence"
            )
    wrapped: torch.nn.Module = PATCHES.original(_BUILD)(self, module)
    return wrapped


PATCHES = Patches("verl", {"linear_attention": {_BUILD: _build_fsdp_module}})
PATCHES.patch()
