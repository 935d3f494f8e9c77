"""The weight sync of verl's servers, against the classes of the installed verl that it extends.

verl itself runs in tests/tools/test_trainers.py, in an environment with Ray. The process of these
tests ends with them: its Ray is empty.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras.integrations.verl_services import empty_services
from tests.ranks import message_of, run_ranks

pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
pytest.importorskip(
    "benchmarks._verl", reason="pip install --no-deps verl==0.9.1", exc_type=ImportError
)
pytestmark = pytest.mark.multirank


def import_over_verl(folder: Path) -> None:
    """Import our rollout over verl's own modules, whose services (Ray, …) are empty.

    folder: gets the metadata of a distribution `vllm`, which verl looks up.
    """
    info = folder / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    sys.path.insert(0, str(folder))
    with empty_services():
        import hybridengine.integrations.verl.rollout
        import hybridengine.integrations.verl.sync  # noqa: F401


def registered() -> dict[str, Any]:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    return {
        "rollout": get_rollout_class("vllm").__module__,
        "other rollout": get_rollout_replica_class("vllm").__module__,
        "backend": CheckpointEngineRegistry.get("hybridengine").__module__,
        "secret": len(os.environ["HYBRIDENGINE_SECRET"]),
    }


def test_the_entries_of_verls_registries_are_ours(found):
    prefix = "hybridengine.integrations.verl"
    assert found["registered"] == {
        "rollout": f"{prefix}.rollout",
        "other rollout": f"{prefix}.rollout",
        "backend": f"{prefix}.checkpoint_engine",
        "secret": 64,
    }


def other_release() -> str:
    """Return the message for a verl of another signature."""
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    from hybridengine.integrations.verl.rollout import OVERRIDDEN

    vars(vllm_rollout)["ServerAdapter"].update_weights = lambda self, weights, buckets: None
    return message_of(lambda: OVERRIDDEN.check("overridden"))


def test_another_signature_of_verl_is_refused(found):
    message = found["other_release"]
    assert "vllm_rollout.ServerAdapter.update_weights of verl" in message
    assert "found (self, weights, buckets)" in message


def refusals() -> dict[str, str]:
    from hybridengine.integrations.verl.rollout import ServerAdapter, check_supported

    def send(weights: Any) -> str:
        adapter = ServerAdapter.__new__(ServerAdapter)
        adapter.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="naive"))
        return message_of(lambda: asyncio.run(adapter.update_weights(weights)))

    rollout: dict[str, Any] = {
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "quantization": None,
        "qat": {},
        "mtp": None,
        "disaggregation": SimpleNamespace(enabled=False),
    }
    model: dict[str, Any] = {"lora_rank": 0, "lora": {}}

    def message(rollout_options: dict[str, Any], model_options: dict[str, Any]) -> str:
        options = SimpleNamespace(**rollout | rollout_options)
        trained = SimpleNamespace(**model | model_options)
        return message_of(lambda: check_supported(options, trained))

    return {
        "nothing": message({}, {}),
        "merged adapters": message({}, {"lora_rank": 8, "lora": {"merge": True}}),
        "lora.merge=True": message({}, {"lora_rank": 8}),
        "actor.strategy=fsdp2": send(iter([])),
        "data_parallel_size": message({"data_parallel_size": 2}, {}),
        "quantization": message({"quantization": "fp8"}, {}),
        "qat.enable": message({"qat": {"enable": True}}, {}),
        "mtp.enable_rollout": message(
            {"mtp": SimpleNamespace(enable=True, enable_rollout=True)}, {}
        ),
        "disaggregation.enabled": message({"disaggregation": SimpleNamespace(enabled=True)}, {}),
    }


def test_what_is_not_supported_is_named(found):
    messages = found["refusals"]
    assert messages.pop("nothing") == messages.pop("merged adapters") == "no error"
    for option, message in messages.items():
        assert option in message


def weights() -> dict[str, Any]:
    from verl.utils import fsdp_utils

    from hybridengine.integrations.verl.weights import ShardedWeights

    calls: list[str] = []
    versions = {"two": 2, "one": 1}
    fsdp_utils.fsdp_version = versions.get
    fsdp_utils.load_fsdp_model_to_gpu = lambda module: calls.append(f"load {module}")
    fsdp_utils.offload_fsdp_model_to_cpu = lambda module: calls.append(f"offload {module}")

    def use(module: str, offload: bool = False, policy: bool = False) -> str:
        engine = SimpleNamespace(
            module=module, _is_offload_param=offload, _uses_fsdp2_cpu_offload_policy=policy
        )

        def read() -> None:
            with ShardedWeights(engine, lambda: iter([("a", None)])).module() as found:
                calls.append(f"read {found}")

        return message_of(read)

    return {
        "plain": use("two"),
        "offloaded": use("two", offload=True),
        "one": use("one"),
        "policy": use("two", policy=True),
        "calls": calls,
        "gathered": list(ShardedWeights(None, lambda: iter([("a", None)]))),
    }


def test_shards_are_on_the_device_while_they_are_read(found):
    found = found["weights"]
    assert found["plain"] == found["offloaded"] == "no error"
    assert found["calls"] == ["read two", "load two", "read two", "offload two"]
    assert "actor.strategy=fsdp2" in found["one"] and "param_offload=True" in found["policy"]
    assert found["gathered"] == [("a", None)]


def body(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    os.environ.pop("HYBRIDENGINE_SECRET", None)
    import_over_verl(Path(folder))
    calls = registered, refusals, weights, other_release  # the last one changes verl
    return {call.__name__: call() for call in calls}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [found] = run_ranks(body, 1, str(tmp_path_factory.mktemp("metadata")))
    return found
