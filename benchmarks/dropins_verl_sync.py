"""verl's actor → vLLM in the same process, by the checkpoint engine `hybridengine`, on the CPU.

    torchrun --nproc-per-node 2 -m benchmarks.dropins_verl_sync

Every rank trains with verl's worker (FSDP2) and holds its tensor-parallel part of a vLLM engine.
After an actor update, `ActorRolloutRefWorker.update_weights` syncs. The engine's weights must be
those that vLLM's loader makes of verl's full tensors, bit for bit; the bytes of both are shown.
"""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM runs in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import asyncio
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import _verl_engine as engine  # first: it makes the CPU verl's platform
from benchmarks.dropins_verl import BATCH, MICRO_BATCH_TOKENS, random_batch, save_model

VOCAB = 1000


def main() -> int:
    engine.start_process_group()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = str(folders[0])
    if dist.get_rank() == 0:
        save_model(folder, VOCAB)
    dist.barrier()
    actor = engine.training_worker(folder, MICRO_BATCH_TOKENS, dist.get_world_size() * BATCH)
    trained: Any = actor.engine
    llm = _build_llm(folder)

    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.engine_workers import ActorRolloutRefWorker

    import hybridengine.integrations.verl.checkpoint_engine  # noqa: F401

    sync: Any = CheckpointEngineRegistry.new("hybridengine", is_master=False, bucket_size=1 << 20)
    sync.attach(trained, llm)
    settings = SimpleNamespace(backend="hybridengine")
    worker = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=settings)),
        actor=actor,
        checkpoint_engine=sync,
    )
    wrong: list[str] = []
    for step in range(2):
        engine.update(actor, random_batch(10 * step + dist.get_rank(), VOCAB))
        metrics = asyncio.run(ActorRolloutRefWorker.update_weights(worker, global_steps=step))
        wrong += _wrong_tensors(llm, trained)
    full = sum(p.numel() for p in trained.module.parameters()) * 4
    gathered = full * (1 - 1 / dist.get_world_size()) / 2**20
    print(
        f"rank {dist.get_rank()}: {len(wrong)} wrong engine tensors {wrong[:3]}, "
        f"{metrics['update_weights/mib_received']:.2f} MiB received; verl gathers {gathered:.2f}"
    )
    return bool(wrong)


def _build_llm(folder: str) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=dist.get_world_size(),
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "hybridengine"},
        max_model_len=64,
        enforce_eager=True,
        kv_cache_memory_bytes=16 << 20,
        seed=0,
    )


def _wrong_tensors(llm: Any, training_engine: Any) -> list[str]:
    """Return the engine tensors that differ from what vLLM's loader makes of verl's tensors."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()
    arrived = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        weights, _ = training_engine.get_per_tensor_param()
        model.load_weights(weights)
    return [n for n, p in model.named_parameters() if not torch.equal(p, arrived[n])]


if __name__ == "__main__":
    sys.exit(main())
