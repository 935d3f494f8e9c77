"""Engines and trainers that end or come late during a sync between worlds of their own."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import count
from types import MappingProxyType

import pytest
import torch

from hybridengine.engine.interface import SamplingSpec
from hybridengine.kernels.strided_copy import CopyTable
from hybridengine.remote.sync.engine_rank import EngineRank
from hybridengine.remote.sync.receiver import WeightReceiver
from hybridengine.remote.sync.sender import WeightSender
from hybridengine.run.activity import process_state, this_process
from hybridengine.run.messages import wait_for
from hybridengine.sync.weight_target import ReshardError
from tests.extras.remote.worlds import (
    FACTORS,
    TIMEOUT_S,
    UNEVEN,
    build_engine,
    damage_arrivals,
    full_at,
    link_store,
    worlds,
)
from tests.ranks import Ranks, message_of
from tests.sync.memory_engine import MemoryEngine, expected, mesh_of, shard, values

pytestmark = pytest.mark.multirank

GROUPS = pytest.param("groups", marks=pytest.mark.exhaustive)


def signal_at_second_copy(signum: int) -> None:
    """Send this process a signal as it copies a second bucket."""
    copy, calls = CopyTable.copy, count()

    def copy_or_end(table, sources, destinations):
        if next(calls) == 1:
            os.kill(os.getpid(), signum)
        copy(table, sources, destinations)

    CopyTable.copy = copy_or_end


def look_after_the_drop() -> None:
    """Let this process look for the second transfer once its engine was dropped from that sync."""
    wait = EngineRank.wait_for_transfer

    def wait_late(rank, state, attempt):
        if state.version == 2:
            wait_for(lambda: None if rank.is_invited(rank.current_sync()) else True)
        return wait(rank, state, attempt)

    EngineRank.wait_for_transfer = wait_late


def trainer_body(
    rank: int,
    world_size: int,
    port: int,
    last: int,
    wait_after: int,
    end_at: int,
    timeout_s: float,
    end_by: int = signal.SIGKILL,
) -> dict:
    """Sync versions 1 to `last`. wait_after: then wait for engine 1.

    end_at: rank 1 gets the signal `end_by` in that sync.
    """
    store, full = link_store(port), values(UNEVEN)
    shards = {name: shard(t, mesh_of(world_size, 1), 0) for name, t in full.items()}
    sender = WeightSender(
        lambda: shards, store, num_engines=2, bucket_bytes=4096, timeout_s=timeout_s
    )
    store.wait(["test/joined 0", "test/joined 1"], timedelta(seconds=200))
    states, warned = [], []
    for version in range(1, last + 1):
        for tensor in shards.values():
            tensor.to_local().mul_(FACTORS.get(version, 2.0))
        if version == end_at and rank == 1:
            signal_at_second_copy(end_by)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                sender.sync(version)
            except ReshardError as error:
                return {
                    "error": f"{type(error).__name__}: {error}",
                    "states": states,
                    "warned": warned,
                }
        warned += [str(w.message) for w in caught]
        states.append([(e.state, e.version) for e in sender.engines.values()])
        if rank == 0:
            store.set(f"test/synced {version}", "1")
        if version == wait_after:
            store.wait(["test/again"], timedelta(seconds=200))
    return {"states": states, "warned": warned}


def engine_body(
    rank: int,
    world_size: int,
    port: int,
    index: int,
    last: int,
    timeout_s: float,
    end: tuple[int, int] = (0, 0),
    come_after: int = 0,
    damaged: Mapping[int, int] = MappingProxyType({}),
    late: bool = False,
) -> dict:
    """Receive until `last`. end: rank 0 gets signal end[0] in the sync to version end[1].

    come_after: stay away until that sync is over. damaged: version → how many of the messages that
    rank 0 receives in its sync are damaged. late: rank 1 looks for the second transfer late.
    """
    if late and rank == 1:
        look_after_the_drop()
    engine, store = build_engine(rank, world_size), link_store(port)
    receiver = WeightReceiver(engine, store, index=index, timeout_s=timeout_s)
    again = store.add(f"test/joins {index}", 1) > world_size
    store.set(f"test/joined {index}", "1")
    if come_after:
        store.wait([f"test/synced {come_after}"], timedelta(seconds=200))
        assert not receiver.pending()  # shows that it is back
    if rank == 0 and (again or come_after):  # it has told the trainers who the engine is
        store.set("test/again", "1")
    versions, right = [], []
    while engine.weight_version != last:
        while not receiver.pending():
            time.sleep(0.01)
        if end[1] == (engine.weight_version or 0) + 1 and rank == 0:
            signal_at_second_copy(end[0])
        if rank == 0 and (times := damaged.get((engine.weight_version or 0) + 1)):
            damage_arrivals(times)
        try:
            versions.append(receiver.receive().version)
        except ReshardError as error:
            refused = message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0))
            error = f"{type(error).__name__}: {error}"
            return {"error": error, "refused": refused, "versions": versions, "right": right}
        right.append(is_right(engine, versions[-1]))
    return {"versions": versions, "right": right}


def is_right(engine: MemoryEngine, version: int) -> bool:
    want = expected(engine, full_at(version))
    return all(torch.equal(engine.tensors[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("over", ["groups", "memory", "relayed"])
def test_an_engine_that_ends_is_dropped_and_its_successor_brought_up_to_date(over: str) -> None:
    with worlds(
        (trainer_body, 2, 3, 2, 0, TIMEOUT_S),
        (engine_body, 2, 0, 3, TIMEOUT_S),
        (engine_body, 2, 1, 3, TIMEOUT_S, (signal.SIGKILL, 2)),
        over=over,
    ) as (port, trainers, follower, ended):
        survivor = ended.results_without(0)[1]
        with Ranks(engine_body, 2, port, 1, 3, TIMEOUT_S) as successor:
            of_trainers, of_follower = trainers.results(), follower.results()
            of_successor = successor.results()
    assert [r["versions"] for r in of_follower] == [[1, 2, 3]] * 2
    assert [r["right"] for r in of_follower] == [[True] * 3] * 2
    assert [(r["versions"], r["right"]) for r in of_successor] == [([3], [True])] * 2
    assert "rank 0 has ended" in survivor["error"] and "RankFailedError" in survivor["error"]
    assert "sync to weight version 2 did not finish" in survivor["refused"]
    for rank in of_trainers:
        assert rank["states"] == [
            [("live", 1), ("live", 1)],
            [("live", 2), ("dropped", None)],
            [("live", 3), ("live", 3)],
        ]
    (warning,) = of_trainers[0]["warned"]
    assert "engine 1 was dropped from the sync to version 2: " in warning
    assert "rank 0 has ended" in warning and of_trainers[1]["warned"] == []


def test_a_rank_that_never_saw_the_transfer_refuses_where_another_one_began_it() -> None:
    with worlds(
        (trainer_body, 2, 2, 0, 0, TIMEOUT_S),
        (engine_body, 2, 0, 2, TIMEOUT_S),
        (engine_body, 2, 1, 2, TIMEOUT_S, (signal.SIGKILL, 2), 0, {}, True),
        over="memory",
    ) as (_, trainers, other, ended):
        survivor = ended.results_without(0)[1]
        assert [r["states"][1] for r in trainers.results()] == [
            [("live", 2), ("dropped", None)]
        ] * 2
        assert other.results()[0]["right"] == [True, True]
    assert "rank 0 has ended" in survivor["error"] and survivor["versions"] == [1]
    assert "sync to weight version 2 did not finish" in survivor["refused"]


@pytest.mark.parametrize(
    "over", [GROUPS, pytest.param("memory", marks=pytest.mark.exhaustive), "relayed"]
)
def test_late_and_stalled_engines_are_dropped_and_a_lost_trainer_is_named(over: str) -> None:
    timeout_s = 5.0
    with worlds(
        (trainer_body, 2, 4, 1, 4, timeout_s),
        (engine_body, 1, 0, 4, timeout_s),
        (engine_body, 1, 1, 4, timeout_s, (signal.SIGSTOP, 3), 1),
        over=over,
    ) as (_, trainers, punctual, late):
        of_trainers = trainers.results_without(1)
        (of_punctual,) = punctual.results()
        late.results_without(0)
    assert "RankFailedError" in of_trainers[0]["error"]
    assert "rank 1 has ended" in of_trainers[0]["error"]
    assert of_trainers[0]["states"] == [
        [("live", 1), ("dropped", None)],
        [("live", 2), ("live", 2)],
        [("live", 3), ("dropped", None)],
    ]
    reasons = [
        re.sub(r".*version (\d): (.*?)\. .*", r"\1: \2", w) for w in of_trainers[0]["warned"]
    ]
    late_text = f"has not answered within {timeout_s:g} s"
    assert reasons == [f"1: it {late_text}", f"3: rank 0 is stopped (SIGSTOP) and {late_text}"]
    assert (of_punctual["versions"], of_punctual["right"]) == ([1, 2, 3], [True] * 3)
    assert "RankFailedError: rank 0 of engine 0" in of_punctual["error"]
    assert re.search(r"while receiving bucket .* rank 1 has ended", of_punctual["error"])
    assert "sync to weight version 4 did not finish" in of_punctual["refused"]


def stopped_body(rank: int, world_size: int, port: int, side: str) -> str:
    """Begin a sync while rank 1 is stopped."""
    store = link_store(port)
    if side == "trainers":
        shards = {"q": shard(torch.ones(4, 2), mesh_of(world_size, 1), 0)}
        sender = WeightSender(lambda: shards, store, num_engines=1, timeout_s=1)
        begin = partial(sender.sync, 1)
    else:
        engine = build_engine(rank, world_size)
        begin = WeightReceiver(engine, store, index=0, timeout_s=1).receive
    if rank == 1:
        store.set("test/process", this_process())
        os.kill(os.getpid(), signal.SIGSTOP)
    process = store.get("test/process").decode()
    wait_for(lambda: True if process_state(process) == "stopped" else None)
    return message_of(begin)


@pytest.mark.parametrize("side", ["trainers", "engine"])
def test_a_stopped_rank_is_named_after_the_timeout_of_the_sync(side: str) -> None:
    """Not after that of the process group, which is as long as the ranks may run."""
    with worlds((stopped_body, 2, side)) as (_, ranks):
        message = ranks.results_without(1)[0]
    phase = {
        "trainers": "the sync to version 1 while agreeing to start",
        "engine": "waiting for a sync",
    }
    assert message.startswith("RankFailedError: "), message
    assert f"rank 0 stopped in {phase[side]}: rank 1 is stopped (SIGSTOP)" in message


@pytest.mark.parametrize("over", [GROUPS, "relayed"])
def test_a_trainer_that_stops_during_a_transfer_is_named(over: str) -> None:
    """Within a few timeouts of the sync, where the process groups have hundreds of seconds."""
    timeout_s = 5.0
    with worlds(
        (trainer_body, 2, 2, 0, 2, timeout_s, signal.SIGSTOP),
        (engine_body, 1, 0, 2, timeout_s),
        (engine_body, 1, 1, 2, timeout_s),
        over=over,
    ) as (_, trainers, *engines):
        error = trainers.results_without(1)[0]["error"]
        of_engines = [ranks.results()[0] for ranks in engines]
    assert error.startswith("RankFailedError") and "rank 1 is stopped (SIGSTOP)" in error
    for engine in of_engines:
        assert (engine["versions"], engine["right"]) == ([1], [True])
        assert "sync to weight version 2 did not finish" in engine["refused"]


def test_damaged_bytes_are_sent_again_and_never_generated_from() -> None:
    always = 10_000
    with worlds(
        (trainer_body, 2, 3, 0, 0, TIMEOUT_S),
        (engine_body, 2, 0, 3, TIMEOUT_S),
        (engine_body, 2, 1, 3, TIMEOUT_S, (0, 0), 0, {2: 1, 3: always}),
    ) as (_, trainers, intact, damaged):
        of_trainers, of_intact = trainers.results(), intact.results()
        of_damaged = damaged.results()
    for rank in of_trainers:
        assert rank["states"] == [[("live", v)] * 2 for v in (1, 2)]
        assert "failed 4 times although trainers and engines are running" in rank["error"]
    assert [(r["versions"], r["right"]) for r in of_intact] == [([1, 2, 3], [True] * 3)] * 2
    for rank in of_damaged:
        assert (rank["versions"], rank["right"]) == ([1, 2], [True] * 2)
        assert "RankFailedError" in rank["error"]
        # The trainers end after their error: a rank may see that before their last message.
        assert re.search("check the network|trainer rank . has ended", rank["error"])
        assert "sync to weight version 3 did not finish" in rank["refused"]
