"""SHA-256 of each weight of an engine as vLLM's own loader writes them.

`torchrun --nproc-per-node TP -m tools.trainers.trl_expected MODEL OUTPUT FOLDER...` builds one
engine of TP ranks, loads what `save_pretrained` wrote to each FOLDER, and writes a JSON object
FOLDER → digests, with the names of vLLM's `/weight_checker`, to OUTPUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.run.messages import all_gather_values


def digests_of(worker: Any, folder: str) -> dict[str, str]:
    from safetensors.torch import load_file

    model = worker.model_runner.get_model()
    for parameter in model.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        model.load_weights(load_file(Path(folder) / "model.safetensors").items())
    digests: dict[str, str] = worker.compute_weight_checksums()
    return digests


def main(model: str, output: str, folders: list[str]) -> None:
    from hybridengine.engine.vllm.environment import prepare_environment, unique_shared_memory

    prepare_environment()
    dist.init_process_group("gloo")
    from vllm import LLM

    with unique_shared_memory():  # vLLM's own names are the same in every run
        llm = LLM(
            model,
            tensor_parallel_size=dist.get_world_size(),
            dtype="float32",
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=16 << 20,
            skip_tokenizer_init=True,
            weight_transfer_config={"backend": "hybridengine"},
            load_format="dummy",
        )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    result: dict[str, dict[str, str]] = {}
    for folder in folders:
        ranks = all_gather_values(digests_of(worker, folder), dict[str, str])
        result[folder] = {name: digest for rank in ranks for name, digest in rank.items()}
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
