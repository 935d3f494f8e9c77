"""Real gloo ranks: bytes at the collective, bounded memory, overlap, no planning in a sync."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from contextlib import nullcontext
from glob import glob
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.kernels.strided_copy import CopyTable
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.transport import HostMemory, Pull
from tests.ranks import run_ranks
from tests.sync.memory_engine import Shapes, build, expected, shapes_of, values

pytestmark = pytest.mark.multirank

# Rows that divide by nothing, fewer rows than ranks (zero-size shards), a row-parallel weight.
UNEVEN = shapes_of(
    column={"q": (24, 10), "gate": (40, 10)},
    row={"out": (11, 16)},
    replicated={"norm": (13, 3), "short": (3, 5), "one": (1, 2)},
)


class Counted:
    """Bytes that arrive from other ranks while it is active: what `all_to_all_single` returns and
    what a pull reads of the memory of other ranks."""

    def __init__(self, resharder) -> None:
        self.pulls = [e.unpack for e in resharder.mover.exchanges]
        self.pulls *= isinstance(resharder.transport, Pull)

    def __enter__(self):
        self.original, self.received, self.copy = dist.all_to_all_single, 0, CopyTable.copy
        dist.all_to_all_single = self.count
        CopyTable.copy = lambda *args: self.count_pull(*args)
        return self

    def __exit__(self, *error):
        dist.all_to_all_single, CopyTable.copy = self.original, self.copy

    def count_pull(self, table, sources, destinations):
        """Count bytes that change an engine when the send buffers of the other ranks change."""
        self.copy(table, sources, destinations)
        if table not in self.pulls:
            return
        own = sources[dist.get_rank()]
        images = []
        for value in (1, 2):
            targets = [torch.zeros_like(t) for t in destinations]
            filled = [own if s is own else torch.full_like(s, value) for s in sources]
            self.copy(table, filled, targets)
            images.append(targets)
        for a, b in zip(*images, strict=True):
            self.received += int((a != b).sum()) * a.element_size()

    def count(self, output, tensor, output_splits, input_splits, **kwargs):
        own = output_splits[dist.get_rank()] * output.element_size()
        self.received += output.nbytes - own
        return self.original(output, tensor, output_splits, input_splits, **kwargs)


def exact_body(
    rank: int, world_size: int, tp_size: int, device: str, cases: list[dict]
) -> list[dict]:
    results = []
    for case in cases:
        dtype = case.pop("dtype", torch.float32)
        full = values(UNEVEN, dtype)
        engine, shards, resharder = build(UNEVEN, tp_size, full=full, device=device, **case)
        result = {"received": [], "right": []}
        for version, factor in ((1, 1.0), (2, -3.0)):
            for tensor in shards.values():
                tensor.to_local().mul_(factor)
            full = {n: t * factor for n, t in full.items()}
            with Counted(resharder) as counted:
                report = resharder.sync(version, verify=version == 2)
            if version == 1:  # what the checksums cost is no part of it
                assert counted.received == report.bytes_received
            result["received"].append(report.bytes_received)
            want = expected(engine, full)
            result["right"].append(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
        plan = resharder.plan
        result |= {
            "bound": plan.lower_bound[rank],
            "needed": plan.bytes_needed[rank],
            "buckets": len(plan.buckets),
        }
        results.append(result)
    return results


@pytest.mark.parametrize(
    ("world_size", "tp_size", "device"),
    [
        *((*sizes, "cpu") for sizes in ((2, 2), (4, 2), (8, 4))),
        *(pytest.param(*sizes, "cpu", marks=pytest.mark.exhaustive) for sizes in ((4, 4), (8, 2))),
        pytest.param(2, 2, "cuda", marks=pytest.mark.gpu),
        pytest.param(4, 2, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_rank_receives_what_it_lacks_and_nothing_else(
    world_size: int, tp_size: int, device: str
) -> None:
    cases = [{}, {"rows_on_dim1": False}, {"dtype": torch.bfloat16, "bucket_bytes": 1 << 20}]
    if world_size > 2:
        cases += [{"replicas": 2}, {"replicas": 2, "rows_on_dim1": False}]
    cases += [case | {"transport": "all-to-all"} for case in cases]
    ranks = run_ranks(
        *(exact_body, world_size, tp_size, device, cases),
        timeout_s=400,
        env={"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},  # ranks that share one GPU
        device=device,
    )
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        for result in results:
            assert result["right"] == [True, True], case
            assert result["received"] == [result["bound"]] * 2, "ratio to the lower bound is not 1"
            assert result["received"][0] < result["needed"]
        assert any(result["bound"] for result in results)
        # Rows of every rank lie inside its own engine slice: what remains is replication.
        full = sum(t.numel() for t in values(UNEVEN).values())
        assert all(r["bound"] < 2 * full for r in results)


def nodes_body(rank: int, world_size: int) -> tuple[bool, list[int], int]:
    full = values(UNEVEN)
    engine, _, resharder = build(UNEVEN, 2, full=full, replicas=2)
    resharder.sync(1, verify=True)
    right = all(torch.equal(engine.tensors[n], t) for n, t in expected(engine, full).items())
    return right, resharder.plan.bytes_crossing, max(resharder.plan.bytes_received)


def test_a_replica_in_each_node_sends_to_its_node() -> None:
    """Two nodes of two ranks, as LOCAL_WORLD_SIZE tells every rank."""
    for right, crossing, received in run_ranks(nodes_body, 4, env={"LOCAL_WORLD_SIZE": "2"}):
        assert right and received > 0
        assert crossing == [0] * 4


# At TP 2 on 2 ranks the columns stay where they are; what is replicated has to travel.
BIG: Shapes = {
    **{f"c{i}": ("column", (1024, 512)) for i in range(4)},
    **{f"r{i}": ("replicated", (1024, 512)) for i in range(16)},
}
COMPUTED: Shapes = {**BIG, "computed": ("replicated", (1024, 512))}


def allocator_peak(call) -> int:
    """The most bytes that torch's CPU allocator had given out beyond what it began with."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


