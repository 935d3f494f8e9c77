"""State between syncs, and verification: a world of one rank, no vLLM."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridengine.engine.interface import SamplingSpec
from hybridengine.remote.sync.coordinator import Coordinator
from hybridengine.remote.sync.records import SyncStore
from hybridengine.run.activity import Activity
from hybridengine.run.failures import DeviceProgress
from hybridengine.sync import buckets
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.checks import config_differences
from hybridengine.sync.layout import LayoutError, identity_layout
from hybridengine.sync.planner import build_plan
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import RowRange
from hybridengine.sync.weight_target import (
    PlanOutdatedError,
    ReshardError,
    StaleWeightsError,
    bit_checksums,
)
from tests.sync.memory_engine import Shapes, build, expected, values

SHAPES: Shapes = {
    "q": ("column", (24, 10)),
    "out": ("row", (11, 16)),
    "norm": ("replicated", (13, 3)),
}


@pytest.fixture(autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_arrived(engine, full) -> None:
    for name, tensor in expected(engine, full).items():
        assert torch.equal(engine.tensors[name], tensor), name


def test_tensors_that_are_replaced_are_read_again() -> None:
    engine, shards, resharder = build(SHAPES, 1, full=values(SHAPES))
    resharder.sync(1)
    new = values(SHAPES, seed=1)
    _, replaced, _ = build(SHAPES, 1, full=new)
    shards.update(replaced)
    resharder.sync(2, verify=True)
    assert_arrived(engine, new)
    shards["q"] = shards["q"].bfloat16()
    with pytest.raises(PlanOutdatedError, match=r"'q' changed its dtype.*connect\(\) again"):
        resharder.sync(3)
    with pytest.raises(TypeError, match="parameters: got a dict, expected a function"):
        Resharder(shards, engine)


def test_adapters_that_are_replaced_are_read_again() -> None:
    full = values(SHAPES)
    engine, shards, _ = build(SHAPES, 1, full=full)
    adapters = {}

    def train(seed: int, rank: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.randn(s, generator=generator) for s in ((24, rank), (rank, 10)))
        adapters["q"] = Adapter(left, right, 0.5)
        return (full["q"].double() + 0.5 * left.double() @ right.double()).float()

    merged = train(0)
    resharder = Resharder(lambda: shards, engine, 4096, lambda: adapters)
    resharder.sync(1)
    assert_arrived(engine, full | {"q": merged})
    merged = train(1)
    resharder.sync(2, verify=True)
    assert_arrived(engine, full | {"q": merged})
    train(2, rank=3)
    with pytest.raises(PlanOutdatedError, match=r"'q\.left' changed its shape"):
        resharder.sync(3)
    adapters.clear()
    with pytest.raises(PlanOutdatedError, match=r"'q\.left' was removed"):
        resharder.sync(3)


def test_a_sync_commits_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is behind the host: here by a number of queries."""
    engine, _, resharder = build(SHAPES, 1, full=values(SHAPES))
    seen: list[tuple[int, int | None]] = []

    class Event:
        def __init__(self) -> None:
            self.left = 3

        def query(self) -> bool:
            seen.append((self.left, engine.weight_version))
            self.left -= 1
            return self.left < 0

    stream = SimpleNamespace(record_event=Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def limit(seconds: float) -> None:
        progress = DeviceProgress(resharder.guard, torch.device("cuda"), limit_s=seconds)
        resharder.progress = resharder.transport.progress = progress

    limit(9)
    resharder.sync(1)
    assert seen == [(left, None) for left in (3, 2, 1, 0)] * (len(resharder.plan.buckets) + 1)
    assert engine.weight_version == 1
    limit(0.05)
    Event.query = lambda self: False
    with pytest.raises(dist.DistError, match=r"has not finished it after 0\.05 s"):
        resharder.sync(2)
    with pytest.raises(StaleWeightsError, match="sync to weight version 2 did not finish"):
        engine.generate([[1]], SamplingSpec(), seed=0)
    assert engine.weight_version == 1


def test_discarded_weights_are_all_sent_again() -> None:
    """Frozen weights travel once, unless something wrote to the engine or freed its memory."""
    full = values(SHAPES)
    engine, shards, _ = build(SHAPES, 1, full=full)
    adapters = {"q": Adapter(torch.ones(24, 2), torch.ones(2, 10), 0.5)}
    resharder = Resharder(lambda: shards, engine, 4096, lambda: adapters)
    merged = full | {"q": full["q"] + 1}
    resharder.sync(1)
    with mock.patch.object(resharder.mover, "move", wraps=resharder.mover.move) as move:
        resharder.sync(2)
        engine.tensors["norm"].data.fill_(7)
        resharder.sync(3)
        assert_arrived(engine, merged)
        engine.discarded = True
        with pytest.raises(StaleWeightsError, match=r"were discarded .* Run sync\(\)"):
            engine.generate([[1]], SamplingSpec(), seed=0)
        resharder.sync(4)
    assert [call.args[1].skip_frozen for call in move.call_args_list] == [True, False, False]
    assert_arrived(engine, merged)
    assert engine.generate([[1]], SamplingSpec(), seed=0) == [[]]


def test_frozen_weights_are_read_once_per_sync_or_never() -> None:
    """Never where the engine loses its weights between syncs, so that all are sent anyway."""
    full = values(SHAPES)
    engine, shards, _ = build(SHAPES, 1, full=full)
    adapters = {"q": Adapter(torch.ones(24, 2), torch.ones(2, 10), 0.5)}
    for discards in (False, True):
        engine.discards_weights = discards
        resharder = Resharder(lambda: shards, engine, 4096, lambda: adapters)
        with mock.patch("hybridengine.sync.trainers.bit_checksums", wraps=bit_checksums) as read:
            counts = []
            for _ in range(3):
                resharder.sync()
                counts.append(sum(len(call.args[0]) > 0 for call in read.call_args_list))
        assert counts == ([0, 0, 0] if discards else [1, 2, 3])
        assert_arrived(engine, full | {"q": full["q"] + 1})


@pytest.mark.parametrize("other_fails", [False, True])
def test_frozen_weights_are_sent_again_after_another_update(other_fails: bool) -> None:
    full, of_other = values(SHAPES), values(SHAPES, seed=1)
    engine, shards, _ = build(SHAPES, 1, full=full)
    _, other_shards, _ = build(SHAPES, 1, full=of_other)
    adapters = {"q": Adapter(torch.ones(24, 2), torch.ones(2, 10), 0.5)}
    ours, other = (
        Resharder(lambda s=s: s, engine, 4096, lambda: adapters) for s in (shards, other_shards)
    )
    assert ours.sync().version == 1
    if other_fails:
        other.finish_on_device = lambda phase: 1 / 0
        with pytest.raises(ZeroDivisionError):
            other.sync()
    else:
        assert other.sync().version == 2
        assert_arrived(engine, of_other | {"q": of_other["q"] + 1})
    assert ours.sync().version == 3 - other_fails
    assert_arrived(engine, full | {"q": full["q"] + 1})
    with mock.patch.object(ours.mover, "move", wraps=ours.mover.move) as move:
        ours.sync()
    assert move.call_args.args[1].skip_frozen, "skipped: nothing else has updated the engine since"


def test_the_bucket_size_is_by_free_memory_and_the_same_on_all_ranks(monkeypatch) -> None:
    assert [buckets.bucket_bytes_of(gib << 30) >> 20 for gib in (0, 8, 12, 100)] == [
        64,
        512,
        768,
        1024,
    ]
    assert buckets.default_bucket_bytes(torch.device("cpu")) == 64 << 20
    engine, shards, _ = build(SHAPES, 1, full=values(SHAPES))
    sizes = []
    monkeypatch.setattr(
        "hybridengine.sync.trainers.all_gather_values",
        lambda value, expected: [value, (5000, 0)] * 2,
    )
    monkeypatch.setattr(
        "hybridengine.sync.resharder.build_plan",
        lambda specs, layouts, size, *_: sizes.append(size) or build_plan(specs, layouts, size),
    )
    with pytest.raises(LayoutError, match="made another reshard plan"):
        Resharder(lambda: shards, engine)
    assert sizes[-1] == 5000, "the smallest of all ranks"


def test_an_engine_that_is_not_ready_is_left_alone() -> None:
    engine, _, resharder = build(SHAPES, 1, full=values(SHAPES))
    resharder.sync(1)

    def busy() -> None:
        raise LayoutError("1 request runs")

    engine.check_ready = busy
    with pytest.raises(LayoutError, match="on rank 0: 1 request runs"):
        resharder.sync(2)
    assert engine.weight_version == 1
    assert engine.generate([[1]], SamplingSpec(), seed=0) == [[]]


def test_a_parameter_that_no_engine_reads_is_refused() -> None:
    engine, shards, _ = build(SHAPES, 1, full=values(SHAPES))
    shards["head"] = torch.ones(4, 2)
    engine.config_differences = {"text.tie_word_embeddings": "True here, False there"}
    with pytest.raises(LayoutError, match=r"nothing of .*'head'.*differ in text\.tie_word_.*here"):
        Resharder(lambda: shards, engine)
    engine.optional_parameters = {"head"}
    Resharder(lambda: shards, engine).sync(1)


def test_an_engine_that_computes_another_function_is_refused() -> None:
    engine, shards, _ = build(SHAPES, 1, full=values(SHAPES))
    engine.config_differences = config_differences({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6})
    with pytest.raises(LayoutError, match=r"another function.*rms_norm_eps \(1e-05 in the trained"):
        Resharder(lambda: shards, engine)
    assert engine.weight_version is None


def test_a_dimension_of_size_1_has_no_stride() -> None:
    engine, _, _ = build(SHAPES, 1, full=values(SHAPES))
    one = torch.arange(4.0)
    engine.layout = identity_layout({"one": one.reshape(1, 4)})
    engine.tensors = {"one": torch.zeros(1, 4)}
    parameters = {"one": one.reshape(1, 4)}
    resharder = Resharder(lambda: parameters, engine)
    parameters["one"] = (one + 1).as_strided((1, 4), (2, 1))
    resharder.sync(verify=True)
    assert engine.tensors["one"].tolist() == [[1, 2, 3, 4]]
    parameters["one"] = torch.stack([one, one], 1)[:, 0].reshape(1, 4)
    assert parameters["one"].stride(1) == 2
    with pytest.raises(PlanOutdatedError, match="changed its local_stride"):
        resharder.sync()


def test_integers_are_refused() -> None:
    engine, shards, _ = build(SHAPES, 1, full=values(SHAPES))
    shards["norm"] = torch.ones(13, 3, dtype=torch.int8)
    with pytest.raises(LayoutError, match=r"'norm' is torch\.int8.*quantized"):
        Resharder(lambda: shards, engine)


@pytest.mark.parametrize("damage", ["as it is loaded", "afterwards"])
def test_tensors_of_the_loader_are_verified(damage: str) -> None:
    engine, _, resharder = build(SHAPES, 1, full=values(SHAPES), by_loader=("norm",))
    resharder.sync(1, verify=True)
    load, armed = engine.load_full, True

    def damaging(weights) -> None:
        nonlocal armed
        if damage == "afterwards":
            load(weights)
            engine.tensors["norm"][0, 0] += armed
        else:
            load((name, tensor + armed) for name, tensor in weights)
        armed = False

    engine.load_full = damaging
    with pytest.raises(
        ReshardError, match="engine tensor 'norm' on rank 0 differs from its source"
    ):
        resharder.sync(2, verify=True)
    resharder.sync(3, verify=True)
    assert_arrived(engine, values(SHAPES))


def test_nan_is_not_damage() -> None:
    """Payloads and signs of NaN, which casts do not keep, on both sides of the cast."""
    engine, shards, resharder = build(SHAPES, 1, full=values(SHAPES))
    bits = shards["norm"].to_local().view(torch.int32)
    bits[0], bits[1], bits[2] = 0x7F800001, -1, 0x7FC00000
    with pytest.warns(RuntimeWarning, match=r"'norm' \(and 0 more\) contains NaN"):
        resharder.sync(1, verify=True)
    assert engine.weight_version == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bits[:3] = 0
        resharder.sync(2, verify=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(0,), (3,), (64, 129), (5000, 7)])
