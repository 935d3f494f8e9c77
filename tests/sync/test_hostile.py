"""Failures between a plan and a sync are reported with the parameter and the rank."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridengine.engine.interface import SamplingSpec
from hybridengine.run.activity import process_state, this_process
from hybridengine.run.failures import CollectiveGuard
from hybridengine.run.messages import wait_for
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.weight_target import RankFailedError, ReshardError, StaleWeightsError
from tests.ranks import Ranks, message_of, run_ranks
from tests.sync.memory_engine import Shapes, build, expected, mesh_of, shard, values

pytestmark = pytest.mark.multirank

SHAPES: Shapes = {
    "q": ("column", (24, 10)),
    "out": ("row", (11, 16)),
    "norm": ("replicated", (13, 3)),
}


def changed_body(rank: int, world_size: int) -> dict[str, str]:
    """Change model or engine on rank 1 alone: every rank must raise and name rank 1."""
    engine, shards, resharder = build(SHAPES, 2, full=values(SHAPES))
    resharder.sync(1)
    tensors = dict(engine.tensors)
    before = {n: t.clone() for n, t in tensors.items()}
    original, messages = dict(shards), {}

    def attempt(what: str, change) -> None:
        if rank == 1:
            change()
        messages[what] = message_of(lambda: resharder.sync(2))
        shards.clear()
        shards.update(original)
        engine.tensors = dict(tensors)
        assert all(torch.equal(before[n], t) for n, t in tensors.items()), what
        assert engine.weight_version == 1 and engine.generate([[1]], SamplingSpec(), 0) == [[]]

    mesh = mesh_of(world_size, 1)
    attempt("dtype", lambda: shards.update(q=shards["q"].bfloat16()))
    attempt("shape", lambda: shards.update(q=shard(torch.ones(24, 12), mesh, 0)))
    attempt("re-sharded", lambda: shards.update(out=shard(values(SHAPES)["out"], mesh, 0)))
    attempt("full", lambda: shards.update(norm=values(SHAPES)["norm"]))
    attempt("added", lambda: shards.update(extra=torch.ones(2)))
    attempt("removed", lambda: shards.pop("norm"))
    attempt("engine", lambda: engine.tensors.update(norm=torch.ones(13, 3)))
    messages["version"] = message_of(lambda: resharder.sync(2 + rank))
    resharder.sync(7)
    messages["version after"] = str(engine.weight_version)
    return messages


def test_changes_after_planning_are_named_before_anything_moves() -> None:
    ranks = run_ranks(changed_body, 2)
    expected_texts = {
        "dtype": "parameter 'q' changed its dtype from torch.float32 to torch.bfloat16",
        "shape": "parameter 'q' changed its shape from (24, 10) to (24, 12)",
        "re-sharded": "parameter 'out' changed its placements",
        "full": "parameter 'norm' changed its placements",
        "added": "parameter 'extra' was added",
        "removed": "parameter 'norm' was removed",
        "engine": "engine tensor 'norm' was recorded as",
    }
    for rank, messages in enumerate(ranks):
        for what, text in expected_texts.items():
            error = "LayoutError" if what == "engine" else "PlanOutdatedError"
            assert messages[what].startswith(f"{error}: on rank 1: "), messages[what]
            assert text in messages[what]
        assert f"ReshardError: rank {rank} syncs to version {2 + rank}" in messages["version"]
        assert "between 2 and 3" in messages["version"]
        assert messages["version after"] == "7"


def world_body(rank: int, world_size: int) -> dict[str, str]:
    """Plan on ranks that disagree, then sync in a world that became smaller."""
    messages = {}
    full = values(SHAPES)
    messages["bucket"] = message_of(
        lambda: build(SHAPES, 2, full=full, bucket_bytes=4096 * (1 + (rank == 2)))
    )
    odd = {**SHAPES, "q": ("column", (24, 12))} if rank == 3 else SHAPES
    messages["model"] = message_of(lambda: build(odd, 2, full=values(odd)))
    messages["small bucket"] = message_of(lambda: build(SHAPES, 2, full=full, bucket_bytes=100))
    _, _, resharder = build(SHAPES, 2, full=full)
    resharder.sync(1)
    original = dist.get_world_size
    dist.get_world_size = lambda group=None: original(group) // 2  # as after an elastic restart
    messages["world"] = message_of(lambda: resharder.sync(2))
    dist.get_world_size = original
    return messages


def corrupt_body(rank: int, world_size: int, transport: str) -> dict[str, str]:
    """Flip a bit of the data that rank 1 receives: in its receive buffer, or as it reads the first
    slice that another rank packed."""
    engine, _, resharder = build(SHAPES, 2, full=values(SHAPES), transport=transport)
    unpack = resharder.mover.exchanges[0].unpack

    class Damaging(type(unpack)):
        def copy(self, sources, destinations):
            damaged = [source.clone() for source in sources]
            for buffer in damaged:
                buffer.view(torch.uint8)[:1] ^= 64  # of none where nothing is sent
            super().copy(damaged, destinations)

    intact = unpack.__class__
    if rank == 1:
        unpack.__class__ = Damaging
    messages = {"unverified": message_of(lambda: resharder.sync(1))}
    messages["verified"] = message_of(lambda: resharder.sync(2, verify=True))
    messages["generate"] = message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0))
    unpack.__class__ = intact
    resharder.sync(3, verify=True)
    want = expected(engine, values(SHAPES))
    messages["after"] = str(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
    return messages


@pytest.mark.parametrize("transport", ["pull", "all-to-all"])
def test_checksums_detect_a_corrupted_byte(transport: str) -> None:
    for messages in run_ranks(corrupt_body, 4, transport):
        assert messages["unverified"] == "no error", "checksums are not free and not the default"
        assert messages["verified"].startswith(
            f"{ReshardError.__name__}: the checksum of engine tensor"
        )
        assert "on rank 1 differs from its source '" in messages["verified"]
        assert messages["generate"].startswith(StaleWeightsError.__name__)
        assert "sync to weight version 2 did not finish" in messages["generate"]
        assert messages["after"] == "True"


def failing_body(rank: int, world_size: int, how: str, transport: str) -> dict:
    engine, _, resharder = build(
        SHAPES, 2, full=values(SHAPES), bucket_bytes=1 << 20, transport=transport
    )
    resharder.sync(1)
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=3))
    pack = resharder.mover.exchanges[0].pack

    class Failing(type(pack)):
        def copy(self, *tensors):
            if how == "stalls":
                time.sleep(9)
            elif how == "fails":
                raise MemoryError("no memory on this rank")
            dist.destroy_process_group()  # closes its connections, as its exit does

    if rank == 1:
        pack.__class__ = Failing
    started = time.monotonic()
    message = message_of(lambda: resharder.sync(2))
    return {
        "message": message,
        "seconds": time.monotonic() - started,
        "generate": message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0)),
    }


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        ("stalls", "pull"),
        ("exits", "pull"),
        ("fails", "pull"),
        pytest.param("exits", "all-to-all", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_fails_in_the_middle_is_named(how: str, transport: str) -> None:
    ranks = 4 if how == "exits" else 2
    results = run_ranks(failing_body, ranks, how, transport, timeout_s=300)
    for rank, result in enumerate(results):
        assert "sync to weight version 2 did not finish" in result["generate"]
        if rank == 1:
            continue
        message = result["message"]
        assert message.startswith(f"RankFailedError: rank {rank} stopped in the sync to"), message
        assert "version 2 while exchanging bucket 1 of" in message
        assert result["seconds"] < 100
        if how == "fails":
            assert "rank 1 failed in the sync to version 2 while packing bucket 1 of" in message
            assert "MemoryError: no memory on this rank" in message
        elif how == "stalls":
            assert "rank 1 is in the sync to version 2 while packing bucket 1 of" in message
            assert "tests/sync/test_hostile.py:" in message
        else:
            assert "rank 1 was killed or stalled" in message


def failing_inside_body(rank: int, world_size: int) -> str:
    """Rank 1 fails by itself inside of what a guard observes, with the type of gloo's errors."""
    _, _, resharder = build(SHAPES, 2, full=values(SHAPES))
    resharder.sync(1)

    def fail(*args, **kwargs) -> None:
        raise RuntimeError("cannot reshape tensor of 0 elements")

    if rank == 1:
        dist.all_reduce = fail
        resharder.guard.ask = lambda: pytest.fail("it asked the other rank")
    return message_of(lambda: resharder.sync(2))  # rank 1 lives on: no connection is closed


