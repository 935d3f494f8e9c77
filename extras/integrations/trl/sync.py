"""TRL's vLLM engines: weights by our reshard in place of a gather and `load_weights`.

TRL gathers every parameter in full, in the dtype it is stored in, and vLLM's loader slices it. Here
each rank of a colocated engine receives the bytes it lacks in the engine's dtype (docs/reshard.md),
a server gets slices from all ranks (`ServerSync`), and LoRA adapters are merged as they are sent.
Under FSDP1, DeepSpeed ZeRO-3 or bitsandbytes TRL's own sync runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from hybridengine.run.errors import RolloutError, UserError

_BACKEND = {"backend": "hybridengine"}
RESHARDS = "_hybridengine_reshards"  # attribute of a VLLMGeneration: whether ours syncs its engine
_SERVER = "_hybridengine_server"  # attribute of a VLLMGeneration: the ServerSync of its server

logger = logging.getLogger(__name__)


def init_vllm(self: Any, original: Callable[[Any], None]) -> None:
    """Run TRL's `VLLMGeneration._init_vllm`; a colocated engine keeps its weights writable."""
    from hybridengine.integrations.trl.server import obstacle_of

    obstacle = obstacle_of(self.model, self._dist)
    if self.mode == "server":
        _init_server(self, obstacle)
        return
    reshards = self.mode == "colocate" and not obstacle
    setattr(self, RESHARDS, reshards)
    if not reshards:
        original(self)
        return
    from trl.generation import vllm_generation

    engine = functools.partial(vllm_generation.LLM, weight_transfer_config=_BACKEND)
    with patch.object(vllm_generation, "LLM", engine):
        original(self)


def _init_server(self: Any, obstacle: str) -> None:
    """Connect to the server, as TRL's `_init_vllm`; if that fails, raise on every rank."""
    from trl.generation.vllm_client import VLLMClient

    from hybridengine.integrations.trl import server

    url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
    device = self.accelerator.device
    server.start_process_group()
    client = server.on_rank0(
        lambda: VLLMClient(
            base_url=url, group_port=self.group_port, connection_timeout=self.server_timeout
        )
    )
    if client is not None:
        self.vllm_client = client
    if server.takes_slices(url, obstacle, device):
        setattr(self, _SERVER, server.ServerSync(url))
        return
    server.on_rank0(lambda: self.vllm_client.init_communicator(device=device))


def sync_weights(self: Any, original: Callable[[Any], None]) -> None:
    """Write the trained weights into the engine, as TRL's `VLLMGeneration.sync_weights`.

    A model that cannot be resharded into a colocated engine is detected before anything moves: a
    warning says why, and TRL's own sync runs, now and later.
    """
    if (sync := getattr(self, _SERVER, None)) is not None:
        sync.update(self.model)
        return
    if not getattr(self, RESHARDS, False):
        original(self)
        return
    from hybridengine.integrations.vllm import reshard
    from hybridengine.sync.layout import LayoutError

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
        setattr(self, RESHARDS, False)
        original(self)


def init_communicator(self: Any, device: Any, original: Callable[..., None]) -> None:
    """Run TRL's `VLLMClient.init_communicator`, whose callers send full tensors over NCCL.

    Raises RolloutError for a server that takes slices, instead of waiting for it to join.
    """
    transfer = self.get_server_info()["weight_transfer_config"] or {}
    if transfer.get("backend") == _BACKEND["backend"]:
        raise RolloutError(
            f"the vLLM server at {self.base_url} takes slices from all trainer ranks, but this "
            "trainer sends full tensors over NCCL itself, not by VLLMGeneration.sync_weights; "
            'restart the server with --weight-transfer-config \'{"backend": "nccl"}\''
        )
    original(self, device)
