"""What can go wrong between a plan and a sync: found, and told with the parameter and the rank."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hybridengine.reshard import RankLostError, ReshardError
from hybridengine.rollout import SamplingSpec
from hybridengine.sharding import LayoutError, StaleWeightsError
from tests.ranks import run_ranks
from tests.reshard.memory_engine import Shapes, build, expected, mesh_of, shard, values

pytestmark = pytest.mark.multirank

SHAPES: Shapes = {
    "q": ("column", (24, 10)),
    "out": ("row", (11, 16)),
    "norm": ("replicated", (13, 3)),
}


def message_of(call) -> str:
    """The type and text of the error that `call` ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def changed_body(rank: int, world_size: int) -> dict[str, str]:
    """Changes on rank 1 alone: every rank must end, and know where it was."""
    engine, shards, resharder = build(SHAPES, 2, whole=values(SHAPES))
    resharder.sync(1)
    live = dict(engine.tensors)
    before = {n: t.clone() for n, t in live.items()}
    original, heard = dict(shards), {}

    def attempt(what: str, change) -> None:
        if rank == 1:
            change()
        heard[what] = message_of(lambda: resharder.sync(2))
        shards.clear()
        shards.update(original)
        engine.tensors = dict(live)
        assert all(torch.equal(before[n], t) for n, t in live.items()), what
        assert engine.weight_version == 1 and engine.generate([[1]], SamplingSpec(), 0) == [[]]

    mesh = mesh_of(world_size, 1)
    attempt("dtype", lambda: shards.update(q=shards["q"].bfloat16()))
    attempt("shape", lambda: shards.update(q=shard(torch.ones(24, 12), mesh, 0)))
    attempt("re-sharded", lambda: shards.update(out=shard(values(SHAPES)["out"], mesh, 0)))
    attempt("whole", lambda: shards.update(norm=values(SHAPES)["norm"]))
    attempt("added", lambda: shards.update(extra=torch.ones(2)))
    attempt("removed", lambda: shards.pop("norm"))
    attempt("engine", lambda: engine.tensors.update(norm=torch.ones(13, 3)))
    heard["version"] = message_of(lambda: resharder.sync(2 + rank))
    resharder.sync(7)
    heard["version after"] = str(engine.weight_version)
    return heard


def test_changes_after_planning_are_named_before_anything_moves() -> None:
    ranks = run_ranks(changed_body, 2)
    told = {
        "dtype": "parameter 'q' changed its dtype from torch.float32 to torch.bfloat16",
        "shape": "parameter 'q' changed its shape from (24, 10) to (24, 12)",
        "re-sharded": "parameter 'out' changed its placements",
        "whole": "parameter 'norm' changed its placements",
        "added": "parameter 'extra' was added",
        "removed": "parameter 'norm' was removed",
        "engine": "engine tensor 'norm' was recorded as",
    }
    for rank, heard in enumerate(ranks):
        for what, text in told.items():
            kind = "LayoutError" if what == "engine" else "PlanOutdatedError"
            assert heard[what].startswith(f"{kind}: on rank 1: "), heard[what]
            assert text in heard[what]
        assert f"ReshardError: rank {rank} syncs to version {2 + rank}" in heard["version"]
        assert "between 2 and 3" in heard["version"]
        assert heard["version after"] == "7"


def world_body(rank: int, world_size: int) -> dict[str, str]:
    """Construction on ranks that do not agree, then a world that shrinks under the plan."""
    heard = {}
    whole = values(SHAPES)
    heard["bucket"] = message_of(
        lambda: build(SHAPES, 2, whole=whole, bucket_bytes=4096 * (1 + (rank == 2)))
    )
    odd = {**SHAPES, "q": ("column", (24, 12))} if rank == 3 else SHAPES
    heard["model"] = message_of(lambda: build(odd, 2, whole=values(odd)))
    heard["small bucket"] = message_of(lambda: build(SHAPES, 2, whole=whole, bucket_bytes=100))
    _, _, resharder = build(SHAPES, 2, whole=whole)
    resharder.sync(1)
    original = dist.get_world_size
    dist.get_world_size = lambda group=None: original(group) // 2  # as after an elastic restart
    heard["world"] = message_of(lambda: resharder.sync(2))
    dist.get_world_size = original
    return heard


