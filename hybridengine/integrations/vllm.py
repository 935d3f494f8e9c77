"""The reshard inside other people's trainers: an FSDP2 model and a vLLM `LLM` in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from hybridengine.reshard.execute.failures import PlanOutdatedError
from hybridengine.reshard.execute.resharder import Resharder, SyncReport

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["connect", "reshard"]

_links: WeakKeyDictionary[LLM, tuple[torch.nn.Module, Resharder]] = WeakKeyDictionary()


def connect(model: torch.nn.Module, llm: LLM, bucket_bytes: int = 64 << 20) -> Resharder:
    """Plan the syncs of a `fully_shard`ed Hugging Face model into `llm`; every rank calls.

    model: parameters are DTensors over all ranks (1-D or HSDP). Adapters of PEFT's LoRA, inside it
      or around it, are merged on the way. llm: `vllm.LLM` on this rank, built with
      `distributed_executor_backend="external_launcher"`,
      `weight_transfer_config={"backend": "hybridengine"}` and VLLM_ENABLE_V1_MULTIPROCESSING=0.
    bucket_bytes: staging memory of one all-to-all; two are alive at a time.

    Raises LayoutError, saying what to change, where the two do not fit together.

    Example:
        >>> link = connect(model, llm)            # doctest: +SKIP
        >>> link.sync()                           # after every optimizer step
    """
    from hybridengine.rollout.vllm.transfer import attach

    return attach(model, llm, bucket_bytes)


def reshard(model: torch.nn.Module, llm: LLM) -> SyncReport:
    """Write the model's current weights into `llm`; every rank calls.

    The first call plans (`connect`); later ones with the same two only move data. They take the
    tensors that the model has at that moment, and plan again where dtype, shape, device, placement
    or names changed.
    """
    known = _links.get(llm)
    if known is None or known[0] is not model:
        known = _links[llm] = (model, connect(model, llm))
    try:
        return known[1].sync()
    except PlanOutdatedError:  # on every rank
        _, outdated = known
        known = _links[llm] = (model, connect(model, llm))
        known[1].engine.weight_version = outdated.engine.weight_version
        return known[1].sync()
