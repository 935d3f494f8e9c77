"""The checkpoint engine against stand-ins of verl's registry, of its engine and of the reshard."""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

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
        return SimpleNamespace(milliseconds=3.0, bytes_received=2 << 20)

    monkeypatch.setattr(backend, "reshard", reshard)
    engine = backend.ReshardCheckpointEngine(bucket_size=1, is_master=True)
    engine.attach(SimpleNamespace(module="model"), "llm")
    metrics = asyncio.run(engine.send_weights(_never(), global_steps=1))
    assert calls == [("model", "llm")]
    assert metrics == {"update_weights/milliseconds": 3.0, "update_weights/mib_received": 2.0}
    assert engine.prepare() == {}


def test_engines_in_other_processes_are_refused(backend):
    from hybridengine.sharding.layout import LayoutError

    engine = backend.ReshardCheckpointEngine(bucket_size=1)
    with pytest.raises(LayoutError, match="no vLLM engine is attached"):
        asyncio.run(engine.send_weights(_never()))
    with pytest.raises(LayoutError, match="other processes need the backend"):
        backend.ReshardCheckpointEngine.build_topology(2, 2, [])
    with pytest.raises(LayoutError, match="other processes"):
        asyncio.run(engine.receive_weights())
