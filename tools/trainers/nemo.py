"""NeMo RL's refits of vLLM engines, apart and colocated, with ours in their place.

Real, of NeMo RL's main branch at COMMIT, with two FSDP2 ranks over gloo and vLLM's workers:

- apart: `CheckpointEngineWeightSynchronizer`, its reading of the configuration, the mixins of the
  policy workers and of the generation worker, the extension of vLLM's workers;
- colocated: `IPCWeightSynchronizer`, `Policy`, `resolve_policy_worker_cls`, our subclass of
  `DTensorPolicyWorker`, `VllmGeneration`, `VllmGenerationWorker`, the same extension.

Replaced, since there is no GPU: Ray's worker groups and `ray.get` (threads and gloo); what makes a
policy worker, NCCL and CUDA (its `__init__`, `Tensor.cuda`); vLLM's `wake_up`, since vLLM has no
sleep mode on a CPU; NVTX; sizes that are read from a GPU. Replaced for other reasons: NeMo
AutoModel is not installed, so there is no `DTensorPolicyWorkerV2`; wandb, swanlab and mlflow are
empty; vLLM's engines are servers, so that their weights can be compared; one assertion about
transformers' version is rewritten. NeMo RL is for Python 3.13, and 3.11 runs it.
"""

from __future__ import annotations

import io
import tarfile
import urllib.request
from pathlib import Path

from tools.environments import overlay
from tools.trainers._engines import ENGINE, check_runs, free_port, save_model

COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"
ARCHIVE = f"https://github.com/NVIDIA-NeMo/RL/archive/{COMMIT}.tar.gz"
REQUIREMENTS = (
    *("ray==2.56.0", "msgpack", "nvidia-ml-py", "orjson"),
    *("hydra-core==1.3.2", "antlr4-python3-runtime==4.9.3", "tensordict==0.10.0", "pyvers==0.2.3"),
)


def run(folder: Path) -> dict[str, object]:
    """Run both refits; return bytes and numbers of compared weights.

    Apart: an engine of two workers. Colocated: two engines of one worker.
    folder/source: a source tree of COMMIT, where it cannot be downloaded.
    """
    python = overlay(folder, REQUIREMENTS)
    source = _source(folder / "source")
    model = save_model(folder)
    apart = dict([_server(model, 2)])
    found = check_runs(folder, python, "_nemo_ranks", model, apart, [source])
    colocated = dict(_server(model, 1) for _ in range(2))
    found["colocated"] = check_runs(
        folder, python, "_nemo_colocated_ranks", model, colocated, [source]
    )
    return {"nemo-rl": f"main at {COMMIT[:9]}"} | found


def _server(model: Path, tp_size: int) -> tuple[str, list[str]]:
    """Return the URL of a vLLM server, and the words of its command."""
    port = free_port()
    options = ENGINE | {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "tensor_parallel_size": tp_size,
        "worker_extension_cls": "tools.trainers._loading.nemo",
        "worker_cls": "hybridengine.integrations.nemo_rl_worker.Worker",
        "weight_transfer_config": '{"backend": "hybridengine"}',
    }
    words = ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    return f"http://127.0.0.1:{port}", words


def _source(folder: Path) -> Path:
    """Return the source tree of COMMIT, with the metadata of an installed package."""
    if not folder.is_dir():
        with urllib.request.urlopen(ARCHIVE, timeout=60) as response:
            archive = io.BytesIO(response.read())
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(folder.parent, filter="data")
        (folder.parent / f"RL-{COMMIT}").rename(folder)
    policy = folder / "nemo_rl" / "models" / "policy" / "__init__.py"
    policy.write_text(policy.read_text().replace('PkgVersion("5.12.0")', 'PkgVersion("5.99.0")'))
    info = folder / "nemo_rl-0.6.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nemo-rl\nVersion: 0.6.0\n")
    return folder
