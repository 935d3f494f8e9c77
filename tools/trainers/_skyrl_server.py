"""Serve as SkyRL does, with its own arguments and app, on a CPU: … MODEL TP_SIZE PORT"""

import asyncio
import os
import sys

from hybridengine.integrations import skyrl
from tools.trainers._engines import ENGINE


def main(model: str, tp_size: str, port: str) -> None:
    skyrl.patch()
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.train.config import SkyRLTrainConfig

    config = SkyRLTrainConfig()
    config.trainer.placement.colocate_all = False
    config.trainer.policy.model.path = model
    engine = config.generator.inference_engine
    engine.tensor_parallel_size = int(tp_size)
    cpu = {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}
    loading = {"worker_extension_cls": "tools.trainers._loading.skyrl"}
    engine.engine_init_kwargs = ENGINE | cpu | loading
    arguments = build_vllm_cli_args(config)
    arguments.host, arguments.port = "127.0.0.1", int(port)
    arguments.uvicorn_log_level = "warning"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"  # ours needs none
    asyncio.run(vllm_server_actor._build_and_serve_vllm_server(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
