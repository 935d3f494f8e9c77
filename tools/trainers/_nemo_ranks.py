"""One rank of NeMo RL's policy, and its synchronizer: refits a server. … MODEL SERVER RESULTS"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import iscoroutine
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.run.messages import all_gather_values, broadcast_value
from tools.trainers._engines import post, shard, sync_then_lose

TRANSPORT = "hybridengine.integrations.nemo_rl_refit:ReshardEngine"


class PolicyGroup:
    """Runs a method of the policy worker of every rank, as Ray's worker group does."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._pool = worker, ThreadPoolExecutor(1)

    def run_all_workers_single_data(self, method: str, **arguments: Any) -> list[Future[Any]]:
        def run() -> list[Any]:
            own = getattr(self._worker, method)(**arguments)
            return all_gather_values(asyncio.run(own) if iscoroutine(own) else own, Any)

        return one_each(self._pool.submit(run), dist.get_world_size(), self._pool)

    def shutdown(self, cleanup_method: str) -> bool:
        return True


class GenerationGroup:
    """Runs a method of the generation workers, of rank 0; each calls its server.

    tp_size: workers of a server.
    """

    def __init__(self, workers: Sequence[Any], tp_size: int) -> None:
        self._workers, self._pool = workers, ThreadPoolExecutor(1)
        self.workers, self._calls = range(len(workers) * tp_size), ThreadPoolExecutor(len(workers))
        self._group = dist.new_group(backend="gloo")

    def run_all_workers_single_data(
        self, rpc: str, run_rank_0_only_axes: Any, **arguments: Any
    ) -> list[Future[Any]]:
        def run() -> Any:
            answer: list[Any] = [None, None]
            if dist.get_rank() == 0:
                calls = [
                    self._calls.submit(getattr(worker, rpc), **arguments)
                    for worker in self._workers
                ]
                try:
                    answer[0] = results_of(calls)
                except Exception as error:
                    answer[1] = f"{type(error).__name__}: {error}"
            value, failure = broadcast_value(answer, list[Any], group=self._group)
            if failure:
                raise RuntimeError(failure)
            return value

        return one_each(self._pool.submit(run), len(self._workers), self._pool)

    def shutdown(self, cleanup_method: str) -> bool:
        return True

    def run_all_workers_multiple_data(
        self, rpc: str, method_args: list[Any], run_rank_0_only_axes: Any, common_kwargs: Any
    ) -> list[Future[Any]]:
        (arguments,) = method_args  # of the one engine
        return self.run_all_workers_single_data(
            rpc, run_rank_0_only_axes, method_args=arguments, **common_kwargs
        )


def one_each(results: Future[list[Any]], count: int, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Return one future for each result of a list that becomes known."""
    return [pool.submit(lambda i: results.result()[i], index) for index in range(count)]


def results_of(futures: list[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


def main(model_path: str, url: str, folder: str) -> None:
    dist.init_process_group("gloo")
    import ray
    from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin
    from nemo_rl.models.policy.workers.checkpoint_engine import (
        DTensorCheckpointEngineSendMixin,
        PolicyCheckpointEngineMixin,
    )
    from nemo_rl.weight_sync.checkpoint_engine_config import checkpoint_engine_refit_config
    from nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer import (
        CheckpointEngineWeightSynchronizer,
    )
    from transformers import AutoModelForCausalLM

    class PolicyWorker(DTensorCheckpointEngineSendMixin, PolicyCheckpointEngineMixin):
        cpu_offload = False

        def __init__(self) -> None:
            self.rank = dist.get_rank()
            loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            self.model = shard(loaded)

        def _checkpoint_engine_params(self) -> Any:
            raise AssertionError("the iterator of full tensors was read")

    class GenerationWorker(VllmCheckpointEngineRpcMixin):
        llm = SimpleNamespace(collective_rpc=rpc(url))

    ray.get = results_of
    actor = ray.remote(PolicyWorker)  # wraps the methods, as NeMo RL's workers have them
    policy = actor.__ray_metadata__.modified_class()
    generation = SimpleNamespace(
        worker_group=GenerationGroup([GenerationWorker()], tp_size=2),
        dp_size=1,
        cfg={"vllm_cfg": {"async_engine": False}},
        prepare_refit_info=lambda info: None,
    )
    config = checkpoint_engine_refit_config(
        {"refit_transport": TRANSPORT, "refit_cfg": {TRANSPORT: {}}}
    )
    synchronizer = CheckpointEngineWeightSynchronizer(
        SimpleNamespace(worker_group=PolicyGroup(policy), prepare_refit_info=lambda: {}),
        generation,
        config,
        _bucket_size_bytes=1 << 20,
    )
    synchronizer.init_communicator()
    sync = synchronizer.sync_weights
    sync_then_lose(folder, policy.model, sync, lambda: policy.checkpoint_engine.report)


def rpc(url: str) -> Callable[..., list[Any]]:
    """Return `LLM.collective_rpc` of a server."""

    def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return post(f"{url}/collective_rpc", {"method": method, "args": list(args)})["results"]

    return collective_rpc


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
