"""NeMo RL's refit of separate vLLM engines by ours: a checkpoint engine, chosen by its config.

    policy.generation.refit_transport: "hybridengine.integrations.nemo_rl_refit:ReshardEngine"
    policy.generation.refit_cfg:
      "hybridengine.integrations.nemo_rl_refit:ReshardEngine": {}
    policy.generation.vllm_kwargs:
      weight_transfer_config: {backend: hybridengine}
      worker_cls: hybridengine.integrations.nemo_rl_worker.Worker

NeMo RL's synchronizer makes one in every policy worker and in every worker of vLLM. Every policy
worker then sends slices of its own shards, and vLLM's workers write them in place, where NeMo RL
gathers each parameter on every rank and runs `load_weights`. Checkpoint engines are in NeMo RL's
main branch (August 2026), after 0.7.0. HYBRIDENGINE_SECRET must be in the environment of all.

A checkpoint engine is given an iterator of full tensors, and no model. Therefore making the first
one replaces the two methods that use an engine; other engines are used as before.

Colocated engines: `hybridengine.integrations.nemo_rl_colocated`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from typing import Any, NoReturn

import torch.distributed as dist
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
from torch import Tensor

from hybridengine.remote.vllm_transfer.engine_sender import EngineSender, module_arguments
from hybridengine.run.messages import broadcast_value
from hybridengine.sync.layout import LayoutError

from .nemo_rl import NemoPatches

__all__ = ["ReshardEngine", "check_policy", "patch"]

_REPLACED = "NeMo RL calls `send` and `receive`, as this module has replaced their callers"


class ReshardEngine(CheckpointEngine):
    """One worker's end of the sync: of a policy worker, or of a worker of vLLM.

    bucket_size: bytes, of update_weights_bucket_memory_ratio; two buckets are in use at a time.
      None: by the memory that is free.
    release_after_refit: NeMo RL's; ends the connections after every refit.
    timeout_s: see `WeightSender`.

    Attributes:
        report: the report of the policy's last sync.
    """

    def __init__(
        self, bucket_size: int | None, release_after_refit: bool = False, timeout_s: float = 300.0
    ) -> None:
        patch()
        self._bucket_bytes, self._timeout_s = bucket_size, timeout_s
        self._sender: EngineSender | None = None
        self._num_engines = self._version = 0
        self._join_info: dict[str, Any] | None = None
        self.report: Any = None

    def prepare(self) -> dict[str, Any]:
        """Return what the other side needs. Collective over the policy workers."""
        if is_engine():
            return {"engine_world_size": dist.get_world_size()}
        import ray

        host = broadcast_value(ray.util.get_node_ip_address(), str)
        self._sender = EngineSender(
            host, bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s
        )
        self._version = 0
        return self._sender.join_info(0)

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Count the engines. metadata: of the policy workers, then of vLLM's."""
        of_engine = metadata[train_world_size]["engine_world_size"]
        self._num_engines = rollout_world_size // of_engine

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Note where the trainers are; the worker joins them at the first refit."""
        info = {k: v for k, v in metadata[0].items() if k != "rank"}
        self._join_info = info | {"index": rollout_rank // dist.get_world_size()}

    def send(self, model: Any) -> None:
        """Send the policy's current weights to all engines. Collective over the policy workers."""
        assert self._sender is not None
        if not self._version:
            self._sender.set_model(module_arguments(model), self._num_engines)
        self._version += 1
        self.report = self._sender.send(self._version)

    def receive(self, worker: Any) -> None:
        """Take part in one sync. worker: vLLM's. Collective over the workers of an engine."""
        if self._join_info is not None:
            worker.init_weight_transfer_engine(self._join_info)
            self._join_info = None
        worker.start_weight_update()
        worker.update_weights({})
        worker.finish_weight_update()

    def finalize(self) -> None:
        """End the connections; `prepare` makes new ones."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    async def send_weights(self, weights: Generator[tuple[str, Tensor], None, None]) -> NoReturn:
        """Not called: see `send`."""
        raise NotImplementedError(_REPLACED)

    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Tensor]], None]:
        """Not called: see `receive`."""
        raise NotImplementedError(_REPLACED)


def is_engine() -> bool:
    """Tell whether this process is a worker of vLLM."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    return state is not None and state.model_parallel_is_initialized()


def check_policy(worker: Any, kv_scales: dict[str, float] | None) -> None:
    """Raise LayoutError for a policy worker whose weights cannot be sent."""
    if not hasattr(worker, "_checkpoint_engine_params"):
        raise LayoutError(
            f"the policy worker is a {type(worker).__name__}, expected one of DTensor (dtensor_cfg."
            "enabled=true): Megatron's parameters are not those of the engine's checkpoint"
        )
    if getattr(worker.model, "state_dict_adapter", None) is not None:
        raise LayoutError(
            "the policy is a model of NeMo AutoModel with a state_dict_adapter, whose parameters "
            "are not those of the checkpoint; load it as transformers has it "
            "(automodel_kwargs.force_hf=true)"
        )
    if kv_scales is not None:
        raise LayoutError("scales of an FP8 KV cache are not sent")


async def send_weights_via_checkpoint_engine(
    self: Any, kv_scales: dict[str, float] | None = None
) -> None:
    """Send the sharded model of a policy worker through ours."""
    if not isinstance(self.checkpoint_engine, ReshardEngine):
        return await _PATCHES.original(f"{_POLICY}.{_SEND}")(self, kv_scales)
    check_policy(self, kv_scales)
    self._prepare_checkpoint_engine_weight_send()
    try:
        self.checkpoint_engine.send(self.model)
    finally:
        self._finalize_checkpoint_engine_weight_send()


async def _update_weights_from_checkpoint_engine_async(self: Any) -> bool:
    """Receive the weights of vLLM's worker through ours."""
    if not isinstance(self.checkpoint_engine, ReshardEngine):
        done: bool = await _PATCHES.original(f"{_WORKER}.{_UPDATE}")(self)
        return done
    self.checkpoint_engine.receive(self)
    return True


_POLICY = "models.policy.workers.checkpoint_engine.PolicyCheckpointEngineMixin"
_WORKER = "models.generation.vllm.checkpoint_engine.VllmCheckpointEngineMixin"
_SEND, _UPDATE = (
    "send_weights_via_checkpoint_engine",
    "_update_weights_from_checkpoint_engine_async",
)
_PATCHES = NemoPatches(
    {
        "policy": {f"{_POLICY}.{_SEND}": send_weights_via_checkpoint_engine},
        "engine": {f"{_WORKER}.{_UPDATE}": _update_weights_from_checkpoint_engine_async},
    }
)


def patch() -> None:
    """Replace the method that uses an engine here: of the policy, or of vLLM's worker."""
    _PATCHES.patch("engine" if is_engine() else "policy")
