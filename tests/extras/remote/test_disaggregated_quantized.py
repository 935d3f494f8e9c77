"""FP8 to engines in other processes: bits of the full tensors, bytes out of trainers, damage.

The expected tensors are quantized from the full, unsharded engine tensors.
"""

from __future__ import annotations

import time
import warnings

import pytest
import torch
import torch.distributed as dist

from hybridengine.kernels.block_quantize import QUANTIZED_DTYPE
from hybridengine.kernels.strided_copy import CopyTable
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.adapter import Adapter
from tests.extras.remote.worlds import (
    TIMEOUT_S,
    come_back,
    damage_arrivals,
    link_store,
    wait_for_dropped,
    worlds,
)
from tests.ranks import message_of
from tests.sync.brute_force import fused_layout
from tests.sync.memory_engine import MemoryEngine, mesh_of, quantize, shard
from tests.sync.quantized_cases import QUANTIZED, SHAPES, differing, trained

pytestmark = pytest.mark.multirank


def build_engine(rank: int, tp_size: int, quantized: bool = True) -> MemoryEngine:
    layout = fused_layout(SHAPES, rank % tp_size, tp_size)
    for name in QUANTIZED if quantized else ():
        quantize(layout, name)
    return MemoryEngine(layout, rank % tp_size, tp_size)


def sharded(full: dict[str, torch.Tensor], world_size: int) -> dict[str, torch.Tensor]:
    mesh = mesh_of(world_size, 1)
    return {n: shard(t, mesh, int(SHAPES[n][0] == "row")) for n, t in full.items()}


def make_sender(port: int, prefix: str, shards, **options) -> WeightSender:
    store = dist.PrefixStore(prefix, link_store(port))
    return WeightSender(
        lambda: shards, store, **{"bucket_bytes": 1 << 15, "timeout_s": TIMEOUT_S} | options
    )


def make_receiver(port: int, prefix: str, engine: MemoryEngine, index: int) -> WeightReceiver:
    store = dist.PrefixStore(prefix, link_store(port))
    return WeightReceiver(engine, store, index=index, timeout_s=TIMEOUT_S)


def trainer_body(rank: int, world_size: int, port: int, num_engines: int) -> dict:
    """Send two versions in FP8, then the second one in bfloat16 to other engines."""
    sent = {}
    for prefix, seeds in (("fp8", (0, 1)), ("dense", (1,))):
        shards = sharded(trained(0, torch.float32), world_size)
        sender = make_sender(port, prefix, shards, num_engines=num_engines)
        for version, seed in enumerate(seeds, 1):
            for name, full in sharded(trained(seed, torch.float32), world_size).items():
                shards[name].to_local().copy_(full.to_local())
            report = sender.sync(version, verify=version == 1)
        sent[prefix] = report.bytes_sent
    states = [(e.state, e.version) for e in sender.engines.values()]
    return {"sent": sent, "states": states, "buckets": len(sender.plan.buckets)}


def engine_body(rank: int, world_size: int, port: int, index: int, tp_size: int) -> dict:
    wrong = []
    for prefix, seeds in (("fp8", (0, 1)), ("dense", (1,))):
        engine = build_engine(rank, tp_size, prefix == "fp8")
        receiver = make_receiver(port, prefix, engine, index)
        for seed in seeds:
            report = receiver.receive()
            wrong += differing(engine, trained(seed, torch.float32))
        if prefix == "fp8":
            tensors, received = engine.tensors, report.bytes_received
    return {
        "received": received,
        "wrong": wrong,
        "bytes": sum(t.nbytes for t in tensors.values()),
        "blocks": sum(t.numel() for n, t in tensors.items() if n.endswith("_scale_inv")),
        "quantized": sorted(n for n, t in tensors.items() if t.dtype == QUANTIZED_DTYPE),
    }


@pytest.mark.parametrize(
    ("trainers", "engines", "tp_size", "over"),
    [
        (2, [1, 1], 1, "groups"),
        (2, [2], 2, "memory"),
        pytest.param(3, [4], 2, "groups", marks=pytest.mark.exhaustive),
        (2, [2], 2, "relayed"),
    ],
)
def test_bits_of_full_tensors_cross_once_at_half_the_bytes(
    trainers: int, engines: list[int], tp_size: int, over: str
) -> None:
    started = [(trainer_body, trainers, len(engines))]
    started += [(engine_body, ranks, i, tp_size) for i, ranks in enumerate(engines)]
    with worlds(*started, over=over) as (_, *running):
        of_trainers, *of_engines = [ranks.results() for ranks in running]
    for rank in (rank for engine in of_engines for rank in engine):
        assert rank["wrong"] == [] and rank["quantized"] == sorted(QUANTIZED)
        assert 0 <= rank["received"] - rank["bytes"] < 4096  # padding of the replicas' parts
    for rank in of_trainers:
        assert rank["states"] == [("live", 1)] * len(engines) and rank["buckets"] > 2
        assert rank["sent"]["fp8"] <= 0.53 * rank["sent"]["dense"]
    replica = of_engines[0][:tp_size]
    once = sum(rank["bytes"] for rank in replica)  # weights and scales
    reduced = 2 * 4 * sum(rank["blocks"] for rank in replica) * (trainers - 1) // trainers
    assert sum(rank["sent"]["fp8"] for rank in of_trainers) == once + trainers * reduced


