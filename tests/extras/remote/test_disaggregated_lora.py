"""Adapters to engines in other processes, merged and alone; frozen weights once; checksums."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from hybridengine.kernels.strided_copy import CopyTable
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.weight_target import ReshardError
from tests.extras.remote.worlds import TIMEOUT_S, come_back, link_store, wait_for_dropped, worlds
from tests.ranks import message_of
from tests.sync.brute_force import fused_layout
from tests.sync.memory_engine import MemoryEngine, Shapes, expected, mesh_of, shard, values

pytestmark = pytest.mark.multirank

SHAPES: Shapes = {
    "q": ("column", (24, 40)),
    "out": ("row", (32, 48)),
    "norm": ("replicated", (40,)),
    "embed": ("replicated", (90, 40)),
}
ADAPTED = {"q": (24, 40), "out": (32, 48)}


def factors(version: int) -> dict[str, Adapter]:
    generator = torch.Generator().manual_seed(version)
    return {
        name: Adapter(
            torch.randn(rows, 3, generator=generator),
            torch.randn(3, cols, generator=generator),
            0.5,
        )
        for name, (rows, cols) in ADAPTED.items()
    }


def trainer_body(rank: int, world_size: int, port: int, merge: bool) -> dict:
    mesh = mesh_of(world_size, 1)
    shards = {
        name: shard(tensor, mesh, int(name == "out")) for name, tensor in values(SHAPES).items()
    }
    adapters: dict[str, Adapter] = {}
    for name, adapter in factors(1).items():
        adapters[name] = Adapter(shard(adapter.left, mesh, 0), shard(adapter.right, mesh, 0), 0.5)
    store = link_store(port)
    sender = WeightSender(
        lambda: shards,
        store,
        num_engines=2,
        bucket_bytes=4096,
        adapters=lambda: adapters,
        merge=merge,
        timeout_s=TIMEOUT_S,
    )
    sent, states = [], []
    for version in (1, 2, 3, 4):
        for name, adapter in factors(version).items():
            for ours, new in (
                (adapters[name].left, adapter.left),
                (adapters[name].right, adapter.right),
            ):
                ours.to_local().copy_(shard(new, mesh, 0).to_local())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sent.append(sender.sync(version, verify=True).bytes_sent)
        states.append([e.state for e in sender.engines.values()])
        wait_for_dropped(store, rank, version, 2)
    return {"sent": sent, "states": states, "warned": [str(w.message) for w in caught]}


class AdaptedEngine(MemoryEngine):
    def load_adapters(self, adapters, version) -> None:
        self.adapters = dict(adapters)


def engine_body(rank: int, world_size: int, port: int, index: int, merge: bool) -> dict:
    """Engine 1 gets a wrong bit in the sync to version 2; engine 0 sleeps before version 4."""
    engine = AdaptedEngine(fused_layout(SHAPES, 0, 1), 0, 1)
    store = link_store(port)
    receiver = WeightReceiver(engine, store, index=index, timeout_s=TIMEOUT_S)
    copy, right, errors = CopyTable.copy, [], []

    def damaging(table, sources, destinations):
        copy(table, sources, destinations)
        destinations[0].view(-1)[0] += 1

    for version in (1, 2, 3, 4):
        while not receiver.pending():
            time.sleep(0.01)
        if (index, version) == (0, 4):
            engine.discarded = True
            for tensor in engine.tensors.values():
                tensor.data.fill_(float("nan"))
        CopyTable.copy = damaging if (index, version) == (1, 2) else copy
        errors.append(message_of(receiver.receive))
        if errors[-1] != "no error":
            come_back(store, receiver, version)
        full, adapters = values(SHAPES), factors(version)
        pairs = []
        if merge:
            for name, a in adapters.items():
                delta = a.scale * (a.left.double() @ a.right.double())
                full[name] = (full[name].double() + delta).float()
        else:
            for name, a in adapters.items():
                got = engine.adapters[name]
                pairs += [(got.left, a.left), (got.right, a.right)]
        pairs += [(engine.tensors[n], t) for n, t in expected(engine, full).items()]
        right.append(all(torch.equal(a, b) for a, b in pairs))
    return {"right": right, "errors": errors}


@pytest.mark.parametrize(
    ("merge", "over"), [(True, "groups"), (False, "groups"), (True, "memory"), (True, "relayed")]
)
def test_adapters_and_checksums(merge: bool, over: str) -> None:
    with worlds(
        (trainer_body, 2, merge), (engine_body, 1, 0, merge), (engine_body, 1, 1, merge), over=over
    ) as (_, trainers, good, damaged):
        of_trainers, (of_good,), (of_damaged,) = (w.results() for w in (trainers, good, damaged))
    assert of_good["right"] == [True] * 4 and of_good["errors"] == ["no error"] * 4
    text = of_damaged["errors"][1]
    assert text.startswith(f"{ReshardError.__name__}: the checksum of engine tensor")
    assert "on rank 0 of engine 1 differs" in text
    assert of_damaged["errors"][:1] + of_damaged["errors"][2:] == ["no error"] * 3
    assert of_damaged["right"] == [True, False, True, True]
    first, second, third, fourth = (sum(rank["sent"][i] for rank in of_trainers) for i in range(4))
    assert second < first, "frozen weights travel once"
    assert third == first, "an engine that was dropped gets all weights again"
    assert fourth == first, "an engine whose weights were discarded gets all of them again"
    assert of_trainers[0]["states"] == [["live"] * 2, ["live", "dropped"], *[["live"] * 2] * 2]