def corrupt_body(rank: int, world_size: int) -> dict[str, str]:
    """A byte flips on the wire to rank 1."""
    engine, _, resharder = build(SHAPES, 2, whole=values(SHAPES))
    original = dist.all_to_all_single
    armed = rank == 1

    def flipping(output, *args, **kwargs):
        nonlocal armed
        work = original(output, *args, **kwargs)
        if armed and output.dtype == torch.uint8 and output.numel():
            armed = False
            work.wait()
            output[0] ^= 64
        return work

    dist.all_to_all_single = flipping
    heard = {"unverified": message_of(lambda: resharder.sync(1))}
    armed = rank == 1
    heard["verified"] = message_of(lambda: resharder.sync(2, verify=True))
    heard["generate"] = message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0))
    dist.all_to_all_single = original
    resharder.sync(3, verify=True)
    want = expected(engine, values(SHAPES))
    heard["after"] = str(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
    return heard


def test_a_corrupted_byte_is_found_by_the_checksums() -> None:
    for heard in run_ranks(corrupt_body, 4):
        assert heard["unverified"] == "no error", "checksums are not free and not the default"
        assert heard["verified"].startswith(
            f"{ReshardError.__name__}: the checksum of engine tensor"
        )
        assert "on rank 1 differs from its source '" in heard["verified"]
        assert heard["generate"].startswith(StaleWeightsError.__name__)
        assert "sync to weight version 2 did not finish" in heard["generate"]
        assert heard["after"] == "True"


def lost_body(rank: int, world_size: int, how: str) -> dict:
    engine, _, resharder = build(SHAPES, 2, whole=values(SHAPES), bucket_bytes=1 << 20)
    resharder.sync(1)
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=3))
    pack = resharder._exchanges[0].pack

    class Lost(type(pack)):
        def copy(self, *tensors):
            if how == "hangs":
                time.sleep(9)
            elif how == "fails":
                raise MemoryError("no memory on this rank")
            dist.destroy_process_group()  # its connections close, as at its death

    if rank == 1:
        pack.__class__ = Lost
    started = time.monotonic()
    heard = message_of(lambda: resharder.sync(2))
    return {
        "heard": heard,
        "seconds": time.monotonic() - started,
        "generate": message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0)),
    }


@pytest.mark.parametrize("how", ["hangs", "dies", "fails"])
def test_a_rank_lost_in_the_middle_is_named(how: str) -> None:
    results = run_ranks(lost_body, 4 if how == "dies" else 2, how, timeout_s=60)
    for rank, result in enumerate(results):
        assert "sync to weight version 2 did not finish" in result["generate"]
        if rank == 1:
            continue
        told = result["heard"]
        assert told.startswith(f"{RankLostError.__name__}: rank {rank} stopped in the sync to"), (
            told
        )
        assert "version 2 while exchanging bucket 1 of" in told
        assert result["seconds"] < 12
        if how == "fails":
            assert "rank 1 failed in the sync to version 2 while packing bucket 1 of" in told
            assert "MemoryError: no memory on this rank" in told
        else:
            assert "rank 1 died or hangs" in told


def test_ranks_that_do_not_agree_all_end_at_planning() -> None:
    for rank, heard in enumerate(run_ranks(world_body, 4)):
        assert "LayoutError: ranks [2] made another reshard plan than rank 0" in heard["bucket"]
        assert heard["model"].startswith("LayoutError: "), heard["model"]
        assert "engines of ranks 2 and 3 are both TP rank 1" in heard["model"]
        assert "bucket_bytes: got 100, expected at least 4096" in heard["small bucket"]
        assert f"planned as rank {rank} of 4, now rank {rank} of 2" in heard["world"]


def test_errors_share_a_base() -> None:
    assert issubclass(RankLostError, ReshardError) and issubclass(RankLostError, dist.DistError)
    assert issubclass(LayoutError, RuntimeError)
