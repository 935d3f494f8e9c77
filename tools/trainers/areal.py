"""AReaL's FSDP engine, remote engine and vLLM servers, with our weight update.

Real: AReaL 1.0.4's `FSDPEngine` on two gloo ranks, made, sharded and connected by its own methods
on its CPU platform; `RemotevLLMEngine` and its HTTP calls; two servers by the command that
`vLLMConfig` makes, with AReaL's routes; vLLM's workers. Not run: AReaL's schedulers and its
single controller.
"""

from __future__ import annotations

from pathlib import Path

from tools.environments import overlay
from tools.trainers._engines import check_runs, free_port, save_model

REQUIREMENTS = (
    "areal==1.0.4",
    "ray==2.56.0",
    "msgpack",
    "orjson",
    "aiofiles",
    "colorlog",
    "tenacity",
    "flask",
    "blinker",
    "itsdangerous",
    "torchdata",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3",
)


def run(folder: Path) -> dict[str, object]:
    """Run two ranks and two servers; return bytes and numbers of compared weights."""
    python = overlay(folder, REQUIREMENTS)
    model = save_model(folder)
    servers = {}
    for _ in range(2):
        port = free_port()
        words = ["-m", "tools.trainers._areal_server", str(model), str(port)]
        servers[f"http://127.0.0.1:{port}"] = words
    return {"areal": "1.0.4"} | check_runs(folder, python, "_areal_ranks", model, servers)
