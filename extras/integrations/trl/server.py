"""The weights of a vLLM server with which TRL's trainers generate.

TRL gathers every parameter in full on all ranks, and rank 0 broadcasts it over NCCL. Here every
rank sends slices of its own shards, cast to the server's dtype, to the workers of the server that
need them (docs/remote.md), over NCCL or gloo. The server decides: slices go to one that was
started with `--weight-transfer-config '{"backend": "hybridengine"}'`; one with the backend `nccl`
gets its weights from TRL's own code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.remote.servers.client import BACKEND, VllmServer, address_for, prepare_network
from hybridengine.run.errors import RolloutError
from hybridengine.run.messages import broadcast_value, check_secret, run_on_all_ranks, run_on_rank0
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.weight_target import RankFailedError, ReshardError

on_rank0 = partial(run_on_rank0, error_type=RolloutError)

RESTART = (
    "restart it with HYBRIDENGINE_SECRET set to the same text as here and VLLM_SERVER_DEV_MODE=1 "
    f'vllm serve MODEL --weight-transfer-config \'{{"backend": "{BACKEND}"}}\' --logprobs-mode '
    "processed_logprobs --max-logprobs -1 --enable-scale-out"
)

logger = logging.getLogger(__name__)


class ServerSync:
    """Sends a model's weights to the vLLM server at `url`. On every trainer rank.

    timeout_s: longest wait for an answer of the server, and as `WeightSender`.

    All methods are collective. They raise ReshardError on every rank; the server then stays paused,
    because its weights may be partially updated.

    Attributes:
        report: the report of the last `send`.
    """

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        self._server, self._timeout_s = VllmServer(url, 0, timeout_s), timeout_s
        self._engine: Any = None
        self.report: SyncReport | None = None

    def update(self, model: torch.nn.Module) -> None:
        """Pause the server, send, and resume it."""
        self.pause()
        self.send(model)
        self.resume()

    def pause(self) -> None:
        """Let requests wait. Running ones go on afterwards, from keys and values of new weights."""
        self._call(lambda: self._server.pause(keep_kv=False))

    def resume(self) -> None:
        self._call(self._server.resume)

    def send(self, model: torch.nn.Module) -> None:
        """Write the current weights of `model`, the same one each time, into the server."""
        try:
            if self._engine is None:
                self._engine = self._meet(model)
            self._engine.send_weights()
        except RankFailedError:
            raise
        except ReshardError as error:
            raise self._failure(error) from error
        self.report = self._engine.report

    def _meet(self, model: torch.nn.Module) -> Any:
        from hybridengine.integrations._servers import connect_servers

        url = self._server.url
        run_on_all_ranks(lambda: prepare_network([url]), RolloutError)
        main = os.environ.get("MASTER_ADDR", "127.0.0.1"), 0
        host = on_rank0(lambda: address_for(self._server.host, main)[0])
        # `update_weights` returns after the sync, which takes longer where it has to be repeated.
        client = VllmServer(url, 0, 4 * self._timeout_s)
        return connect_servers(model, client, broadcast_value(host, str), self._timeout_s)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            run_on_rank0(call, error_type=ReshardError)
        except ReshardError as error:
            raise self._failure(error) from error

    def _failure(self, error: ReshardError) -> ReshardError:
        return ReshardError(
            f"the weights of {self._server} could not be updated: {error}. Its log may say more. "
            f"If it does not run, or has other options, {RESTART}; then resume the training from "
            "its last checkpoint"
        )


def start_process_group() -> None:
    """Make the default process group of a single process, where no launcher has made one."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def obstacle_of(model: torch.nn.Module, distributed: Any) -> str:
    """Return what keeps the parameters of `model` from being sent in slices, "" for nothing.

    distributed: TRL's `DistributedBackend`.
    """
    if distributed.fsdp_version == 1:
        return "FSDP1 flattens parameters: set fsdp_version to 2"
    if distributed.is_zero3:
        return "DeepSpeed ZeRO-3 keeps parameters in its own shards: use FSDP2"
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        return "the parameters are quantized: load the model without quantization"
    return ""


def takes_slices(url: str, obstacle: str, device: torch.device, timeout_s: float = 60.0) -> bool:
    """Return whether the server at `url` gets slices; False: TRL's own code sends. Collective.

    obstacle: why this model cannot be sent so, "" if it can.
    device: the device of the trainer.

    Raises RolloutError on all ranks for a server, or a model, that neither can serve.
    """
    server = VllmServer(url, 0, timeout_s)
    transfer = on_rank0(lambda: server.settings()["weight_transfer_config"] or {})
    backend = broadcast_value((transfer or {}).get("backend", ""), str)
    given = f"{server} was started with the weight-transfer backend {backend or None!r}"
    if backend == BACKEND:
        if obstacle:
            raise RolloutError(
                f"{given}, which takes slices of plain or FSDP2 parameters, but {obstacle}. Or "
                "restart the server with the backend 'nccl'"
            )
        why = "the workers of the vLLM server verify by it what the trainers tell them"
        run_on_all_ranks(lambda: check_secret(why), RolloutError)
        return True
    if backend != "nccl" or device.type != "cuda":
        on_device = "" if backend != "nccl" else f"; TRL's own sync to it needs GPUs, not {device}"
        raise RolloutError(f"{given}{on_device}: {RESTART}")
    if dist.get_rank() == 0:
        logger.warning(
            "weights are sent by TRL's own code, since %s. For exact slices %s", given, RESTART
        )
    return False
