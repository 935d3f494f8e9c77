"""Delta syncs: the bits of a dense sync, the bytes of what changed, and chains that break."""

from __future__ import annotations

import itertools
import math
from functools import partial
from unittest import mock

import pytest
import torch

from hybridengine.engine.interface import SamplingSpec
from hybridengine.remote.sync import delta as group_module
from hybridengine.remote.sync.changes import ChangeFinder
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import local_shard
from tests.ranks import message_of, run_ranks
from tests.sync.memory_engine import (
    Shapes,
    build,
    expected,
    mesh_of,
    shapes_of,
    shards_of,
    values,
)
from tests.sync.training import train

SHAPES = shapes_of(
    column={"q": (240, 10), "gate": (400, 10)},
    row={"out": (110, 16)},
    replicated={"norm": (13, 30), "short": (3, 5), "one": (1, 2)},
)
COMPUTED: Shapes = {**SHAPES, "computed": ("replicated", (6, 4))}


STEPS = (1.0, 0.02, 0.02, 0.0, 0.2, 0.9, 0.01)  # shares of elements that change before each sync


def steps_body(rank: int, world_size: int, tp_size: int, cases: list[dict]) -> list[dict]:
    results = []
    for case in cases:
        shapes = COMPUTED if "by_loader" in case else SHAPES
        full = values(shapes)
        engine, shards, resharder = build(shapes, tp_size, full=full, delta="on", **case)
        mesh = mesh_of(world_size, case.get("replicas", 1))
        right, reports = [], []
        for version, share in enumerate(STEPS, 1):
            full = train(full, share, version)
            new = shards_of(shapes, full, mesh, case.get("rows_on_dim1", True))
            for name, tensor in shards.items():
                local_shard(tensor).copy_(local_shard(new[name]))
            reports.append(resharder.sync(version, verify=version == 3))
            want = expected(engine, full)
            right.append(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
        results.append(
            {
                "right": right,
                "delta": [r.delta for r in reports],
                "changed": [r.changed for r in reports],
                "received": [r.bytes_received for r in reports],
                "vs_dense": [r.metrics.get("reshard/bytes_vs_dense", 1) for r in reports],
                "bound": resharder.plan.lower_bound[rank],
            }
        )
    return results


CASES = [
    {},
    {"transport": "all-to-all", "bucket_bytes": 1 << 20},
    {"rows_on_dim1": False},
    {"replicas": 2},
    {"by_loader": ("computed",)},
]


@pytest.mark.multirank
@pytest.mark.parametrize(("world_size", "tp_size"), [(4, 2), (2, 2)])
def test_several_steps_in_a_row_equal_dense_syncs(world_size: int, tp_size: int) -> None:
    """Uneven and empty shards, Shard(1), HSDP, fallback."""
    cases = CASES if world_size > 2 else CASES[:1]
    ranks = run_ranks(steps_body, world_size, tp_size, [dict(c) for c in cases], timeout_s=400)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        for result in results:
            assert result["right"] == [True] * len(STEPS), case
            wanted = [False, True, True, True, True, False, True]
            assert result["delta"] == wanted, case
            assert result["changed"] == results[0]["changed"], "the same on all ranks"
            shares = zip(result["changed"], STEPS, wanted, strict=True)
            assert all(c == pytest.approx(s, abs=0.01) for c, s, d in shares if d)
            gathered = result["bound"] * ("by_loader" not in case)
            assert not gathered or result["received"][0] == gathered
            assert result["received"][3] <= result["received"][2]
            assert "by_loader" in case or result["vs_dense"][0] == 1


def rank_body(rank: int, world_size: int) -> dict:
    """Bytes of a delta of a larger model, against the entropy of what rank 1 receives."""
    shapes: Shapes = {f"r{i}": ("replicated", (512, 512)) for i in range(6)}
    shapes = {**shapes, "q": ("column", (4, 512))}
    full = values(shapes)
    engine, shards, resharder = build(shapes, 2, full=full, bucket_bytes=1 << 20, delta="on")
    resharder.sync(1)
    full = train(full, 0.01, 1)
    new = shards_of(shapes, full, mesh_of(world_size, 1))
    before = {n: t.clone() for n, t in engine.tensors.items()}
    for name, tensor in shards.items():
        local_shard(tensor).copy_(local_shard(new[name]))
    report = resharder.sync(2)
    assert all(torch.equal(engine.tensors[n], t) for n, t in expected(engine, full).items())
    own = slice(256 * rank, 256 * (rank + 1))
    differ = {n: engine.tensors[n] != before[n] for n in engine.tensors if n != "fused"}
    count = sum(int(d.sum()) - int(d[own].sum()) for d in differ.values())
    size = resharder.plan.lower_bound[rank] // 2
    return {"received": report.bytes_received, "count": count, "size": size, "delta": report.delta}


@pytest.mark.multirank
def test_bytes_are_within_1_3_of_the_entropy() -> None:
    """log2(elements over changes), and 16 bits for each new value; headers included."""
    for result in run_ranks(rank_body, 2):
        n, k = result["size"], result["count"]
        bits = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
        assert result["delta"] and 0.008 * n < k < 0.012 * n
        assert result["received"] <= 1.3 * (bits + 16 * k) / 8


def damaging(damage) -> mock._patch:
    """Change the messages that this rank sends, as they arrive elsewhere, while it is active."""
    encode = group_module.encode

    def damaged(*arguments):
        headers, messages = encode(*arguments)
        ends = itertools.accumulate(h.num_bytes for h in headers)
        return [
            damage(h, messages[end - h.num_bytes : end]) if h.num_changes else h
            for h, end in zip(headers, ends, strict=True)
        ], messages

    return mock.patch.object(group_module, "encode", damaged)


def flip(header, message):
    message[len(message) // 2] ^= 4
    return header


DAMAGE = {
    "bytes": flip,
    "base": lambda h, m: h._replace(base=h.base - 1),
    "count": lambda h, m: h._replace(num_changes=h.num_changes - 1, gap_bytes=h.gap_bytes + 2),
}


def damaged_body(rank: int, world_size: int) -> dict[str, list]:
    full = values(SHAPES)
    engine, shards, resharder = build(SHAPES, 2, full=full, rows_on_dim1=False, delta="on")
    results: dict[str, list] = {}
    version = 1
    resharder.sync(version)
    for what, damage in DAMAGE.items():
        for tensor in shards.values():
            local_shard(tensor).view(-1)[::50] += 1.0
        message = ""
        with damaging(damage if rank == 0 else lambda header, message: header):
            message = message_of(partial(resharder.sync, version + 1))
        results[what] = [
            message,
            message_of(lambda: engine.generate([[1]], SamplingSpec(), seed=0)),
            engine.weight_version == version,
        ]
        version += 2
        results[what].append(resharder.sync(version, verify=True).delta)
        for tensor in shards.values():
            local_shard(tensor).view(-1)[::40] += 1.0
        version += 1
        results[what].append(resharder.sync(version, verify=True).delta)
    return results


@pytest.mark.multirank
def test_a_damaged_delta_is_never_generated_from() -> None:
    texts = {
        "bytes": "from rank 0 was not applied: its checksum differs",
        "base": "from rank 0 was not applied: it leads from version",
        "count": "from rank 0 was not applied: decode_gaps: the bytes do not give",
    }
    for results in run_ranks(damaged_body, 2):
        for what, text in texts.items():
            message, generate, kept, after, later = results[what]
            assert message.startswith("ReshardError: on rank 1: the delta "), message
            assert text in message
            assert generate.startswith("StaleWeightsError") and kept
            assert (after, later) == (False, True), "a dense sync, then deltas again"


@pytest.fixture
def world_of_one():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def step(shards: dict[str, torch.Tensor]) -> None:
    for tensor in shards.values():
        local_shard(tensor).view(-1)[::30] += 1.0


def assert_synced(engine, shards) -> None:
    full = {name: local_shard(t) for name, t in shards.items()}
    for name, tensor in expected(engine, full).items():
        assert torch.equal(engine.tensors[name], tensor), name


@pytest.mark.usefixtures("world_of_one")
def test_what_breaks_the_chain() -> None:
    engine, shards, resharder = build(SHAPES, 1, full=values(SHAPES), delta="on")
    other = Resharder(lambda: shards, engine, 4096)

    def sync(version: int) -> bool:
        report = resharder.sync(version)
        assert_synced(engine, shards)
        return report.delta

    assert not sync(1), "a new engine"
    step(shards)
    assert sync(2)
    step(shards)
    engine.discarded = True
    for tensor in engine.tensors.values():
        tensor.fill_(7)
    assert not sync(3)
    step(shards)
    other.sync(3)  # the same version, from another resharder
    step(shards)
    assert not sync(4)
    assert sync(4), "the version may stay"
    step(shards)
    with mock.patch.object(engine, "finish_update", side_effect=RuntimeError("cache")):
        assert "cache" in message_of(lambda: resharder.sync(5))
    step(shards)
    assert not sync(6)
    step(shards)
    with mock.patch.object(engine, "check_ready", side_effect=LayoutError("running")):
        assert "running" in message_of(lambda: resharder.sync(7))
    step(shards)
    assert sync(7), "nothing had moved: the version before is still complete"


@pytest.mark.usefixtures("world_of_one")
def test_auto_pauses_where_too_much_changes() -> None:
    """After a comparison that found too much, 4 syncs compare nothing; after the next one, 8."""
    full = values(SHAPES)
    engine, shards, resharder = build(SHAPES, 1, full=full, delta="on")
    options = resharder.plan, 0, resharder.trained, resharder.guard
    assert resharder.deltas is not None
    resharder.deltas.finder = ChangeFinder(*options, max_changed=0.05, pauses=True)

    def sync(share: float) -> tuple[bool, bool]:
        """Train, sync, and tell whether it was a delta, and whether the change is known."""
        nonlocal full
        full = train(full, share, next(seeds))
        for name, tensor in shards.items():
            local_shard(tensor).copy_(full[name])
        report = resharder.sync()
        assert_synced(engine, shards)
        return report.delta, report.changed is not None

    seeds = itertools.count(1)
    delta, dense, compared = (True, True), (False, False), (False, True)
    shares = [0.5, 0.01, 0.2] + [0.01] * 5 + [0.2] + [0.01] * 10 + [0.2] + [0.01] * 5
    expected_syncs = [dense, delta, compared, *[dense] * 5, compared, *[dense] * 9, delta]
    expected_syncs += [compared, *[dense] * 5]
    assert [sync(share) for share in shares] == expected_syncs


def auto_body(rank: int, world_size: int, transport: str) -> list[tuple[bool, bool]]:
    """Return of three syncs whether they were deltas, and whether the changes are known."""
    full = values(SHAPES)
    engine, shards, resharder = build(SHAPES, 1, full=full, transport=transport, delta="auto")
    reports = []
    for version in range(3):
        full = train(full, 0.02, version)
        for name, tensor in shards_of(SHAPES, full, mesh_of(world_size, 1)).items():
            local_shard(shards[name]).copy_(local_shard(tensor))
        reports.append(resharder.sync(version))
        assert all(torch.equal(engine.tensors[n], t) for n, t in expected(engine, full).items())
    return [(report.delta, report.changed is not None) for report in reports]


@pytest.mark.multirank
@pytest.mark.parametrize("transport", ["pull", "all-to-all"])
def test_auto_sends_changes_where_weights_travel(transport: str) -> None:
    deltas = [transport == "all-to-all"] * 2
    for syncs in run_ranks(auto_body, 2, transport):
        assert syncs == [(False, False), *((delta, delta) for delta in deltas)]


@pytest.mark.usefixtures("world_of_one")
def test_modes() -> None:
    full = values(SHAPES)
    engine, shards, _ = build(SHAPES, 1, full=full)

    def deltas(**options) -> list[bool]:
        resharder = Resharder(lambda: shards, engine, 4096, **options)
        reports = []
        for version in range(3):
            step(shards)
            reports.append(resharder.sync(version))
            assert_synced(engine, shards)
        assert all((r.changed is None) == (not r.delta) for r in reports)
        return [report.delta for report in reports]

    assert deltas() == deltas(delta="off") == [False] * 3, "auto: nothing travels"
    assert deltas(delta="on") == [False, True, True]
    engine.discards_weights = True
    assert deltas(delta="on") == [False] * 3
    with pytest.raises(ValueError, match="delta: got 'yes', expected one of"):
        Resharder(lambda: shards, engine, delta="yes")  # type: ignore[arg-type]


@pytest.mark.usefixtures("world_of_one")
def test_merged_adapters_are_compared_after_the_merge() -> None:
    full = values(SHAPES)
    engine, shards, _ = build(SHAPES, 1, full=full)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(s, generator=generator) for s in ((240, 2), (2, 10)))
    adapters = {"q": Adapter(left, right, 0.5)}
    resharder = Resharder(lambda: shards, engine, 4096, lambda: adapters, delta="on")
    assert sum(bucket.merged for bucket in resharder.plan.buckets) > 1, "merged in several parts"
    for version in range(1, 5):
        if version == 4:
            local_shard(shards["norm"]).mul_(2)  # the frozen base: all is sent again
        report = resharder.sync(version)
        merged = (full["q"].double() + 0.5 * left.double() @ right.double()).float()
        norm = {"norm": local_shard(shards["norm"])}
        for name, tensor in expected(engine, full | {"q": merged} | norm).items():
            assert torch.equal(engine.tensors[name], tensor), name
        assert report.delta == (version in (2, 3))
        left[5:15] += 0.01


@pytest.mark.usefixtures("world_of_one")
def test_updates_of_an_optimizer_are_sent() -> None:
    """Several between two syncs, and a write by anyone else."""
    from hybridengine.model.optim import Optimizer

    full = values(SHAPES)
    engine, _, _ = build(SHAPES, 1, full=full)
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(t) for n, t in full.items()})
    optimizer = Optimizer(model, lr=1e-4, total_steps=9)
    resharder = Resharder(lambda: dict(model.items()), engine, 4096, delta="on")
    deltas = []
    for version, updates in enumerate((1, 1, 2, 0, 1, 1)):
        for _ in range(updates):
            for p in model.values():
                p.grad = torch.randn_like(p)
            optimizer.step(1.0)
        if version == 4:
            with torch.no_grad():
                model["norm"].mul_(2)
        report = resharder.sync(version)
        deltas.append(report.delta)
        assert_synced(engine, {name: p.detach() for name, p in model.items()})
        assert not report.delta or report.changed < 0.1
        assert (report.changed == 0) == (updates == 0)
    assert deltas == [False, True, True, True, True, True]
    assert report.metrics.keys() == {
        "reshard/bytes_received",
        "reshard/bytes_sent",
        "reshard/ms",
        "reshard/delta",
        "reshard/changed",
    }
