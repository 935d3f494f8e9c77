"""NeMo RL's refit of colocated vLLM engines by ours, in place of ZMQ and CUDA IPC.

    from hybridengine.integrations import nemo_rl_colocated

    nemo_rl_colocated.patch()       # in the driver, before its Policy is made

    policy.generation.vllm_kwargs:
      weight_transfer_config: {backend: hybridengine}
      worker_cls: hybridengine.integrations.nemo_rl_worker.Worker

`Policy` then starts workers of a subclass of NeMo RL's, in the same environments. Their
`prepare_refit_info` gathers nothing and tells the engines where the trainers are, instead of names
and shapes; `stream_weights_via_ipc_zmq` sends slices of each rank's shards, and vLLM's workers
write them in place in `update_weights_via_ipc_zmq`. Memory, sleep and caches around it are NeMo
RL's. The size of the buckets follows the free memory; `refit_buffer_size_gb` is not used.
HYBRIDENGINE_SECRET must be in the environment of all processes.
"""

from __future__ import annotations

import importlib
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.run.activity import this_process
from hybridengine.run.messages import SignedStore, broadcast_value

from .nemo_rl import NemoPatches

__all__ = ["SendsShards", "patch", "patched", "receive_in_workers", "unpatch"]

_WORKERS = "nemo_rl.models.policy.workers"
_THEIRS = {  # policy worker → its module
    "DTensorPolicyWorker": f"{_WORKERS}.dtensor_policy_worker",
    "DTensorPolicyWorkerV2": f"{_WORKERS}.dtensor_policy_worker_v2",
}
_RESOLVE = "models.policy.utils.resolve_policy_worker_cls"
_RECEIVE = (
    "models.generation.vllm.vllm_backend.VllmInternalWorkerExtension.update_weights_via_ipc_zmq"
)
_KEY = "hybridengine"  # of what `prepare_refit_info` returns: where the trainers are


# The driver


def resolve_policy_worker_cls(default_cls: str, config: dict[str, Any]) -> str:
    """Return the name of our subclass of a DTensor policy worker whose engines are colocated."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    theirs: str = _PATCHES.original(_RESOLVE)(default_cls, config)
    module, _, name = theirs.rpartition(".")
    generation = config.get("generation") or {}
    if _THEIRS.get(name) != module or not generation.get("colocated", {}).get("enabled"):
        return theirs
    ours = f"{__name__}.{name}"
    ACTOR_ENVIRONMENT_REGISTRY[ours] = ACTOR_ENVIRONMENT_REGISTRY[theirs]
    return ours


# The policy's workers


class SendsShards:
    """What our subclass of a policy worker overrides."""

    @torch.no_grad()
    def prepare_refit_info(self: Any) -> dict[str, Any]:
        """Open the store that the engines join. Collective over the policy workers."""
        from hybridengine.integrations.nemo_rl_refit import ReshardEngine, check_policy

        check_policy(self, None)
        self.reshard_engine = ReshardEngine(None)
        info = self.reshard_engine.prepare()
        sizes, world_size = self.cfg["generation"]["vllm_cfg"], dist.get_world_size()
        of_engine = sizes["tensor_parallel_size"] * sizes.get("pipeline_parallel_size", 1)
        self.reshard_engine.init_policy_process_group(
            worker_rank=dist.get_rank(),
            train_world_size=0,
            rollout_world_size=world_size,
            metadata=[{"engine_world_size": of_engine}],
        )
        return {_KEY: info}

    @torch.no_grad()
    def stream_weights_via_ipc_zmq(
        self: Any, buffer_size_bytes: int = 0, kv_scales: dict[str, float] | None = None
    ) -> None:
        """Send the current weights to all engines. Collective over the policy workers."""
        from hybridengine.integrations.nemo_rl_refit import check_policy

        check_policy(self, kv_scales)
        if self.cpu_offload:
            self.model = self.move_to_cuda(self.model)
        self.reshard_engine.send(self.model)


@cache
def __getattr__(name: str) -> Any:
    """Return our subclass of a policy worker; its module imports in that worker's process only."""
    if name not in _THEIRS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import ray
    from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker

    module = importlib.import_module(_THEIRS[name])
    worker = type(name, (SendsShards, getattr(module, f"{name}Impl")), {})
    environment = get_runtime_env_for_policy_worker(_THEIRS[name].rpartition(".")[2])
    return ray.remote(runtime_env=environment)(worker)


# vLLM's workers


def receive_in_workers() -> None:
    """Let vLLM's workers of this process receive; a policy that is not ours streams as before."""
    _PATCHES.patch("engine")


def update_weights_via_ipc_zmq(*args: Any, **kwargs: Any) -> bool:  # NeMo RL's decorator has these
    """Receive the weights of vLLM's worker. Collective over the workers of an engine."""
    (self,) = args
    if _KEY not in self.state_dict_info:
        done: bool = _PATCHES.original(_RECEIVE)(self, **kwargs)
        return done
    info = self.state_dict_info[_KEY]
    if getattr(self, "reshard_info", None) != info:
        self.reshard_engine, self.reshard_info = _join(info), info
    self.reshard_engine.receive(self)
    return True


def _join(info: dict[str, Any]) -> Any:
    """Return the worker's end of the sync to the trainers. Engines are numbered as they come."""
    from vllm.distributed.parallel_state import get_world_group

    from hybridengine.integrations.nemo_rl_refit import ReshardEngine

    group, index = get_world_group().cpu_group, 0
    if dist.get_rank() == 0:
        store = dist.TCPStore(info["host"], info["port"], is_master=False, wait_for_workers=False)
        names, own = SignedStore(store, "engines"), this_process()
        index = next(i for i in count() if names.claim(str(i), own, str) == own)
    engine = ReshardEngine(None)
    engine.init_rollout_process_group(
        rollout_rank=broadcast_value(index, int, group=group) * dist.get_world_size(),
        train_world_size=1,
        rollout_world_size=0,
        metadata=[info],
    )
    return engine


_PATCHES = NemoPatches(
    {
        "driver": {_RESOLVE: resolve_policy_worker_cls},
        "engine": {_RECEIVE: update_weights_via_ipc_zmq},
    },
    default_groups=("driver",),
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