def adapter_at(version: int) -> Adapter:
    generator = torch.Generator().manual_seed(version)
    left, right = (torch.randn(shape, generator=generator) for shape in ((300, 2), (2, 260)))
    return Adapter(left, right, float(version) ** 9)


def adapter_trainer_body(rank: int, world_size: int, port: int) -> dict:
    adapters = {"q": adapter_at(1)}
    shards = sharded(trained(0, torch.float32), world_size)
    sender = make_sender(port, "", shards, num_engines=2, adapters=lambda: adapters)
    store = link_store(port)
    sent, states = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for version in (1, 2, 3):
            adapters["q"] = adapter_at(version)
            sent.append(sender.sync(version, verify=True).bytes_sent)
            states.append([e.state for e in sender.engines.values()])
            wait_for_dropped(store, rank, version, 2)
    return {"sent": sent, "states": states, "warned": [str(w.message) for w in caught]}


def adapter_engine_body(rank: int, world_size: int, port: int, index: int) -> dict:
    """Engine 0: its scales arrive damaged in the sync to version 2; engine 1: its weights are."""
    engine = build_engine(rank, 1)
    receiver, store = make_receiver(port, "", engine, index), link_store(port)
    copy, wrong, errors, warned = CopyTable.copy, [], [], []

    def damaging(table, sources, destinations):
        copy(table, sources, destinations)
        destinations[0].view(torch.uint8).view(-1)[0] = 0x55

    for version in (1, 2, 3):
        while not receiver.pending():
            time.sleep(0.01)
        if version == 2 and index == 0:
            damage_arrivals(1)
        CopyTable.copy = damaging if version == 2 and index == 1 else copy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            errors.append(message_of(receiver.receive))
            if errors[-1] != "no error":
                come_back(store, receiver, version)
        warned += [str(w.message) for w in caught]
        full, adapter = trained(0, torch.float32), adapter_at(version)
        delta = adapter.scale * (adapter.left.double() @ adapter.right.double())
        wrong.append(differing(engine, full | {"q": (full["q"].double() + delta).float()}))
    return {"wrong": wrong, "errors": errors, "warned": warned}


def test_merged_adapters_damaged_scales_and_wrong_weights() -> None:
    """A sync sends again what shares an engine tensor with `q`, and leaves out the rest."""
    with worlds(
        (adapter_trainer_body, 2), (adapter_engine_body, 1, 0), (adapter_engine_body, 1, 1)
    ) as (_, trainers, resent, wrong):
        of_trainers, (of_resent,), (of_wrong,) = (w.results() for w in (trainers, resent, wrong))
    assert of_resent["wrong"] == [[]] * 3 and of_resent["errors"] == ["no error"] * 3
    (warning,) = of_resent["warned"]
    assert "the scales of quantized weights from trainer rank" in warning
    assert "arrived damaged" in warning
    assert of_wrong["wrong"][::2] == [[], []] and of_wrong["errors"][::2] == ["no error"] * 2
    assert "ReshardError: the checksum of engine tensor" in of_wrong["errors"][1]
    assert of_trainers[0]["states"] == [["live"] * 2, ["live", "dropped"], ["live"] * 2]
    first, second, third = (sum(rank["sent"][i] for rank in of_trainers) for i in range(3))
    assert second < first == third, "`fused` twice; then all weights to the engine that is back"


def refusing_body(rank: int, world_size: int, port: int) -> str:
    shards = sharded(trained(0, torch.float32), world_size)
    sender = make_sender(port, "", shards, num_engines=1, delta="on")
    return message_of(lambda: sender.sync(1))


def refused_body(rank: int, world_size: int, port: int) -> tuple[str, int | None]:
    engine = build_engine(0, 1)
    message = message_of(make_receiver(port, "", engine, 0).receive)
    return message, engine.weight_version


def test_deltas_of_quantized_weights_are_refused() -> None:
    with worlds((refusing_body, 2), (refused_body, 1)) as (_, trainers, engines):
        messages, [(of_engine, version)] = trainers.results(), engines.results()
    for message in messages:
        assert "LayoutError: delta: got 'on', but the engine's weights are quantized" in message
    assert "the trainers gave up the sync" in of_engine and version is None
