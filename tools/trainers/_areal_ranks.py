"""One rank of AReaL's FSDP engine: updates servers. … MODEL SERVERS RESULTS"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.integrations import areal
from tools.trainers._engines import FACTORS, lose_a_server, step, write_results


def main(model: str, urls: str, folder: str) -> None:
    areal.patch()
    from areal.api import FinetuneSpec, ModelAllocation, WeightUpdateMeta
    from areal.api.cli_args import InferenceEngineConfig, TrainEngineConfig
    from areal.engine.fsdp_engine import FSDPEngine
    from areal.engine.vllm_remote import RemotevLLMEngine

    servers = [url.removeprefix("http://") for url in urls.split(",")]
    names = {"experiment_name": "sync", "trial_name": "cpu"}
    engine: Any = FSDPEngine(
        TrainEngineConfig(
            **names,
            path=model,
            backend="fsdp:d2",
            attn_impl="sdpa",
            optimizer=None,
            gradient_checkpointing=False,
            disable_dropout=True,
        )
    )
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 8, 8))
    rollout = RemotevLLMEngine(InferenceEngineConfig(**names, backend=f"vllm:d{len(servers)}t1"))
    rollout.initialize(addr=servers, train_data_parallel_size=2)
    allocation = ModelAllocation.from_str(f"vllm:d{len(servers)}t1", name="rollout")
    meta = WeightUpdateMeta.from_fsdp_xccl(allocation)
    engine.connect_engine(rollout, meta)
    results: dict[str, Any] = {"sent": [], "received": []}

    def update(version: int) -> None:
        engine.update_weights(meta.with_version(version))

    for version, factor in enumerate(FACTORS, 1):
        step(engine.model, factor)
        update(version)
        results["sent"].append(engine.hybridengine_report.bytes_sent)
        results["received"].append(engine.hybridengine_report.bytes_received)
    write_results(folder, dist.get_rank(), results)
    results["lost"] = lose_a_server(folder, lambda: update(len(FACTORS) + 1))
    write_results(folder, dist.get_rank(), results)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
