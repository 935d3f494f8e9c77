"""One rank of SkyRL's policy workers: syncs with servers. … MODEL SERVER RESULTS"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.integrations import skyrl
from tools.trainers._engines import FACTORS, lose_a_server, shard, step, write_results


def main(model: str, urls: str, folder: str) -> None:
    dist.init_process_group("gloo")
    skyrl.patch()
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig()
    config.trainer.placement.colocate_all = False
    config.trainer.policy.model.path = model
    engine_config = config.generator.inference_engine
    # The worker without its init_model, which chooses NCCL and a CUDA device.
    worker: Any = FSDPPolicyWorkerBase.__new__(FSDPPolicyWorkerBase)
    worker.cfg = config.trainer
    worker._is_lora = worker._is_multimodal_lm_only = False
    worker.model = HFModelWrapper(model, use_flash_attention_2=False, bf16=False)
    shard(worker.model.model)
    rank, servers = dist.get_rank(), urls.split(",")
    results: dict[str, Any] = {"sent": [], "received": []}

    async def train() -> None:
        client = RemoteInferenceClient(servers[0], servers, data_parallel_size=1)

        async def sync() -> None:
            if rank == 0:
                await client.pause_generation()
            await worker.broadcast_to_inference_engines(client, engine_config)
            if rank == 0:
                await client.resume_generation()

        await worker.init_weight_sync_state(client, engine_config)
        for factor in FACTORS:
            step(worker.model.model, factor)
            await sync()
            report = worker._weight_sync_engine.report
            results["sent"].append(report.bytes_sent)
            results["received"].append(report.bytes_received)
        await client.aclose()

    asyncio.run(train())
    write_results(folder, rank, results)
    results["lost"] = lose_a_server(folder, worker._weight_sync_engine.send_weights)
    write_results(folder, rank, results)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
