"""Stand-ins for what vLLM's trainer half gets: sources of weights, a worker and a client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.extras.remote.worlds import UNEVEN, build_engine
from tests.sync.memory_engine import MemoryEngine, expected, values


@dataclass(frozen=True)
class Replicate:
    """As vLLM 0.33's."""


@dataclass(frozen=True)
class Shard:
    """As vLLM 0.33's."""

    dim: int


class Source033:
    """A source of vLLM 0.33's interface, over the DTensors of a module, whose shards it copies."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    @cached_property
    def metadata(self) -> list[Any]:
        return [self.declare(name, p) for name, p in self.module.named_parameters()]

    def declare(self, name: str, p: Any) -> Any:
        ranks = p.device_mesh.mesh
        placements = [Shard(x.dim) if x.is_shard() else Replicate() for x in p.placements]
        return SimpleNamespace(
            name=name,
            dtype=p.dtype,
            shape=tuple(p.shape),
            owners=tuple(ranks.flatten().tolist()),
            mesh_shape=tuple(ranks.shape),
            placements=tuple(placements),
        )

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self.module.named_parameters():
            yield name, p.to_local().clone()


def module_of(shards: dict[str, DTensor]) -> torch.nn.Module:
    return torch.nn.ParameterDict(shards)


def source_of(kind: str, shards: dict[str, DTensor]) -> Any:
    from vllm.distributed.weight_transfer import ModuleSource

    module = module_of(shards)
    if kind == "module":
        return ModuleSource(module)
    if kind == "0.33":
        own = type("OwnSource", (ModuleSource,), {})
        return own(module) if hasattr(ModuleSource, "iter_local") else Source033(module)
    from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

    class OwnSource(DTensorModuleSource):
        """Read as it declares itself, because a subclass may declare something else."""

    return OwnSource(module, dist.get_world_size())


class MemoryWorker:
    """The engine's half without vLLM: a `WeightReceiver` and tensors in memory.

    fail_in: number of the update that fails, from 1. rejects: before the receiver starts.
    """

    def __init__(self, name: str, fail_in: int, rejects: bool) -> None:
        self.engine: MemoryEngine = build_engine(0, 1)
        self.name, self._fail_in, self._rejects = name, fail_in, rejects
        self.updates, self.labels = 0, list[str | None]()

    def join(self, info: dict[str, Any]) -> None:
        from hybridengine.remote.sync.receiver import WeightReceiver

        assert self.name == f"engine {info['index']}"
        store = dist.TCPStore(info["host"], info["port"], is_master=False, wait_for_workers=False)
        place = dist.PrefixStore(info["prefix"], store)
        self.receiver = WeightReceiver(
            self.engine, place, index=info["index"], timeout_s=info["timeout_s"]
        )

    def update(self, info: dict[str, Any]) -> None:
        self.updates += 1
        if self.updates == self._fail_in:
            self.engine.check_ready = lambda: 1 / 0
        try:
            if self._rejects:
                self.engine.check_ready()
            assert self.receiver.receive().version == info["version"]
        finally:
            vars(self.engine).pop("check_ready", None)

    def wrong(self, factor: float) -> list[str]:
        full = {name: tensor * factor for name, tensor in values(UNEVEN).items()}
        want = expected(self.engine, full)
        return [n for n, t in want.items() if not torch.equal(self.engine.tensors[n], t)]


class FullSource:
    """As a source of vLLM 0.32 that has no shards."""

    def metadata(self) -> list[Any]:
        return []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class OnlyFull033(Source033):
    def implements_iter_local(self) -> bool:
        return False


class Changed033(Source033):
    """Declares some of `changes` for each parameter."""

    def __init__(self, module: torch.nn.Module, **changes: Any) -> None:
        super().__init__(module)
        self._changes = changes

    def declare(self, name: str, p: Any) -> Any:
        meta = super().declare(name, p)
        vars(meta).update({k: v(meta) for k, v in self._changes.items()})
        return meta


class RefusingClient:
    """An engine that cannot take part."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        raise ConnectionRefusedError("no server")

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