def test_an_error_inside_a_collective_is_told_as_what_it_is_on_every_rank() -> None:
    other, own = run_ranks(failing_inside_body, 2)
    assert own == "RuntimeError: cannot reshape tensor of 0 elements"
    assert other.startswith(
        "RankFailedError: rank 0 stopped in the sync to version 2 while agreeing to start: rank 1 "
        "failed in the sync to version 2 while agreeing to start: RuntimeError: cannot reshape "
        "tensor of 0 elements"
    )


def survivors_body(rank: int, world_size: int) -> str:
    """Rank 1 is killed once rank 2 has its part of a bucket; rank 0 has noticed it and lives on."""
    store, guard = dist.distributed_c10d._get_default_store(), CollectiveGuard(rank, world_size)
    if rank == 0:
        store.wait(["test/named"], timedelta(seconds=200))
        return ""
    sent = torch.ones(3)
    with guard.operation("a sync"), guard.collective("exchanging bucket 1 of 2"):
        arriving = torch.zeros(3)
        work = dist.all_to_all_single(arriving, sent, async_op=True)
        if rank == 1:
            store.wait(["test/arrived"], timedelta(seconds=200))
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(lambda: True if arriving[1] == 1 else None)
        store.set("test/arrived", "1")
        message = message_of(lambda: guard.wait(work, arriving.device))
    store.set("test/named", "1")
    return message


