"""One rank of NeMo RL's policy and its driver; refits colocated engines. MODEL SERVERS RESULTS"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tools.trainers._engines import shard, sync_then_lose
from tools.trainers._nemo_ranks import GenerationGroup, PolicyGroup, results_of, rpc

_GENERATION = {
    "colocated": {"enabled": True},
    "vllm_cfg": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "async_engine": False},
}
_CONFIG = {"generation": _GENERATION, "dtensor_cfg": {"enabled": True, "_v2": False}}
_THEIRS = "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker"


def replace_what_needs_a_gpu() -> None:
    """Let NeMo RL's modules import and run without a GPU, and without experiment trackers."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.nvtx.range_push = lambda *_: 0
    torch.cuda.nvtx.range_pop = lambda *_: 0
    for name in ("mlflow", "swanlab", "wandb"):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)


def policy_worker(model_path: str) -> Any:
    """Return a worker of the class that the driver resolves, with what its `__init__` makes."""
    from nemo_rl.models.policy import lm_policy
    from nemo_rl.utils.timer import Timer
    from transformers import AutoModelForCausalLM

    from hybridengine.integrations import nemo_rl_colocated

    with nemo_rl_colocated.patched():
        resolved = lm_policy.resolve_policy_worker_cls(_THEIRS, _CONFIG)
    module, _, name = resolved.rpartition(".")
    actor = getattr(importlib.import_module(module), name)
    worker_class = actor.__ray_metadata__.modified_class
    worker = worker_class.__new__(worker_class)
    loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    worker.rank, worker.cfg, worker.cpu_offload = dist.get_rank(), _CONFIG, False
    worker.model, worker.timer = shard(loaded), Timer()
    worker.optimizer = torch.optim.SGD(worker.model.parameters())
    return worker


def generation_worker(url: str) -> Any:
    """Return NeMo RL's generation worker of an engine that is a server."""
    from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl

    worker = VllmGenerationWorkerImpl.__new__(VllmGenerationWorkerImpl)
    worker.cfg = _GENERATION
    worker.llm = SimpleNamespace(collective_rpc=rpc(url), wake_up=lambda tags: None)
    return worker


def main(model_path: str, urls: str, folder: str) -> None:
    dist.init_process_group("gloo")
    replace_what_needs_a_gpu()
    import ray
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.models.policy.lm_policy import Policy
    from nemo_rl.weight_sync.ipc_weight_synchronizer import IPCWeightSynchronizer

    ray.get = results_of
    worker = policy_worker(model_path)
    policy, generation = Policy.__new__(Policy), VllmGeneration.__new__(VllmGeneration)
    policy.worker_group = PolicyGroup(worker)
    engines = [generation_worker(url) for url in urls.split(",")]
    generation.worker_group, generation.cfg = GenerationGroup(engines, tp_size=1), _GENERATION
    policy.weight_synchronizer = generation.weight_synchronizer = None
    synchronizer = IPCWeightSynchronizer(policy, generation, refit_buffer_size_gb=1)
    synchronizer.init_communicator()
    sync_then_lose(
        folder, worker.model, synchronizer.sync_weights, lambda: worker.reshard_engine.report
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
