"""Trainers and engines in worlds of their own: what arrives, and what crosses between them."""

from __future__ import annotations

import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridengine.remote.sync.link import divide
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.records import SyncState, SyncStore
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.sync.checks import plain_values
from tests.extras.remote.worlds import (
    FACTORS,
    TIMEOUT_S,
    UNEVEN,
    build_engine,
    full_at,
    link_store,
    worlds,
)
from tests.ranks import message_of
from tests.sync.memory_engine import expected, mesh_of, shard, values

pytestmark = pytest.mark.multirank


def trainer_body(rank: int, world_size: int, port: int, num_engines: int, case: dict) -> dict:
    mesh = mesh_of(world_size, case.get("replicas", 1))
    dim1 = case.get("rows_on_dim1", True)
    shards = {
        name: shard(values(UNEVEN)[name], mesh, int(kind == "row" and dim1))
        for name, (kind, _) in UNEVEN.items()
    }
    store, sent = link_store(port), []
    for version, factor in FACTORS.items():
        if version != 2:  # the trainers are replaced before version 3
            ours = WeightSender(
                lambda: shards,
                store,
                num_engines=num_engines,
                bucket_bytes=4096,
                timeout_s=TIMEOUT_S,
                delta="off",
            )
        for tensor in shards.values():
            tensor.to_local().mul_(factor)
        sent.append(ours.sync(version, verify=version != 2).bytes_sent)
    assert ours.sync(version).bytes_sent == 0, "all engines have it"
    plan = ours.plan
    return {
        "sent": sent,
        "planned": plan.bytes_sent[rank],
        "needed": sum(plan.bytes_needed),
        "buckets": len(plan.buckets),
        "states": [(e.state, e.version) for e in ours.engines.values()],
    }


def engine_body(rank: int, world_size: int, port: int, index: int, tp_size: int) -> dict:
    engine = build_engine(rank % tp_size, tp_size)
    receiver = WeightReceiver(engine, link_store(port), index=index, timeout_s=TIMEOUT_S)
    right, reports = [], []
    for version in FACTORS:
        while not receiver.pending():
            time.sleep(0.01)
        reports.append(receiver.receive())
        want = expected(engine, full_at(version))
        right.append(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
        assert engine.weight_version == reports[-1].version == version
        assert receiver.engine_state is None, "nothing is read for syncs that send everything"
    return {"right": right, "received": [r.bytes_received for r in reports]}


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("sent", [[0, 0], [5], [20, 28], [1, 0, 1000], [16, 16, 16]])
def test_replicas_share_what_the_trainers_send(sent: list[int], replicas: int) -> None:
    counts, part = divide(np.array(sent), replicas)
    assert counts.sum(1).tolist() == sent and counts.min() >= 0
    assert counts.sum(0).max() <= part < sum(sent) / replicas + 16
    received = np.repeat(np.arange(len(sent)), sent)  # the sender of each byte, in order
    parts = [np.repeat(np.arange(len(sent)), counts[:, j]) for j in range(replicas)]
    assert np.concatenate(parts).tolist() == received.tolist()


@pytest.mark.parametrize(
    ("trainers", "engines", "tp_size", "case", "over"),
    [
        (2, [1], 1, {}, "groups"),
        pytest.param(3, [2, 2], 2, {}, "groups", marks=pytest.mark.exhaustive),
        (2, [1, 2], 1, {"rows_on_dim1": False}, "groups"),  # one engine of two replicas
        (4, [2], 2, {"replicas": 2}, "groups"),
        (3, [2, 2], 2, {}, "memory"),
        pytest.param(
            *(2, [1, 2], 1, {"rows_on_dim1": False}, "memory"), marks=pytest.mark.exhaustive
        ),
        (4, [2], 2, {"replicas": 2}, "relayed"),  # two trainers have no engine
        (2, [2, 1], 1, {}, "relayed"),  # one of them has two engine ranks
    ],
)
def test_every_byte_crosses_once(
    trainers: int, engines: list[int], tp_size: int, case: dict, over: str
) -> None:
    started = [(trainer_body, trainers, len(engines), case)]
    started += [(engine_body, ranks, i, tp_size) for i, ranks in enumerate(engines)]
    with worlds(*started, over=over) as (_, *running):
        of_trainers, *of_engines = [ranks.results() for ranks in running]
    for result in of_engines:
        for rank in result:
            assert rank["right"] == [True] * 3
    assert of_trainers[0]["buckets"] > 1
    full = 7 * 5 * 4 * tp_size  # the parameter of the loader, in float32
    for sync in range(3):
        crossed = sum(rank["sent"][sync] for rank in of_trainers)
        assert crossed == of_trainers[0]["needed"] + full
        if over != "groups":  # each reads what it needs, and nothing else
            read = [rank["received"][sync] for engine in of_engines for rank in engine]
            needed = of_trainers[0]["needed"] // tp_size + 7 * 5 * 4
            assert sum(read) == sum(engines) * needed
    for rank in of_trainers:
        assert rank["states"] == [("live", 3)] * len(engines)


TRAINED = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4}, "use_cache": True}
OTHER = TRAINED | {"rms_norm_eps": 1e-6}
DIFFERENCE = "rms_norm_eps (1e-05 in the trained model, 1e-06 in the engine)"


