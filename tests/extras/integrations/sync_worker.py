"""A worker of an engine without vLLM, and the sharded model whose weights it gets."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.integrations.areal_server import WorkerExtension
from hybridengine.remote.sync.receiver import WeightReceiver
from tests.extras.remote.worlds import UNEVEN, build_engine
from tests.sync.memory_engine import expected, mesh_of, shard, values

__all__ = ["TIMEOUT_S", "Worker", "in_thread", "step", "trained"]

TIMEOUT_S = 60.0


class Worker(WorkerExtension):
    """A worker of an engine without vLLM; what it overrides are methods of vLLM's workers."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self) -> None:
        self.engine = build_engine(0, 1)
        self.is_active = False

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        store = dist.TCPStore(info["host"], info["port"], is_master=False, wait_for_workers=False)
        place = dist.PrefixStore(info["prefix"], store)
        self.receiver = WeightReceiver(self.engine, place, index=info["index"], timeout_s=TIMEOUT_S)

    def start_weight_update(self) -> None:
        assert not self.is_active
        self.is_active = True

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self.is_active
        report = self.receiver.receive()
        assert info.get("version", report.version) == report.version

    def finish_weight_update(self) -> None:
        self.is_active = False

    def wrong(self, factor: float) -> list[str]:
        full = {name: tensor * factor for name, tensor in values(UNEVEN).items()}
        want = expected(self.engine, full)
        return [n for n, t in want.items() if not torch.equal(self.engine.tensors[n], t)]


def trained() -> torch.nn.Module:
    mesh = mesh_of(dist.get_world_size(), 1)
    shards = {
        name: shard(tensor, mesh, int(UNEVEN[name][0] == "row"))
        for name, tensor in values(UNEVEN).items()
    }
    return torch.nn.ParameterDict(shards)


def step(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(factor)


def in_thread(call: Any, *arguments: Any) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
