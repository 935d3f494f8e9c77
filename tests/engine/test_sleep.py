"""The engine's memory between generations, and a sync from replicated, offloaded shards."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines import build_engine
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

PROMPTS = [[1, 5, 9, 33, 2], [7, 8, 9, 10, 11, 12, 13], [3] * 20]


def resident_bytes(storage: torch.UntypedStorage) -> int:
    """Bytes of the full pages of `storage` that have memory."""
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), size, resident) == 0
    return sum(page & 1 for page in resident) * mmap.PAGESIZE


def discard(engine) -> None:
    """Overwrite all of the engine's weights and buffers that sleep level 2 would not keep."""
    from hybridengine.engine.vllm.sleep import Allocation, unwritten

    model = engine.model_runner.get_model()
    tensors = {
        name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    storages = {n: t.untyped_storage() for n, t in tensors.items() if t.numel()}
    allocations = {n: Allocation(s.data_ptr(), s.nbytes()) for n, s in storages.items()}
    kept = set(unwritten(allocations.values(), engine.written_in_full()))
    discarded = {name for name, allocation in allocations.items() if allocation not in kept}
    assert any("cos_sin_cache" in n for n in tensors.keys() - discarded)
    assert {n.rpartition(".")[2] for n in discarded} <= {"weight", "bias"} and len(discarded) > 10
    for name in discarded:
        tensors[name].fill_(float("nan"))
    engine.target.discarded = True


def body(rank: int, world_size: int, path: str) -> None:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import parameter_shards, sharding_mesh
    from hybridengine.model.fsdp import Offloader
    from hybridengine.sync.resharder import Resharder

    engine = build_engine("vllm", path, tensor_model_parallel_size=2)
    sliced = engine.target.layout.sliced_dims(engine.checkpoint.parameters)
    model = load_sharded(
        path,
        mesh=sharding_mesh("cpu", world_size, fsdp_size=1),
        shard_dim1=lambda name: sliced.get(name) == 1,
    )
    shards = parameter_shards(model)
    offloader = Offloader(lambda: shards.values())
    with offloader.on_device():
        resharder = Resharder(lambda: shards, engine, 1 << 20)
        full = {n: whole(p).clone() for n, p in shards.items()}

    def cache_bytes() -> int:
        storages = {c.data_ptr(): c.untyped_storage() for c in engine.model_runner.kv_caches}
        return sum(map(resident_bytes, storages.values()))

    def generate() -> list:
        spec = SamplingSpec(max_tokens=12, temperature=0.0)
        groups = engine.generate(PROMPTS, spec, seed=0)
        return [[replace(c, versions=()) for c in group] for group in groups]

    [processor] = [
        m for m in engine.model_runner.get_model().modules() if isinstance(m, LogitsProcessor)
    ]
    assert processor._apply_head.func.__module__ == "hybridengine.engine.exact.operators"
    engine.sleep()
    assert cache_bytes() == 0
    with offloader.on_device():
        resharder.sync(1, verify=True)
    assert cache_bytes() == 0, "a sync needs the weights only"
    for name, live in engine.target.weights().items():
        if name in full and live.shape == full[name].shape:
            assert torch.equal(live, full[name]), name
    first = generate()
    assert cache_bytes() > 0
    engine.sleep()
    assert cache_bytes() == 0
    assert generate() == first, "sleep lost weights, or kept a cached prefix"
    discard(engine)
    with offloader.on_device():
        resharder.sync(2)
    assert generate() == first, "a sync does not restore what sleep level 2 discards"
    engine.free_cache = False
    engine.sleep()
    assert cache_bytes() > 0


def test_sleep_frees_the_cache_and_loses_nothing(tmp_path: Path) -> None:
    run_ranks(body, 2, save_tiny("llama", tmp_path), timeout_s=500)