def comparing_body(rank: int, world_size: int, port: int, num_engines: int) -> tuple[str, list]:
    """The error of a sync with the configuration `TRAINED`, and what became of the engines."""
    shards = {n: shard(t, mesh_of(world_size, 1), 0) for n, t in values(UNEVEN).items()}
    sender = WeightSender(
        lambda: shards,
        link_store(port),
        num_engines=num_engines,
        config=TRAINED,
        timeout_s=TIMEOUT_S,
    )
    error = message_of(lambda: sender.sync(1))
    return error, [(e.state, e.version, e.reason) for e in sender.engines.values()]


def configured_body(
    rank: int, world_size: int, port: int, index: int, config: dict
) -> tuple[str, int | None]:
    """The error of an engine with `config`, and its version."""
    engine = build_engine(rank, world_size)
    engine.model_config = plain_values(config)
    receiver = WeightReceiver(engine, link_store(port), index=index, timeout_s=TIMEOUT_S)
    return message_of(receiver.receive), engine.weight_version


def test_an_engine_that_computes_another_function_is_refused() -> None:
    """Although all shapes fit. Of several engines, those that compute the same are synced."""
    with worlds((comparing_body, 2, 1), (configured_body, 1, 0, OTHER)) as (_, trainers, engine):
        [(error, version)] = engine.results()  # while the trainers are there, who tell it
        for refused, _ in trainers.results():
            assert refused.startswith("LayoutError") and DIFFERENCE in refused
    assert error.startswith("RankFailedError") and DIFFERENCE in error and version is None
    same = TRAINED | {"use_cache": False}
    with worlds(
        (comparing_body, 2, 2), (configured_body, 1, 0, same), (configured_body, 1, 1, OTHER)
    ) as (_, trainers, *engines):
        of_trainers = trainers.results()
        [of_same, of_other] = [ranks.results()[0] for ranks in engines]
    for error, states in of_trainers:
        assert error == "no error"
        assert [state[:2] for state in states] == [("live", 1), ("dropped", None)]
        assert DIFFERENCE in states[1][2]
    assert of_same == ("no error", 1)
    assert "was dropped from the sync to version 1" in of_other[0] and of_other[1] is None


def pending_body(rank: int, world_size: int, port: int) -> tuple[list[bool], str]:
    """The answers of `pending`, which the last rank asks first; and the error of one on rank 0."""
    store = link_store(port)
    receiver = WeightReceiver(build_engine(rank, world_size), store, index=0, timeout_s=TIMEOUT_S)
    answers = []
    for number in range(1, 9):
        if rank == 0:
            time.sleep(0.02)  # others look before the state changes
            state = SyncState(number, number, 0, invited={0: 1}, is_open=number % 3 > 0)
            SyncStore(store).set("sync", state)
        answers.append(receiver.pending())
        dist.barrier()
    with patch.object(SyncStore, "get_sync", side_effect=RuntimeError("no store on this rank")):
        error = message_of(receiver.pending)
    answers.append(receiver.pending())
    return answers, error


def test_all_ranks_get_the_same_answer_before_the_same_step() -> None:
    with worlds((pending_body, 3)) as (_, ranks):
        results = ranks.results()
    assert results == [results[0]] * 3
    answers, error = results[0]
    assert answers == [number % 3 > 0 for number in [*range(1, 9), 8]]
    assert "on rank 0: RuntimeError: no store on this rank" in error
