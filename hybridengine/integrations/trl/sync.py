"""TRL's colocated vLLM: weights by our reshard in place of a gather and `load_weights`.

TRL gathers every parameter in full, in the dtype it is stored in, and vLLM's loader slices it. Here
each rank receives the bytes its engine lacks, in the engine's dtype (docs/reshard.md), and LoRA
adapters are merged as they are sent. Under FSDP1, DeepSpeed ZeRO-3 or bitsandbytes, and with a vLLM
server, TRL's own sync runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from hybridengine.errors import UserError

__all__ = ["init_vllm", "sync_weights"]

_BACKEND = {"backend": "hybridengine"}
_RESHARDS = "_hybridengine_reshards"  # attribute of a VLLMGeneration: whether ours syncs its engine

logger = logging.getLogger(__name__)


def init_vllm(self: Any, original: Callable[[Any], None]) -> None:
    """Run TRL's `VLLMGeneration._init_vllm`; a colocated engine keeps its weights writable."""
    reshards = self.mode == "colocate" and _has_whole_or_fsdp2_parameters(self)
    setattr(self, _RESHARDS, reshards)
    if not reshards:
        original(self)
        return
    from trl.generation import vllm_generation

    engine = functools.partial(vllm_generation.LLM, weight_transfer_config=_BACKEND)
    with patch.object(vllm_generation, "LLM", engine):
        original(self)


def sync_weights(self: Any, original: Callable[[Any], None]) -> None:
    """Write the trained weights into the engine, as TRL's `VLLMGeneration.sync_weights`.

    A model that cannot be resharded is detected before anything moves: a warning says why, and
    TRL's own sync runs, now and later.
    """
    if not getattr(self, _RESHARDS, False):
        original(self)
        return
    from hybridengine.integrations.vllm import reshard
    from hybridengine.sharding.layout import LayoutError

    if self.enable_sleep_mode:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.llm.wake_up(tags=["weights"])
        self._llm_weights_sleeping = False
    try:
        reshard(self.model, self.llm)
    except (LayoutError, UserError) as error:  # on every rank, by the same plan
        logger.warning(
            "weights are synced by TRL's own code, since they cannot be resharded: %s", error
        )
        setattr(self, _RESHARDS, False)
        original(self)


def _has_whole_or_fsdp2_parameters(generation: Any) -> bool:
    distributed = generation._dist
    return (
        distributed.fsdp_version in (None, 2)
        and not distributed.is_zero3
        and all(parameter.is_floating_point() for parameter in generation.model.parameters())
    )
