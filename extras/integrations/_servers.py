"""The trainers' end of the weight sync to vLLM servers, for trainers that have such servers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import ModuleSource

from hybridengine.remote.vllm_transfer.trainer import (
    HybridEngineTrainerInitInfo,
    HybridEngineTrainerTransfer,
)

TIMEOUT_S = 300.0


def connect_servers(
    model: torch.nn.Module,
    clients: Any,
    master_address: str,
    timeout_s: float = TIMEOUT_S,
    transfer: type[HybridEngineTrainerTransfer] = HybridEngineTrainerTransfer,
) -> Any:
    """Return a `transfer` of `model` to the servers of `clients`. Collective over the trainers.

    clients: vLLM's `VLLMWeightSyncClient` of each server, used on rank 0.
    master_address: the address at which the servers' workers reach rank 0.

    Raises as `HybridEngineTrainerTransfer.trainer_init`.
    """
    info = HybridEngineTrainerInitInfo(master_address, rank=dist.get_rank(), timeout_s=timeout_s)
    return transfer.trainer_init(info, client=clients, source=ModuleSource(model))