MEMORY_CASES = [(256 << 10, "all-to-all"), (1 << 20, "all-to-all"), (1 << 20, "pull")]


def memory_body(rank: int, world_size: int) -> dict:
    peaks = {}
    for size, transport in MEMORY_CASES:
        full = values(BIG)
        _, shards, resharder = build(BIG, 2, full=full, bucket_bytes=size, transport=transport)
        shard_bytes = sum(t.to_local().nbytes for t in shards.values())
        resharder.sync(1, verify=True)
        peaks[size, transport] = {
            "shared": resharder.transport.memory.buffers[0].nbytes if transport == "pull" else 0,
            "allocator": allocator_peak(lambda r=resharder: r.sync(2)),
            "verified": allocator_peak(lambda r=resharder: r.sync(3, verify=True)),
            "staged": resharder.plan.staging_bytes,
            "buckets": len(resharder.plan.buckets),
            "shards": shard_bytes,
        }
    full = values(COMPUTED)
    _, _, resharder = build(
        COMPUTED,
        2,
        full=full,
        bucket_bytes=256 << 10,
        by_loader=("computed",),
        transport="all-to-all",
    )
    resharder.sync(1)
    peaks["fallback"] = allocator_peak(lambda: resharder.sync(2))
    return peaks


SMALL_CHANGE = 1 << 12  # a barrier's and an agreement's tensors
CHECKSUM = 8 << 20  # int64 intermediates of one chunk of 2^18 elements


def test_peak_memory_is_two_buckets() -> None:
    for peaks in run_ranks(memory_body, 2, timeout_s=400):
        for size, transport in MEMORY_CASES:
            peak = peaks[size, transport]
            assert peak["shards"] > 15 * size and peak["buckets"] > 4, "no test of a bound"
            if transport == "pull":
                assert peak["allocator"] <= SMALL_CHANGE and peak["verified"] <= CHECKSUM
                assert 0.8 * size < peak["shared"] <= 2 * size
            else:
                assert 1.5 * size < peak["allocator"] <= 2 * size + SMALL_CHANGE
                assert peak["verified"] <= 2 * size + CHECKSUM
            assert peak["staged"] <= size
        size, full = 256 << 10, 1024 * 512 * 4  # the declared exception: one gathered parameter
        assert 2 * size < full <= peaks["fallback"] <= 2 * full + 2 * size + SMALL_CHANGE


def overlap_body(rank: int, world_size: int) -> dict:
    from hybridengine.sync.transport import AllToAll

    _, _, resharder = build(BIG, 2, full=values(BIG), bucket_bytes=1 << 20, transport="all-to-all")
    log: list[str] = []
    waits: list[bool] = []
    start, copy = AllToAll.post_bucket, CopyTable.copy
    names = {}
    for i, e in enumerate(resharder.mover.exchanges):
        names |= {id(e.pack): f"pack {i}", id(e.unpack): f"unpack {i}"}

    def noted_start(transport, where, exchange, pack):
        i = resharder.mover.exchanges.index(exchange)
        pending = start(transport, where, exchange, pack)
        log.append(f"send {i}")
        wait = pending.wait
        _, work, _ = wait.args  # of `AllToAll._wait`

        def noted_wait():
            deadline = time.monotonic() + 60
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.001)  # nobody waits for it
            waits.append(work.is_completed())
            log.append(f"wait {i}")
            return wait()

        pending.wait = noted_wait
        return pending

    def noted_copy(table, sources, destinations):
        if len(table):
            log.append(names[id(table)])
        copy(table, sources, destinations)

    AllToAll.post_bucket, CopyTable.copy = noted_start, noted_copy
    resharder.sync(1)
    return {
        "log": log,
        "crossed_before_wait": waits,
        "buckets": len(resharder.mover.exchanges),
    }


