"""NeMo RL's checkpoint-engine refit of a separate vLLM engine, with our engine.

Real: NeMo RL's `CheckpointEngineWeightSynchronizer`, its reading of the configuration, the mixins
of its policy workers and of its generation worker, and its extension of vLLM's workers, of the main
branch at COMMIT; two FSDP2 ranks over gloo; vLLM's workers. Not NeMo RL's: Ray's worker groups and
`ray.get` (threads and gloo), the rest of `DTensorPolicyWorkerV2`, which needs NeMo AutoModel, and
the size of a bucket, which is read from a GPU. vLLM is a server, so that its weights can be
compared. NeMo RL is for Python 3.13; one assertion about transformers' version is rewritten.
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
REQUIREMENTS = ("ray==2.56.0", "msgpack", "nvidia-ml-py", "orjson")


def run(folder: Path) -> dict[str, object]:
    """Run two ranks and a server of two workers; return bytes and numbers of compared weights.

    folder/source: a source tree of COMMIT, where it cannot be downloaded.
    """
    python = overlay(folder, REQUIREMENTS)
    source = _source(folder / "source")
    model, port = save_model(folder), free_port()
    options = ENGINE | {
        "model": model, "host": "127.0.0.1", "port": port, "tensor_parallel_size": 2,
        "worker_extension_cls": "tools.trainers._loading.nemo",
        "worker_cls": "hybridengine.integrations.nemo_rl_worker.Worker",
        "weight_transfer_config": '{"backend": "hybridengine"}',
    }  # fmt: skip
    words = ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    servers = {f"http://127.0.0.1:{port}": words}
    found = check_runs(folder, python, "_nemo_ranks", model, servers, [source])
    return {"nemo-rl": f"main at {COMMIT[:9]}"} | found


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
