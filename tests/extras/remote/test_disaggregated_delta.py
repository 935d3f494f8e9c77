"""Deltas to engines in other worlds: each engine its own chain, and the bits of a dense sync."""

from __future__ import annotations

import contextlib
import time
import warnings
from unittest import mock

import pytest
import torch

from hybridengine.engine.interface import SamplingSpec
from hybridengine.remote.sync import sender as sender_module
from hybridengine.remote.sync.between_worlds import EnginesEnd
from hybridengine.remote.sync.changes import find_changes
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.shards import local_shard
from tests.extras.remote.worlds import come_back, link_store, wait_for_dropped, worlds
from tests.ranks import message_of
from tests.sync.brute_force import fused_layout
from tests.sync.memory_engine import MemoryEngine, expected, mesh_of, shapes_of, shard, values
from tests.sync.training import train

pytestmark = pytest.mark.multirank

SHAPES = shapes_of(
    column={"q": (240, 50), "gate": (400, 50)},
    row={"out": (110, 96)},
    replicated={"norm": (13, 30), "one": (1, 2), "computed": (6, 4)},
)
# Shares of the elements that change before each sync, of version 1 and up.
SHARES = (1.0, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.0, 0.9, 0.01, 0.02, 0.02, 0.02)
TIMEOUT_S = 10.0  # the sync with a damaged delta lasts as long
FAILS, DAMAGED, WRITTEN, NEW_SENDER = 3, 5, 6, 11  # versions
LAST = len(SHARES)


def full_at(version: int) -> dict[str, torch.Tensor]:
    full = values(SHAPES)
    for v in range(1, version + 1):
        full = train(full, SHARES[v - 1], v)
    return full


