"""The checkpoint engine against stand-ins of verl's registry, of its engine and of the reshard."""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hybridengine.sync.layout import LayoutError

MODULE = "hybridengine.integrations.verl.checkpoint_engine"


@pytest.fixture
def backend(monkeypatch):
    """Our module, imported over a stand-in of verl's `checkpoint_engine.base`."""
    base = ModuleType("verl.checkpoint_engine.base")
    registered = {}

    class Registry:
        @staticmethod
        def register(name):
            return lambda cls: registered.setdefault(name, cls)

    base.CheckpointEngine, base.CheckpointEngineRegistry = object, Registry
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    assert registered == {"hybridengine": module.ReshardCheckpointEngine}
    yield module
    sys.modules.pop(MODULE, None)


def _never():
    raise AssertionError("verl's full tensors were read")
    yield


def test_send_weights_reshards_without_reading_the_full_tensors(backend, monkeypatch):
    calls = []

    def reshard(model, llm):
        calls.append((model, llm))
        return SimpleNamespace(milliseconds=3.0, bytes_received=2 << 20, bytes_sent=1 << 20)

    monkeypatch.setattr(backend, "reshard", reshard)
    engine = backend.ReshardCheckpointEngine(bucket_size=1, is_master=True)
    engine.attach(SimpleNamespace(module="model"), "llm")
    metrics = asyncio.run(engine.send_weights(_never(), global_steps=1))
    assert calls == [("model", "llm")]
    assert metrics == {
        "update_weights/milliseconds": 3.0,
        "update_weights/mib_received": 2.0,
        "update_weights/mib_sent": 1.0,
    }


def test_an_engine_is_required(backend):
    engine = backend.ReshardCheckpointEngine(bucket_size=1)
    with pytest.raises(LayoutError, match="has no vLLM engine: for verl's servers set VERL_USE"):
        asyncio.run(engine.send_weights(_never()))


def test_trainers_learn_the_servers_of_all_replicas(backend):
    def worker(server, address="10.0.0.1"):
        return {"server": server, "address": address}

    def topology(*workers):
        return backend.ReshardCheckpointEngine.build_topology(
            2, len(workers), [worker(None), worker(None), *workers]
        )

    actors, rollouts = topology(worker("vllm_server_0_0"), worker("vllm_server_0_0"))
    assert actors == {"servers": [["vllm_server_0_0"]] * 2, "address": ["127.0.0.1"] * 2}
    assert rollouts == {"servers": [[], []], "address": ["", ""]}
    actors, _ = topology(worker("vllm_server_0_0"), worker("vllm_server_1_0", "10.0.0.2"))
    assert actors["servers"][0] == ["vllm_server_0_0", "vllm_server_1_0"]
    assert actors["address"] == ["10.0.0.1"] * 2
    with pytest.raises(LayoutError, match="does not know its vLLM server"):
        topology(worker(None))
