"""verl's vLLM rollout with the exact weight sync: what `sync` registers in place of verl's classes.

`ServerAdapter` is in every trainer process, or next to every worker of a server that is apart;
`Replica` starts the servers, of the class `Server`. verl imports this module when it needs them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout import vllm_async_server, vllm_rollout
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

from hybridengine.integrations._patching import Patches
from hybridengine.integrations.verl import checkpoint_engine
from hybridengine.integrations.verl.servers import ServerSender
from hybridengine.integrations.verl.weights import PATCHES, ShardedWeights
from hybridengine.sync.layout import LayoutError

# Any: whether verl is installed where types are checked makes no difference.
_ServerAdapter: Any = vllm_rollout.ServerAdapter
_Server: Any = vllm_async_server.vLLMHttpServer
_Replica: Any = vllm_async_server.vLLMReplica
_TRANSFER = {"backend": "hybridengine"}  # vLLM's `weight_transfer_config`

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class ServerAdapter(_ServerAdapter):
    """verl's client of a vLLM server, with our `update_weights`."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh, replica_rank)
        self._sender: ServerSender | None = None
        if _is_ours(self.config):
            check_supported(self.config, self.model_config)
            checkpoint_engine.server_of_this_process = self._server_name(self.replica_rank)

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Write the trained weights into the servers; every trainer rank calls it.

        weights: what the training engine returned. None from a checkpoint engine of ours: the
        trainers are writing into the server's workers.

        Raises LayoutError for an engine without FSDP2's shards; else as `ServerSender.send`.
        """
        if not _is_ours(self.config):
            await super().update_weights(weights, global_steps, wire_format, **kwargs)
            return
        if weights is not None:
            self._send(weights, global_steps)

    def _send(self, weights: Any, global_steps: int | None) -> None:
        if not isinstance(weights, ShardedWeights):
            raise LayoutError(
                "actor.strategy: the exact weight sync reads shards of verl's FSDP2 engine, and "
                f"this engine gives a {type(weights).__name__}: set "
                "actor_rollout_ref.actor.strategy=fsdp2"
            )
        if self._sender is None:
            num_servers = int(os.environ["WORLD_SIZE"]) // self.config.tensor_model_parallel_size
            is_one_machine = os.environ["RAY_LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
            self._sender = ServerSender(
                [self._server_name(index) for index in range(num_servers)],
                "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"],
            )
        report = self._sender.send(weights, global_steps)
        if self.replica_rank == 0 and self.rollout_rank == 0:
            logger.info(
                "weights synced: %.1f ms, %.2f MiB sent by this rank",
                report.milliseconds,
                report.bytes_sent / 2**20,
            )

    def _server_name(self, replica_rank: int) -> str:
        return f"{self._get_server_name_prefix()}server_{replica_rank}_0"


class Server(_Server):
    """verl's vLLM server, whose workers receive weights from the trainers."""

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        if not _is_ours(self.config):
            return
        check_supported(self.config, self.model_config)
        if (given := engine_kwargs.setdefault("weight_transfer_config", _TRANSFER)) != _TRANSFER:
            raise LayoutError(
                f"rollout.engine_kwargs.vllm.weight_transfer_config: got {given}, expected "
                f"{_TRANSFER} or none with the exact weight sync"
            )

    async def transfer_weights(self, name: str, argument: Any = None) -> None:
        """Call one of vLLM's weight-transfer methods on the engine and all of its workers."""
        method = getattr(self.engine, name)
        if name == "init_weight_transfer_engine":
            await method(WeightTransferInitRequest(init_info=argument))
        elif name == "update_weights":
            await method(WeightTransferUpdateRequest(update_info=argument))
        elif name == "finish_weight_update":
            await method(argument)
        else:
            await method()


class Replica(_Replica):
    """verl's replica, of our `Server` where it generates with the trained weights."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        super().__init__(
            replica_rank,
            config,
            model_config,
            gpus_per_node,
            is_reward_model,
            is_teacher_model,
            name_suffix,
        )
        if not (is_reward_model or is_teacher_model):
            self.server_class = ray.remote(Server)


def check_supported(rollout: Any, model: Any) -> None:
    """Raise LayoutError for options of verl that the exact weight sync does not support.

    rollout, model: verl's `RolloutConfig` and `HFModelConfig`.
    """
    lora: Mapping[str, Any] = model.lora or {}
    if (model.lora_rank > 0 or lora.get("rank", 0) > 0) and not lora.get("merge", False):
        raise LayoutError(
            "model.lora: the exact weight sync merges LoRA adapters as it sends them, and verl "
            "asks for adapters of their own: set actor_rollout_ref.model.lora.merge=True"
        )
    refused = {
        "data_parallel_size": rollout.data_parallel_size > 1,
        "pipeline_model_parallel_size": rollout.pipeline_model_parallel_size > 1,
        "quantization": rollout.quantization is not None,
        "qat.enable": bool((rollout.qat or {}).get("enable", False)),
        "mtp.enable_rollout": bool(
            rollout.mtp and rollout.mtp.enable and rollout.mtp.enable_rollout
        ),
        "disaggregation.enabled": rollout.disaggregation.enabled,
    }
    if wrong := [name for name, is_set in refused.items() if is_set]:
        raise LayoutError(
            f"actor_rollout_ref.rollout.{wrong[0]} is not supported by the exact weight sync; "
            "remove it, or remove hybridengine.integrations.verl.sync from "
            "VERL_USE_EXTERNAL_MODULES"
        )


def _is_ours(rollout: Any) -> bool:
    return rollout.checkpoint_engine.backend in ("naive", "hybridengine")


_ROLLOUT = "workers.rollout.vllm_rollout"
_ASYNC = f"{_ROLLOUT}.vllm_async_server"
_OVERRIDING: dict[str, Callable[..., Any]] = {
    f"{_ROLLOUT}.vllm_rollout.ServerAdapter.__init__": ServerAdapter.__init__,
    f"{_ROLLOUT}.vllm_rollout.ServerAdapter.update_weights": ServerAdapter.update_weights,
    f"{_ASYNC}.vLLMHttpServer._preprocess_engine_kwargs": Server._preprocess_engine_kwargs,
    f"{_ASYNC}.vLLMReplica.__init__": Replica.__init__,
}
# Compared with verl's, which stay as they are.
OVERRIDDEN = Patches("verl", {"overridden": _OVERRIDING})
OVERRIDDEN.check("overridden")
PATCHES.patch()