def trainer_body(rank: int, world_size: int, port: int) -> dict:
    mesh, store = mesh_of(world_size, 1), link_store(port)

    def sharded(version: int) -> dict[str, torch.Tensor]:
        full = full_at(version)
        return {n: shard(full[n], mesh, int(kind == "row")) for n, (kind, _) in SHAPES.items()}

    shards = sharded(0)
    options = dict(num_engines=2, bucket_bytes=4096, timeout_s=TIMEOUT_S)
    sender_module.find_changes = find = mock.Mock(wraps=find_changes)
    sender = WeightSender(lambda: shards, store, delta="on", **options)
    reports, warned = [], []
    for version in range(1, LAST + 1):
        for name, tensor in sharded(version).items():
            local_shard(shards[name]).copy_(local_shard(tensor))
        if version == NEW_SENDER:
            earlier = sender
            sender = WeightSender(lambda: shards, store, delta="on", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reports.append(sender.sync(version, verify=version in (2, WRITTEN)))
        warned += [str(w.message) for w in caught]
        if version == NEW_SENDER:
            assert "newer WeightSender" in message_of(lambda: earlier.sync(version + 1))  # noqa: B023
        wait_for_dropped(store, rank, version, FAILS)
        if version == LAST - 1:  # all engines have it
            assert sender.sync(version).bytes_sent == 0
    return {
        "delta": [r.delta for r in reports],
        "sent": [r.bytes_sent for r in reports],
        "changed": [r.changed for r in reports],
        "vs_dense": [r.metrics["reshard/bytes_vs_dense"] for r in reports],
        "warned": warned,
        "local": [call.kwargs["local"] for call in find.call_args_list],
    }


def build_engine(tp_rank: int) -> MemoryEngine:
    layout = fused_layout(SHAPES, tp_rank, 2)
    layout.fallback, layout.by_loader = {"computed": "computed: computed by mul"}, {"computed"}
    layout.copies = [c for c in layout.copies if c.source != "computed"]
    return MemoryEngine(layout, tp_rank, 2)


def damage() -> mock._patch:
    remember = EnginesEnd.remember

    def remember_and_flip(transport, where, parts):
        remember(transport, where, parts)
        if where.startswith("delta"):
            next(part for part in parts if len(part))[0] ^= 1

    return mock.patch.object(EnginesEnd, "remember", remember_and_flip)


def engine_body(rank: int, world_size: int, port: int, index: int) -> dict:
    """Engine 1 fails in one sync and is written to before another; engine 0 gets a wrong bit."""
    engine, store = build_engine(rank), link_store(port)
    receiver = WeightReceiver(engine, store, index=index, timeout_s=TIMEOUT_S)
    delta: list[bool | str] = []
    received, right, warned = [], [], []
    for version in range(1, LAST + 1):
        if (index, version) == (1, WRITTEN):
            update = engine.weight_update(version - 1, lambda finish: finish())
            with update if rank == 0 else contextlib.nullcontext():
                for tensor in engine.tensors.values():
                    tensor.data.fill_(7)
        while not receiver.pending():
            time.sleep(0.01)
        if (index, version) == (1, FAILS):
            with contextlib.ExitStack() as stack:
                if rank == 1:
                    fault = mock.patch.object(
                        engine, "finish_update", side_effect=ValueError("cache")
                    )
                    stack.enter_context(fault)
                delta.append(message_of(receiver.receive))
            assert engine.weight_version == version - 1, "no rank of the engine has committed"
            refused = message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0))
            assert "sync to weight version 3 did not finish" in refused
            come_back(store, receiver, version)
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if (index, version, rank) == (0, DAMAGED, 1):
                with damage():
                    report = receiver.receive()
            else:
                report = receiver.receive()
        warned += [str(w.message) for w in caught]
        assert report.version == engine.weight_version == version
        delta.append(report.delta)
        received.append(report.bytes_received)
        want = expected(engine, full_at(version))
        right.append(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
    return {"delta": delta, "received": received, "right": right, "warned": warned}


@pytest.mark.parametrize("over", ["groups", "memory", "relayed", "mixed"])
def test_each_engine_gets_a_delta_or_everything(over: str) -> None:
    """Steps in a row, a failed engine, a damaged message, a foreign write, and a new sender."""
    started = (trainer_body, 3), (engine_body, 2, 0), (engine_body, 2, 1)
    with worlds(*started, over=over) as (_, *running):
        of_trainers, *of_engines = [ranks.results() for ranks in running]
    first, second = of_engines
    dense = {1, 9, NEW_SENDER}
    for engine, more in ((first, {DAMAGED}), (second, {FAILS + 1, WRITTEN})):
        for rank in engine:
            assert all(rank["right"])
            failed = [d for d in rank["delta"] if isinstance(d, str)]
            assert len(failed) == (engine is second) and all("cache" in text for text in failed)
            wanted = [version not in dense | more for version in range(1, LAST + 1)]
            got = [d for d in rank["delta"] if not isinstance(d, str)]
            assert got == [w for v, w in enumerate(wanted, 1) if not (failed and v == FAILS)]
    (warning,) = [text for rank in first for text in rank["warned"] if "delta" in text]
    assert "rank 1 of engine 0: the delta from rank 0 was not applied: its checksum" in warning
    (dropped,) = [text for text in of_trainers[0]["warned"] if "dropped" in text]
    assert "engine 1 was dropped from the sync to version 3" in dropped
    mixed = {FAILS + 1, DAMAGED, WRITTEN}
    for rank in of_trainers:
        near = over in ("memory", "relayed")
        assert rank["local"] == [near] * 2, "of both senders: auto sends all there"
        assert rank["delta"] == [v not in dense | mixed for v in range(1, LAST + 1)]
        assert rank["changed"] == of_trainers[0]["changed"], "the same on all ranks"
        for version, (got, share) in enumerate(zip(rank["changed"], SHARES, strict=True), 1):
            assert (got is None) == (version in (1, NEW_SENDER)), "nothing was sent before"
            assert got is None or got == pytest.approx(share, abs=0.01)
        assert 0.9 < rank["vs_dense"][0] < 1.2 and rank["vs_dense"][1] < 0.2
    crossed = sum(rank["sent"][1] for rank in of_trainers)
    at_one_engine = sum(rank["received"][1] for rank in first)
    if over == "groups":
        assert crossed < 1.3 * at_one_engine, "replicas share what crosses"
