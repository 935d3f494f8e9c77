"""Random syncs in a row: after each of them every engine tensor is compared, bit by bit.

A sync may leave out what is frozen, or has not changed; whatever it leaves out must be right.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.mover import Mover
from tests.extras.remote.worlds import TIMEOUT_S, link_store, worlds
from tests.ranks import run_ranks
from tests.sync.brute_force import fused_layout
from tests.sync.memory_engine import MemoryEngine, build, mesh_of, quantize, shards_of
from tests.sync.sync_cases import SHAPES, Scenario, amend, differing

pytestmark = pytest.mark.multirank

STEPS = 5


def write_shards(shards: dict[str, torch.Tensor], scenario: Scenario, replicas: int) -> None:
    mesh = mesh_of(dist.get_world_size(), replicas)
    new = shards_of(SHAPES, scenario.full, mesh, scenario.options["rows_on_dim1"])
    for name, tensor in shards.items():
        tensor.to_local().copy_(new[name].to_local())


def run(seed: int) -> list[str]:
    """Return what was wrong on this rank."""
    scenario, world_size = Scenario(seed), dist.get_world_size()
    draw = scenario.random
    tp_size = draw.choice([n for n in (1, 2, 3) if world_size % n == 0])
    replicas = draw.choice([n for n in (1, 2) if world_size % n == 0 and n < world_size])
    place = dict(tp_size=tp_size, replicas=replicas, transport=draw.choice(("pull", "all-to-all")))
    engine, shards, resharder = build(
        SHAPES,
        full=scenario.full,
        amend=amend,
        adapters=lambda: scenario.adapters,
        merge=scenario.merge,
        frozen=lambda: scenario.frozen,
        **place,
        **scenario.options,
    )
    wrong = []
    for version in range(1, STEPS + 1):
        before, verify = scenario.step(version)
        write_shards(shards, scenario, replicas)
        if before == "damage":
            scenario.damage(engine, version, world_size, dist.get_rank())
        if before == "failure":
            failing = mock.patch.object(Mover, "load_full", side_effect=OSError("lost"))
            with failing, pytest.raises(OSError, match="lost"):
                resharder.sync(version)
        resharder.sync(version, verify=verify)
        if names := differing(engine, scenario, version):
            wrong.append(f"seed {seed}, {place}, version {version} after {before}: {names}")
    return wrong


def body(rank: int, world_size: int, seeds: range) -> list[str]:
    return [text for seed in seeds for text in run(seed)]


@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (2, range(8)),
        (3, range(100, 106)),
        pytest.param(2, range(200, 500), marks=pytest.mark.exhaustive),
        pytest.param(3, range(500, 700), marks=pytest.mark.exhaustive),
        pytest.param(4, range(700, 900), marks=pytest.mark.exhaustive),
    ],
)
def test_every_tensor_is_right_after_every_sync(world_size: int, seeds: range) -> None:
    assert run_ranks(body, world_size, seeds, timeout_s=3000) == [[]] * world_size


def trainer_body(rank: int, world_size: int, port: int, seeds: range) -> None:
    for seed in seeds:
        scenario = Scenario(seed)
        mesh = mesh_of(world_size, 1)
        shards = shards_of(SHAPES, scenario.full, mesh, scenario.options["rows_on_dim1"])
        sender = WeightSender(
            lambda shards=shards: shards,
            dist.PrefixStore(str(seed), link_store(port)),
            num_engines=1,
            adapters=lambda scenario=scenario: scenario.adapters,
            merge=scenario.merge,
            frozen=lambda scenario=scenario: scenario.frozen,
            delta=scenario.options["delta"],
            bucket_bytes=scenario.options["bucket_bytes"],
            timeout_s=TIMEOUT_S,
        )
        for version in range(1, STEPS + 1):
            _, verify = scenario.step(version)
            write_shards(shards, scenario, 1)
            sender.sync(version, verify=verify)


def engine_body(rank: int, world_size: int, port: int, seeds: range, tp_size: int) -> list[str]:
    wrong = []
    for seed in seeds:
        scenario = Scenario(seed)
        tp_rank = rank % tp_size
        layout = fused_layout(SHAPES, tp_rank, tp_size)
        amend(layout)
        for name in scenario.options["quantized"]:
            quantize(layout, name)
        engine = MemoryEngine(layout, tp_rank, tp_size)
        store = dist.PrefixStore(str(seed), link_store(port))
        receiver = WeightReceiver(engine, store, index=0, timeout_s=TIMEOUT_S)
        for version in range(1, STEPS + 1):
            before, _ = scenario.step(version)
            if before == "damage":
                scenario.damage(engine, version, world_size, rank)
            receiver.receive()
            if names := differing(engine, scenario, version):
                wrong.append(f"seed {seed}, version {version} after {before}: {names}")
    return wrong


@pytest.mark.parametrize(
    ("trainers", "tp_size", "over", "seeds"),
    [
        (2, 2, "groups", range(1000, 1006)),
        (3, 1, "memory", range(1100, 1104)),
        pytest.param(2, 2, "memory", range(1200, 1300), marks=pytest.mark.exhaustive),
        pytest.param(3, 1, "groups", range(1300, 1400), marks=pytest.mark.exhaustive),
        pytest.param(2, 2, "relayed", range(1400, 1500), marks=pytest.mark.exhaustive),
    ],
)
def test_engines_in_other_processes(trainers: int, tp_size: int, over: str, seeds: range) -> None:
    started = (trainer_body, trainers, seeds), (engine_body, 2, seeds, tp_size)
    with worlds(*started, over=over, timeout_s=3000) as (_, sending, receiving):
        assert receiving.results() == [[], []]
        sending.results()