def test_a_killed_rank_is_noticed_by_ranks_that_wait_for_its_survivors() -> None:
    with Ranks(survivors_body, 3) as ranks:
        assert ranks.results_without(1)[2] == "DistError: rank 1 has ended"


def stopped_body(rank: int, world_size: int, where: str, transport: str) -> list[str]:
    """Rank 1 is stopped as it plans, as it starts a sync, or as it packs a bucket."""
    engine, shards, resharder = build(SHAPES, 2, full=values(SHAPES), transport=transport)
    resharder.sync(1)
    store = dist.distributed_c10d._get_default_store()
    packing = resharder.mover.exchanges[0].pack

    def stop_rank1() -> None:
        if rank == 1:
            store.set("test/process", this_process())
            os.kill(os.getpid(), signal.SIGSTOP)
        process = store.get("test/process").decode()
        wait_for(lambda: True if process_state(process) == "stopped" else None)

    class Stopping(type(packing)):
        def copy(self, *tensors):
            stop_rank1()
            super().copy(*tensors)

    def read() -> dict[str, torch.Tensor]:
        stop_rank1()
        return shards

    if where == "plan":
        message = message_of(lambda: Resharder(read, engine, timeout_s=1))
    else:
        resharder.guard.timeout_s = 1  # after what has to finish in time
        if where == "start":
            resharder.trained.read_parameters = read
        else:
            packing.__class__ = Stopping
        message = message_of(lambda: resharder.sync(2))
    return [message, message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0))]


PLACES = {
    "plan": "planning the syncs while comparing models and engines",
    "start": "the sync to version 2 while agreeing to start",
    "transfer": "the sync to version 2 while exchanging bucket 1 of",
}


@pytest.mark.parametrize(
    ("where", "transport"), [*((where, "pull") for where in PLACES), ("transfer", "all-to-all")]
)
def test_a_stopped_rank_is_named_after_timeout_s(where: str, transport: str) -> None:
    """Not after the process group's timeout, which is as long as the ranks may run."""
    with Ranks(stopped_body, 2, where, transport) as ranks:
        message, generate = ranks.results_without(1)[0]
    assert message.startswith(f"RankFailedError: rank 0 stopped in {PLACES[where]}"), message
    assert ": rank 1 is stopped (SIGSTOP)" in message
    stale = "sync to weight version 2 did not finish" in generate
    assert stale == (where == "transfer")


def uncommitted_body(rank: int, world_size: int) -> list:
    """Rank 1 fails as it finishes an update, when all weights are written."""
    engine, _, resharder = build(SHAPES, 2, full=values(SHAPES))
    resharder.sync()
    if rank == 1:
        engine.finish_update = lambda: 1 / 0
    results = [message_of(resharder.sync), engine.weight_version]
    results.append(message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0)))
    engine.finish_update = lambda: None
    if rank == 1:
        engine.weight_version = None  # as where its connection broke off after the agreement
    want = expected(engine, values(SHAPES))
    for tensor in engine.tensors.values():
        tensor.fill_(7)
    results.append(resharder.sync().version)
    return [*results, all(torch.equal(engine.tensors[n], t) for n, t in want.items())]


def test_a_failure_after_the_last_write_is_one_of_all_ranks() -> None:
    for error, version, refused, healed, arrived in run_ranks(uncommitted_body, 2):
        assert error.startswith("ReshardError: on rank 1: ZeroDivisionError"), error
        assert version == 1 and "sync to weight version 2 did not finish" in refused
        assert healed == 2 and arrived


def test_ranks_that_do_not_agree_all_end_at_planning() -> None:
    for rank, messages in enumerate(run_ranks(world_body, 4)):
        assert "LayoutError: ranks [2] made another reshard plan than rank 0" in messages["bucket"]
        assert messages["model"].startswith("LayoutError: "), messages["model"]
        assert "engines of ranks 2 and 3 are both TP rank 1" in messages["model"]
        assert "bucket_bytes: got 100, expected at least 4096" in messages["small bucket"]
        assert f"planned as rank {rank} of 4, now rank {rank} of 2" in messages["world"]


def test_errors_share_a_base() -> None:
    assert issubclass(RankFailedError, ReshardError) and issubclass(RankFailedError, dist.DistError)
    assert issubclass(LayoutError, RuntimeError)
