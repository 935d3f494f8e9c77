"""Record what a weight sync of verl moved and wrote, whichever sync it is.

    VERL_USE_EXTERNAL_MODULES=...,tools.trainers._verl_record VERL_RECORD=FOLDER

In FOLDER, per trainer rank and update: time, growth of the peak memory, bytes between processes.
Per server and update: SHA-256 of every weight in every worker. Requests get seeds of their own, so
that what is sampled does not depend on the order in which verl's workers submit them.
"""

from __future__ import annotations

import functools
import json
import os
import time
import types
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from tools.trainers._after_import import after_import

_FOLDER = Path(os.environ["VERL_RECORD"])
_moved: Counter[str] = Counter()  # bytes out of this process since the last update


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1])


def _append(name: str, row: dict[str, Any]) -> None:
    with (_FOLDER / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _record_workers(module: types.ModuleType) -> None:
    """Of `verl.workers.engine_workers`: every update of the weights on a trainer rank."""
    worker = module.ActorRolloutRefWorker
    update_weights = worker.update_weights

    @functools.wraps(update_weights)
    async def recorded(self: Any, global_steps: Any = None, mode: str = "auto") -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, started = _peak_kib(), time.perf_counter()
        _moved.clear()
        result = await update_weights(self, global_steps=global_steps, mode=mode)
        row = {"step": global_steps, "ms": (time.perf_counter() - started) * 1e3}
        row["peak_mib"] = (_peak_kib() - before) / 1024
        _append(f"sync_{self.rank}.jsonl", row | _moved)
        return result

    worker.update_weights = recorded


def _record_shards(module: types.ModuleType) -> None:
    """Of `hybridengine.integrations.verl.servers`: bytes that our sync sent."""
    send = module.ServerSender.send

    def recorded(self: Any, weights: Any, global_steps: int | None) -> Any:
        report = send(self, weights, global_steps)
        _moved["sent_bytes"] += report.bytes_sent
        _moved["gathered_bytes"] += 0
        if hasattr(weights._engine.module, "peft_config"):  # LoRA
            _save_gathered(weights, global_steps)
        return report

    module.ServerSender.send = recorded


def _save_gathered(weights: Any, step: int | None) -> None:
    """Save the full tensors that verl's sync would send, LoRA adapters merged by PEFT."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights}
    if dist.get_rank() == 0:
        file = _FOLDER / f"merged_{step}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})


def _record_buckets(module: types.ModuleType) -> None:
    """Of verl's `vllm_rollout`: bytes that its sync gathered and copied to the worker."""
    sender = module.BucketedWeightSender
    send = sender.async_send_weights

    async def recorded(self: Any, weights: Any) -> None:
        import torch.distributed as dist

        def counted() -> Any:
            for name, tensor in weights:
                _moved["sent_bytes"] += tensor.nbytes
                _moved["gathered_bytes"] += (
                    tensor.nbytes * (dist.get_world_size() - 1) // (dist.get_world_size())
                )
                yield name, tensor

        await send(self, counted())

    sender.async_send_weights = recorded


def _record_servers(module: types.ModuleType) -> None:
    """Of `vllm_async_server`: the weights after an update."""
    server = module.vLLMHttpServer
    set_global_steps = server.set_global_steps

    async def recorded(self: Any, global_steps: int) -> None:
        await set_global_steps(self, global_steps)
        digests: dict[str, str] = {}
        for worker in await self.engine.collective_rpc("compute_weight_checksums"):
            digests |= worker
        _append(f"digests_{self.replica_rank}.jsonl", {"step": global_steps, "sha256": digests})

    server.set_global_steps = recorded


def _seed_requests(module: types.ModuleType) -> None:
    """Of `llm_server`: give the n-th request of a prompt a seed, whichever server takes it."""
    generate, seen = module.LLMServerClient.generate, Counter[int]()

    async def seeded(
        self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **options: Any
    ) -> Any:
        prompt = zlib.crc32(repr(list(prompt_ids)).encode())
        seen[prompt] += 1
        sampling_params = sampling_params | {"seed": prompt + seen[prompt]}
        return await generate(
            self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **options
        )

    module.LLMServerClient.generate = seeded


after_import("verl.workers.engine_workers", _record_workers)
after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _record_buckets)
after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _record_servers)
after_import("verl.workers.rollout.llm_server", _seed_requests)
after_import("hybridengine.integrations.verl.servers", _record_shards)
