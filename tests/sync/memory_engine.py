"""An engine that only holds tensors, and models sharded for it: reshards without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hybridengine.engine.interface import RolloutEngine
from hybridengine.kernels.block_quantize import QUANTIZED_DTYPE, block_quantize
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.layout import EngineLayout, Quantized
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import tp_groups
from hybridengine.sync.trainers import DeltaMode
from hybridengine.sync.transport import Pull
from hybridengine.sync.weight_target import WeightTarget
from tests.sync.brute_force import fused_layout

__all__ = [
    "MemoryEngine",
    "Shapes",
    "build",
    "expected",
    "pulling",
    "quantize",
    "shapes_of",
    "shard",
    "values",
]

Shapes = Mapping[
    str, tuple[str, tuple[int, ...]]
]  # name → ("column" | "row" | "replicated", shape)


def shapes_of(**kinds: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return shapes by name, given by kind: shapes_of(column={"q": (24, 10)}, row={...})."""
    return {name: (kind, shape) for kind, named in kinds.items() for name, shape in named.items()}


class MemoryEngine(WeightTarget, RolloutEngine):
    """Holds the tensors of a layout, NaN at first.

    Its loader writes a tensor once it has all parameters that it is made of: twice their sum.
    adapters: by version.
    """

    def __init__(
        self, layout: EngineLayout, tp_rank: int, tp_size: int, device: str = "cpu"
    ) -> None:
        self.layout, self.tp_rank, self.tp_size = layout, tp_rank, tp_size
        self.target = self
        self.tensors = {
            name: torch.full(spec.shape, float("nan"), dtype=spec.dtype, device=device)
            for name, spec in (layout.destinations | layout.scales).items()
        }
        self.adapters: dict[int, dict[str, Adapter]] = {}

    def weights(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_full(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held: dict[str, dict[str, torch.Tensor]] = {}
        made_of = computed_of(self.layout)
        for name, full in weights:
            tensor = next(t for t, names in made_of.items() if name in names)
            parts = held.setdefault(tensor, {})
            parts[name] = full
            if len(parts) == len(made_of[tensor]):
                self.tensors[tensor].copy_(sum(held.pop(tensor).values()).mul_(2))

    def load_adapters(self, adapters: Iterable[tuple[str, Adapter]], version: int) -> None:
        self.adapters[version] = dict(adapters)

    def finish_update(self) -> None: ...

    def _generate(self, prompts, spec, seed):
        return [[] for _ in prompts]

    def shutdown(self) -> None: ...


def computed_of(layout: EngineLayout) -> dict[str, list[str]]:
    """Engine tensors that the loader makes → the parameters that they are made of."""
    made_of: dict[str, list[str]] = {}
    for source, reason in layout.fallback.items():
        made_of.setdefault(reason.partition(": ")[0], []).append(source)
    return made_of


def quantize(layout: EngineLayout, name: str) -> None:
    """Let an engine tensor hold bfloat16 values quantized in blocks."""
    spec = layout.destinations[name]
    layout.destinations[name] = replace(spec, dtype=QUANTIZED_DTYPE)
    layout.quantized[name] = Quantized(spec.dtype, f"{name}_scale_inv")


def values(shapes: Shapes, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Full parameters, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, (_, s) in shapes.items()}


def build(
    shapes: Shapes,
    tp_size: int,
    *,
    full: Mapping[str, torch.Tensor],
    bucket_bytes: int = 4096,
    replicas: int = 1,
    rows_on_dim1: bool = True,
    by_loader: tuple[str, ...] = (),
    quantized: tuple[str, ...] = (),
    amend: Callable[[EngineLayout], None] = lambda layout: None,
    transport: str = "pull",
    delta: DeltaMode = "off",
    device: str = "cpu",
    **options: Any,
) -> tuple[MemoryEngine, dict[str, torch.Tensor], Resharder]:
    """This rank's engine, its shards (HSDP where replicas > 1), and the reshard between them.

    amend: changes the layout.
    transport: "pull", which is chosen where the ranks share memory, or "all-to-all".
    delta: as of `Resharder`; "off": every sync sends everything.
    options: more of Resharder's.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = tp_groups(world_size, tp_size)
    group = next(g for g in groups if rank in g)
    layout = fused_layout(shapes, group.index(rank), tp_size)
    layout.fallback = {name: f"{name}: computed by mul" for name in by_loader}
    layout.by_loader = set(by_loader)
    layout.copies = [c for c in layout.copies if c.source not in by_loader]
    amend(layout)
    for name in quantized:
        quantize(layout, name)
    engine = MemoryEngine(layout, group.index(rank), tp_size, device)
    mesh = mesh_of(world_size, replicas, device)
    shards = shards_of(shapes, full, mesh, rows_on_dim1)
    with pulling(transport == "pull"):
        resharder = Resharder(lambda: shards, engine, bucket_bytes, delta=delta, **options)
    assert world_size == 1 or isinstance(resharder.transport, Pull) == (transport == "pull")
    return engine, shards, resharder


@contextmanager
def pulling(allowed: bool) -> Iterator[None]:
    """Make resharders that use an all-to-all, unless the ranks may share memory."""
    if allowed:
        yield
    else:
        with mock.patch("hybridengine.sync.resharder.share_memory", lambda *args: None):
            yield


def mesh_of(world_size: int, replicas: int, device: str = "cpu") -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(device, (world_size,))
    return init_device_mesh(
        device, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard")
    )


def shards_of(
    shapes: Shapes, full: Mapping[str, torch.Tensor], mesh: DeviceMesh, rows_on_dim1: bool = True
) -> dict[str, torch.Tensor]:
    """This rank's shards of full parameters, row-parallel ones on dim 1 if wanted."""
    return {
        name: shard(full[name].to(mesh.device_type), mesh, int(kind == "row" and rows_on_dim1))
        for name, (kind, _) in shapes.items()
    }


def shard(full: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def expected(engine: MemoryEngine, full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The engine tensors that the layout makes of full parameters, one copy at a time."""
    layout = engine.layout
    made = {
        n: torch.full_like(engine.tensors[n], float("nan"), dtype=layout.quantized.get(n, s).dtype)
        for n, s in layout.destinations.items()
    }
    for c in engine.layout.copies:
        target = made[c.destination]
        source = full[c.source].contiguous()
        target.as_strided(c.sizes, c.destination_strides, c.destination_offset).copy_(
            source.as_strided(c.sizes, c.source_strides, c.source_offset)
        )
    for name, sources in computed_of(layout).items():
        made[name].copy_(sum(full[source] for source in sources) * 2)
    for name, quantized in layout.quantized.items():
        made[name], made[quantized.scale] = block_quantize(made[name], backend="reference")
    return made