def test_checksums_of_frozen_parameters_tell_swapped_elements(dtype, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(-50, 50, shape, generator=generator).to(dtype)
    before = bit_checksums([tensor, tensor.clone()])
    assert before[0] == before[1]
    if tensor.numel() < 2:
        return
    flat = tensor.view(-1)
    flat[0], flat[-1] = 1, 2
    once = bit_checksums([tensor])
    flat[0], flat[-1] = 2, 1
    assert bit_checksums([tensor]) != once
    odd = torch.cat([flat[:1], flat])[1:]  # an address that no 64-bit word begins at
    assert bit_checksums([odd]) == bit_checksums([flat])


@pytest.mark.timeout(120)
def test_an_engine_whose_call_has_failed_is_not_waited_for() -> None:
    activity = Activity("trainer rank 0", 0, 1)
    coordinator = Coordinator(SyncStore(dist.HashStore()), 1, ["trainer"], 600.0, activity)
    reason = "no engine is left to sync to version 1 .engine 0: its call failed"
    with pytest.warns(RuntimeWarning, match="dropped"), pytest.raises(ReshardError, match=reason):
        coordinator.open(1, {0: "its call failed"}.get)


def test_an_empty_shard_of_a_weight_with_fewer_rows_than_ranks_merges() -> None:
    adapter = Adapter(torch.ones(1, 2), torch.ones(2, 5), 1.0)
    merged = adapter.merge(torch.empty(0, 5), (1, 0), (RowRange(1, 1), RowRange(0, 5)))
    assert merged.shape == (0, 5)
