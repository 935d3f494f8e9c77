"""The reshard for other trainers.

`connect` and `reshard` are for an FSDP2 model and a vLLM `LLM` in one process. For engines in other
processes, `HybridEngineTrainerInitInfo` is the init info of vLLM's `WeightTransferTrainerFactory`;
importing it registers the backend there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hybridengine.sync.resharder import Resharder, SyncReport
from hybridengine.sync.weight_target import PlanOutdatedError

if TYPE_CHECKING:
    from vllm import LLM

    from hybridengine.remote.vllm_transfer.trainer import HybridEngineTrainerInitInfo

__all__ = ["HybridEngineTrainerInitInfo", "connect", "reshard"]

_connected: WeakKeyDictionary[LLM, tuple[torch.nn.Module, Resharder]] = WeakKeyDictionary()


def __getattr__(name: str) -> Any:
    """Import the trainers' half of vLLM's interface, which needs vLLM, when it is used."""
    if name != "HybridEngineTrainerInitInfo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hybridengine.remote.vllm_transfer import trainer

    trainer.register_trainer()
    return trainer.HybridEngineTrainerInitInfo


def connect(
    model: torch.nn.Module,
    llm: LLM,
    bucket_bytes: int | None = None,
    timeout_s: float | None = None,
) -> Resharder:
    """Plan the syncs of a `fully_shard`ed Hugging Face model into `llm`; every rank calls.

    model: parameters are DTensors of FSDP2 or HSDP, alone or over tensor or expert parallelism.
      PEFT's LoRA adapters, inside it or around it, are merged during a sync.
    llm: `vllm.LLM` on this rank, built with `distributed_executor_backend="external_launcher"`,
      `weight_transfer_config={"backend": "hybridengine"}` and VLLM_ENABLE_V1_MULTIPROCESSING=0.
    bucket_bytes: staging memory of one all-to-all; two are allocated at a time. None: by the memory
      that is free on the GPUs now, 64 MiB on CPUs.
    timeout_s: how long the other ranks may take in a collective of plan and syncs; a rank that
      stalls, or is stopped, is named then (RankFailedError). None, and at most: the timeout of the
      process group.

    Raises LayoutError where model and engine do not fit together; the message says what to change.

    Examples:
        >>> resharder = connect(model, llm)            # doctest: +SKIP
        >>> resharder.sync()                           # after every optimizer step
    """
    from hybridengine.remote.vllm_transfer import transfer

    return transfer.connect(model, llm, bucket_bytes, timeout_s)


def reshard(model: torch.nn.Module, llm: LLM, timeout_s: float | None = None) -> SyncReport:
    """Write the model's current weights into `llm`; every rank calls.

    The first call plans (`connect`); later ones with the same model and engine only move data. Each
    reads the tensors that the model has at that moment, and plans again where dtype, shape, device,
    placement or names have changed. timeout_s: as `connect`; that of the call that plans.
    """
    known = _connected.get(llm)
    if known is None or known[0] is not model:
        known = _connected[llm] = (model, connect(model, llm, timeout_s=timeout_s))
    try:
        return known[1].sync()
    except PlanOutdatedError:  # on every rank
        _, resharder = _connected[llm] = (model, connect(model, llm, timeout_s=timeout_s))
        return resharder.sync()
