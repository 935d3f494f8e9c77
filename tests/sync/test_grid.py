"""Every payload over every transport, bit for bit what vLLM's own loader makes of the weights.

    payload     all elements in bfloat16 | in FP8 | what changed (a delta)
    transport   pull | all-to-all: trainers hold the engine; engines in other processes over
                process groups | mapped memory | relayed memory
    TP          1 | 2
    source      FSDP2 | HSDP | LoRA adapters, merged as they are packed

Four trainer ranks; engines in other processes are two ranks, at TP 1 two replicas. vLLM's model of
each TP rank loads the full bfloat16 weights of every step; what FP8 engines must hold is quantized
from what it loaded.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybridengine.kernels.block_quantize import block_quantize
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import local_shard, tp_groups
from hybridengine.sync.transport import Pull
from tests.extras.remote.worlds import TIMEOUT_S, link_store, worlds
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.sync.memory_engine import MemoryEngine, pulling, quantize
from tests.sync.quantized_cases import save
from tests.sync.training import train
from tests.sync.vllm_engines import vllm_model

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

TRAINERS, ENGINE_RANKS = 4, 2
STEPS = {"dense": 2, "fp8": 2, "delta": 4}  # syncs of a payload
TP_SIZES = (1, 2)
SOURCES = ("fsdp2", "hsdp", "lora")
IN_WORLD = ("pull", "all-to-all")
LINKS = {  # transport → what connects trainers and engines
    "groups": ("GroupLink", False),
    "memory": ("MemoryLink", False),
    "relayed": ("MemoryLink", True),
}
LINEAR = ("qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight", "down_proj.weight")
BUCKET_BYTES = 1 << 18
SHARE = 0.01  # of the elements, or of the rows of adapters, that a step changes
LORA_RANK, LORA_ALPHA = 3, 6.0


class Case(NamedTuple):
    payload: str
    tp_size: int
    source: str


CASES = [Case(*values) for values in itertools.product(STEPS, TP_SIZES, SOURCES)]


TRANSPORTS = (*IN_WORLD, *LINKS)
# Each payload at each TP size has FSDP2. The cases with HSDP and adapters of the default suite:
WITH_HSDP = {
    "pull": Case("dense", 2, "hsdp"),
    "all-to-all": Case("delta", 2, "hsdp"),
    "groups": Case("delta", 1, "hsdp"),
    "memory": Case("fp8", 2, "hsdp"),
    "relayed": Case("dense", 1, "hsdp"),
}
WITH_ADAPTERS = {
    "pull": Case("delta", 1, "lora"),
    "all-to-all": Case("fp8", 1, "lora"),
    "groups": Case("dense", 1, "lora"),
    "memory": Case("delta", 2, "lora"),
    "relayed": Case("fp8", 2, "lora"),
}


class Recorded(NamedTuple):
    """What vLLM makes of a model. layouts: (TP size, TP rank) → layout. folder: of `expected`."""

    path: str
    layouts: Mapping[tuple[int, int], EngineLayout]
    folder: Path


# Weights of every step: the same on all ranks


class Weights(NamedTuple):
    """full: float32 parameters. factors: adapted parameter → (left, right) in float32."""

    full: dict[str, torch.Tensor]
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def merged(self) -> dict[str, torch.Tensor]:
        """The checkpoint that an engine must hold, in bfloat16."""
        merged = dict(self.full)
        for name, (left, right) in self.factors.items():
            update = LORA_ALPHA / LORA_RANK * (left.double() @ right.double())
            merged[name] = (merged[name].double() + update).float()
        return {name: tensor.bfloat16() for name, tensor in merged.items()}


def steps_of(path: str, source: str, count: int) -> Iterator[tuple[int, Weights]]:
    """Yield each version, from 1 on, with its weights."""
    full = load_file(f"{path}/model.safetensors")
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if source == "lora":
        generator = torch.Generator().manual_seed(0)
        for name, tensor in sorted(full.items()):
            if "_proj.weight" in name:
                shapes = (len(tensor), LORA_RANK), (LORA_RANK, tensor.shape[1])
                left, right = (0.1 * torch.randn(s, generator=generator) for s in shapes)
                factors[name] = left, right
    for version in range(1, count + 1):
        if source == "lora":
            generator = torch.Generator().manual_seed(version)
            for left, _ in factors.values():
                left[torch.rand(len(left), generator=generator) < SHARE] *= 1.5
        else:
            full = train(full, SHARE, version)
        yield version, Weights(full, factors)


def load_body(rank: int, tp_size: int, path: str, folder: Path) -> EngineLayout:
    """Save what vLLM's model of this TP rank holds after each step; return how it is laid out."""
    from hybridengine.model.parameters import checkpoint_layout_from_config
    from hybridengine.model.validation import check_model

    checkpoint = checkpoint_layout_from_config(check_model(path))
    layout, model = vllm_model(rank, tp_size, path, tp_size, checkpoint)
    held = {n: p.detach() for n, p in model.named_parameters() if n in layout.destinations}
    for source in ("fsdp2", "lora"):
        for version, weights in steps_of(path, source, max(STEPS.values())):
            before = {name: tensor.clone() for name, tensor in held.items()}
            for tensor in held.values():
                tensor.fill_(float("nan"))
            model.load_weights(weights.merged.items())
            assert not all(torch.equal(tensor, before[name]) for name, tensor in held.items())
            save_file(held, folder / _file("dense", source, version, tp_size, rank))
            if version > STEPS["fp8"]:
                continue
            quantized = dict(held)
            for name in _linear(layout):
                values, scale = block_quantize(held[name], backend="reference")
                quantized |= {name: values, f"{name}_scale_inv": scale}
            save_file(quantized, folder / _file("fp8", source, version, tp_size, rank))
    assert not layout.fallback and held.keys() == layout.destinations.keys()
    return layout