def test_packing_sending_and_unpacking_overlap() -> None:
    for result in run_ranks(overlap_body, 2):
        log, buckets = result["log"], result["buckets"]
        assert buckets > 4
        for way in ("pack", "send", "wait", "unpack"):
            assert [e for e in log if e.startswith(way)] == [f"{way} {k}" for k in range(buckets)]
        for k in range(1, buckets - 1):  # bucket k is on its way from send to wait
            travelling = log[log.index(f"send {k}") : log.index(f"wait {k}")]
            assert {f"unpack {k - 1}", f"pack {k + 1}", f"send {k + 1}"} <= set(travelling)
        assert all(result["crossed_before_wait"]), "gloo moved nothing until it was waited for"


def unshared_body(rank: int, world_size: int) -> dict:
    """Rank 1 cannot map the memory of the others."""
    full = values(UNEVEN)
    engine, shards, _ = build(UNEVEN, 2, full=full)
    fails = mock.patch.object(HostMemory, "map", side_effect=OSError("no /proc"))
    with fails if rank == 1 else nullcontext(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resharder = Resharder(lambda: shards, engine, 4096)
    resharder.sync(1, verify=True)
    files = [os.readlink(entry) for entry in glob("/proc/self/fd/*") if os.path.islink(entry)]
    return {
        "pulls": isinstance(resharder.transport, Pull),
        "right": all(torch.equal(engine.tensors[n], t) for n, t in expected(engine, full).items()),
        "warnings": [str(w.message) for w in caught],
        "open": [name for name in files if "memfd:hybridengine" in name],
    }


def test_ranks_that_cannot_map_each_other_use_the_all_to_all() -> None:
    for rank, result in enumerate(run_ranks(unshared_body, 2)):
        assert not result["pulls"] and result["right"]
        assert result["open"] == [], "descriptors of shared memory stayed open"
        text = "rank 1 cannot share memory with the other ranks of this machine (OSError: no /proc)"
        assert [w.partition(": weight")[0] for w in result["warnings"]] == [text] * (rank == 0)


def reuse_body(rank: int, world_size: int) -> list[bool]:
    """Ranks that pack, copy and unpack at different speeds, another in each bucket."""
    shapes = {f"r{i}": ("replicated", (64, 64)) for i in range(8)} | {"c": ("column", (8, 4))}
    engine, shards, resharder = build(shapes, 2, full=values(shapes))
    assert len(resharder.mover.exchanges) > 10
    copy, calls = CopyTable.copy, itertools.count(rank)

    def slow_copy(table, sources, destinations):
        time.sleep(0.01 * (next(calls) % world_size == 0))
        copy(table, sources, destinations)

    right = []
    with mock.patch.object(CopyTable, "copy", slow_copy):
        for version, factor in ((1, 1.0), (2, -3.0), (3, 0.5)):
            for tensor in shards.values():
                tensor.to_local().mul_(factor)
            resharder.sync(version)
            full = {n: t.full_tensor() for n, t in shards.items()}
            want = expected(engine, full)
            right.append(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
    return right


def test_a_send_buffer_is_not_reused_before_all_ranks_read_it() -> None:
    assert run_ranks(reuse_body, 4) == [[True] * 3] * 4


def planless_body(rank: int, world_size: int) -> int:
    from hybridengine.sync import planner, resharder, source_class, tables

    engine, _, made = build(UNEVEN, 2, full=values(UNEVEN))
    made.sync(1)

    def refuse(*args, **kwargs):
        raise AssertionError("a sync planned")

    for owner, names in (
        (planner, ("Planner", "ReshardPlan", "build_plan", "check_coverage")),
        (source_class, ("cut", "SourceClass")),
        (resharder, ("build_plan", "Mover", "share_memory")),
        (tables, ("ExchangeBuilder", "PullBuilder", "SendBuffer", "CopyTable")),
        (source_class.SourceClass, ("incoming", "outgoing", "count_needed", "loads")),
    ):
        for name in names:
            assert hasattr(owner, name)
            setattr(owner, name, refuse)
    for version in (2, 3):
        made.sync(version)
    return engine.weight_version


def test_a_repeated_sync_plans_nothing() -> None:
    assert run_ranks(planless_body, 2) == [3, 3]