def _file(payload: str, source: str, version: int, tp_size: int, tp_rank: int) -> str:
    kind, of = "fp8" if payload == "fp8" else "bf16", "lora" if source == "lora" else "full"
    return f"{kind}_{of}_{version}_tp{tp_size}_{tp_rank}.safetensors"


def _linear(layout: EngineLayout) -> list[str]:
    return [name for name in layout.destinations if name.endswith(LINEAR)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("grid")
    path = save(folder / "model")
    vllm = {"VLLM_DIST_IDENT": "grid"}  # as its workers set it: part of the names of shared memory
    layouts = {
        (tp_size, tp_rank): layout
        for tp_size in TP_SIZES
        for tp_rank, layout in enumerate(run_ranks(load_body, tp_size, path, folder, env=vllm))
    }
    return Recorded(path, layouts, folder)


# Trainers and engines


class Trainer:
    """The sharded model of one source on this rank."""

    def __init__(self, given: Recorded, source: str) -> None:
        from hybridengine.model import parameter_shards, sharding_mesh
        from hybridengine.model.lora import adapter_shards, apply_lora

        _, first = next(steps_of(given.path, source, 1))
        shapes = {name: tensor.shape for name, tensor in first.full.items()}
        sliced = given.layouts[2, 0].sliced_dims(shapes)
        model = load_sharded(
            given.path,
            mesh=sharding_mesh("cpu", TRAINERS, TRAINERS // 2 if source == "hsdp" else -1),
            shard_dim1=lambda name: sliced.get(name) == 1,
            adapt=(lambda m: apply_lora(m, LORA_RANK, LORA_ALPHA)) if source == "lora" else None,
        )
        self._steps_of = partial(steps_of, given.path, source)
        self.parameters = lambda: parameter_shards(model)
        self.adapters = lambda: adapter_shards(model)

    def steps(self, count: int) -> Iterator[int]:
        """Yield each version once this rank's shards have its weights."""
        for version, weights in self._steps_of(count):
            for name, tensor in self.parameters().items():
                _fill(tensor, weights.full[name])
            adapters: Mapping[str, Adapter] = self.adapters()
            assert adapters.keys() == weights.factors.keys()
            for name, adapter in adapters.items():
                _fill(adapter.left, weights.factors[name][0])
                _fill(adapter.right, weights.factors[name][1])
            yield version


def _fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Write this rank's shard of `full` to a DTensor."""
    placed = dist.tensor.distribute_tensor(
        full, tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    local_shard(tensor).copy_(placed.to_local())


def make_engine(given: Recorded, case: Case, tp_rank: int) -> MemoryEngine:
    layout = copy.deepcopy(given.layouts[case.tp_size, tp_rank])
    for name in _linear(layout) if case.payload == "fp8" else ():
        quantize(layout, name)
    return MemoryEngine(layout, tp_rank, case.tp_size)


def differing(given: Recorded, case: Case, engine: MemoryEngine, version: int) -> list[str]:
    """Return the engine tensors whose bits differ from what vLLM loaded."""
    place = version, case.tp_size, engine.tp_rank
    expected = load_file(given.folder / _file(case.payload, case.source, *place))
    assert expected.keys() == engine.tensors.keys()
    return [
        f"{name} of version {version}"
        for name, tensor in engine.tensors.items()
        if not torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
    ]


def delta_mode(case: Case) -> str:
    return "on" if case.payload == "delta" else "off"


def in_world_body(
    rank: int, world_size: int, given: Recorded, transport: str, cases: list[Case]
) -> list[dict]:
    trainers = {source: Trainer(given, source) for source in {case.source for case in cases}}
    results = []
    for case in cases:
        trainer = trainers[case.source]
        group = next(g for g in tp_groups(world_size, case.tp_size) if rank in g)
        engine = make_engine(given, case, group.index(rank))
        with pulling(transport == "pull"):
            resharder = Resharder(
                trainer.parameters, engine, BUCKET_BYTES, trainer.adapters, delta=delta_mode(case)
            )
        reports, wrong = [], []
        for version in trainer.steps(STEPS[case.payload]):
            reports.append(resharder.sync(version))
            wrong += differing(given, case, engine, version)
        transport_used = "pull" if isinstance(resharder.transport, Pull) else "all-to-all"
        results.append(_result(reports, transport_used) | {"wrong": wrong})
    return results


def trainer_body(
    rank: int, world_size: int, port: int, given: Recorded, cases: list[Case]
) -> list[dict]:
    trainers = {source: Trainer(given, source) for source in {case.source for case in cases}}
    store, results = link_store(port), []
    for number, case in enumerate(cases):
        trainer = trainers[case.source]
        sender = WeightSender(
            trainer.parameters,
            dist.PrefixStore(f"case {number}", store),
            num_engines=1,
            bucket_bytes=BUCKET_BYTES,
            adapters=trainer.adapters,
            delta=delta_mode(case),
            timeout_s=TIMEOUT_S,
        )
        reports = [sender.sync(version) for version in trainer.steps(STEPS[case.payload])]
        link: Any = sender.link
        results.append(_result(reports, (type(link).__name__, link.relays)))
    return results


def engine_body(
    rank: int, world_size: int, port: int, given: Recorded, cases: list[Case]
) -> list[dict]:
    store, results = link_store(port), []
    for number, case in enumerate(cases):
        engine = make_engine(given, case, rank % case.tp_size)
        receiver = WeightReceiver(
            engine, dist.PrefixStore(f"case {number}", store), index=0, timeout_s=TIMEOUT_S
        )
        reports, wrong = [], []
        for version in range(1, STEPS[case.payload] + 1):
            reports.append(receiver.receive())
            wrong += differing(given, case, engine, version)
        link: Any = receiver.link
        results.append(_result(reports, (type(link).__name__, link.relays)) | {"wrong": wrong})
        receiver.close()
    return results


def _result(reports: list, transport: object) -> dict:
    return {
        "delta": [r.delta for r in reports],
        "changed": [r.changed for r in reports if r.changed is not None],  # trainers know it
        "transport": transport,
    }


# Tests


def check(given: Recorded, transport: str, cases: list[Case]) -> None:
    if transport in IN_WORLD:
        of_ranks = run_ranks(in_world_body, TRAINERS, given, transport, cases)
        used: object = transport
    else:
        place = given, cases
        started = (trainer_body, TRAINERS, *place), (engine_body, ENGINE_RANKS, *place)
        with worlds(*started, over=transport) as (_, trainers, engines):
            of_ranks = trainers.results() + engines.results()
        used = LINKS[transport]
    for case, *results in zip(cases, *of_ranks, strict=True):
        for result in results:
            assert result.get("wrong", []) == [], case
            assert result["transport"] == used, case
            later = [case.payload == "delta"] * (STEPS[case.payload] - 1)
            assert result["delta"] == [False, *later], case
            assert all(SHARE / 2 < share < 2 * SHARE for share in result["changed"]), case


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_payload(recorded: Recorded, transport: str) -> None:
    cases = [case for case in CASES if case.source == "fsdp2"]
    check(recorded, transport, [*cases, WITH_HSDP[transport], WITH_ADAPTERS[transport]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["hsdp", "lora"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_payload_of_other_sources(recorded: Recorded, transport: str, source: str) -> None:
    check(recorded, transport, [case for case in CASES if case.source == source])
