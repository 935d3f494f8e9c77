"""Our weight sync inside SkyRL, AReaL and NeMo RL: what is replaced, sent and refused.

The trainers' modules are recorded (`recorded_trainers.py`); ranks, messages and weights are real.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from hybridengine.integrations._patching import PatchError
from hybridengine.sync.layout import LayoutError
from tests.extras.integrations.recorded_trainers import RECORDED, record
from tests.extras.integrations.sync_worker import TIMEOUT_S, Worker, in_thread, step, trained
from tests.extras.remote.engine_commands import StoreClient, follow
from tests.ranks import Ranks, message_of, run_ranks

FACTORS = (1.25, -0.5)
ENGINES = 2


@pytest.fixture
def recorded(monkeypatch):
    """Record a package for one test."""
    before = dict(sys.modules)
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    yield record
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


# AReaL


def areal_worker_body(rank: int, world_size: int, port: int, name: str) -> None:
    worker = Worker()
    names = ("init_update_weight_group", "set_weight_meta", "update_weight_xccl")
    commands = {f"areal_{n}": getattr(worker, f"areal_{n}") for n in names}
    follow(port, 0, commands | {"wrong": worker.wrong}, name)


class Rollout:
    """AReaL's remote engine: it calls every server in a thread."""

    def __init__(self, port: int) -> None:
        self.clients = [StoreClient(port, 1, f"engine {i}") for i in range(ENGINES)]
        self.calls: list[str] = []

    def _call(self, method: str, *arguments: Any) -> None:
        for client in self.clients:
            ((succeeded, message),) = client.call(method, *arguments)
            if not succeeded:
                raise RuntimeError(message)

    def init_weights_update_group(self, meta: Any) -> Future:
        def call() -> None:
            where = meta.nccl_master_address, str(meta.nccl_master_port)
            for i, client in enumerate(self.clients):
                ((succeeded, message),) = client.call(
                    "areal_init_update_weight_group",
                    *where,
                    1 + i,
                    1 + ENGINES,
                    "gloo",
                    meta.nccl_group_name,
                )
                if not succeeded:
                    raise RuntimeError(message)

        return in_thread(call)

    def update_weights_from_distributed(self, meta: Any, param_specs: list[Any]) -> Future:
        def call() -> None:
            self._call("areal_set_weight_meta", [], [], [], meta.nccl_group_name)
            threads = [in_thread(c.call, "areal_update_weight_xccl") for c in self.clients]
            for thread in threads:
                ((succeeded, message),) = thread.result()
                if not succeeded:
                    raise RuntimeError(message)

        return in_thread(call)

    def pause_generation(self) -> None:
        self.calls.append("pause")

    def continue_generation(self) -> None:
        self.calls.append("continue")


def areal_meta(backend: str = "vllm", **sizes: int) -> SimpleNamespace:
    parallel = SimpleNamespace(dp_size=ENGINES, tp_size=1, pp_size=1, **sizes)
    return SimpleNamespace(gen_allocation=SimpleNamespace(backend=backend, parallel=parallel))


def areal_body(rank: int, world_size: int, port: int) -> dict[str, Any]:
    record("areal")
    from hybridengine.integrations import areal

    areal.patch()
    engine = sys.modules["areal.engine.fsdp_engine"].FSDPEngine()
    engine.model, engine.cpu_group = trained(), dist.new_group(backend="gloo")
    engine.config = SimpleNamespace(use_lora=False)
    engine.rollout_engine = rollout = Rollout(port) if rank == 0 else None
    meta, result = areal_meta(), {"wrong": [], "sent": []}
    init = engine._init_weight_update_from_distributed
    result["sglang"] = message_of(lambda: init(areal_meta("sglang")))
    engine.config.use_lora = rank == 1  # one rank's error is every rank's
    result["lora"] = message_of(lambda: init(meta))
    engine.config.use_lora = False
    init(meta)
    factor = 1.0
    for next_factor in FACTORS:
        step(engine.model, next_factor)
        factor *= next_factor
        engine._update_weights_from_distributed(meta)
        result["sent"].append(engine.hybridengine_report.bytes_sent)
        if rollout is not None:
            result["wrong"] += [client.call("wrong", factor) for client in rollout.clients]
    if rollout is not None:
        result["calls"] = rollout.calls
        for client in rollout.clients:
            client.call("end")
    return result


def run_with_engines(body: Callable[..., Any], worker: Callable[..., Any]) -> list[Any]:
    """Return the results of two training ranks, beside two engines of one worker each."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with (
        Ranks(worker, 1, store.port, "engine 0") as one,
        Ranks(worker, 1, store.port, "engine 1") as other,
    ):
        results = run_ranks(body, 2, store.port)
        one.results()
        other.results()
    return results


@pytest.mark.multirank
def test_areal_updates_its_servers() -> None:
    first, second = run_with_engines(areal_body, areal_worker_body)
    assert first["wrong"] == [[[]]] * ENGINES * len(FACTORS)
    assert first["calls"] == ["pause", "continue"] * len(FACTORS)
    assert all(sent > 0 for result in (first, second) for sent in result["sent"])
    for case, text in {"sglang": "got 'sglang', expected 'vllm'", "lora": "use_lora: "}.items():
        assert first[case] == second[case]
        assert first[case].startswith("LayoutError") and text in first[case]


def test_areal_starts_its_servers_with_our_backend(recorded) -> None:
    recorded("areal")
    from hybridengine.integrations import areal

    config = sys.modules["areal.api.cli_args"].vLLMConfig
    with areal.patched():
        arguments = config.build_args(None, 2, 1, port=8000)
        assert arguments == {
            "tensor_parallel_size": 2,
            "port": 8000,
            "worker_extension_cls": "hybridengine.integrations.areal_server.WorkerExtension",
            "weight_transfer_config": '{"backend": "hybridengine"}',
        }
        command = config.build_cmd_from_args(arguments)
        assert command[:3] == ["python3", "-m", "hybridengine.integrations.areal_server"]
    assert config.build_args(None, 2, 1)["worker_extension_cls"] == "theirs"


# NeMo RL

REFIT = "hybridengine.integrations.nemo_rl_refit"


def nemo_worker_body(rank: int, world_size: int, port: int, name: str, index: int) -> None:
    record("nemo_rl")
    refit = importlib.import_module(REFIT)
    refit.is_engine = lambda: True
    worker, engine = Worker(), refit.ReshardEngine(64 << 10)

    def init(metadata: list[Any]) -> None:
        engine.init_rollout_process_group(
            rollout_rank=index, train_world_size=2, rollout_world_size=ENGINES, metadata=metadata
        )

    commands = {"init": init, "receive": lambda: engine.receive(worker), "wrong": worker.wrong}
    follow(port, 0, commands, name)


def nemo_body(rank: int, world_size: int, port: int) -> dict[str, Any]:
    record("nemo_rl")
    refit = importlib.import_module(REFIT)
    mixin = sys.modules["nemo_rl.models.policy.workers.checkpoint_engine"]

    class Worker(mixin.PolicyCheckpointEngineMixin):
        model = trained()
        checkpoint_engine = refit.ReshardEngine(64 << 10, timeout_s=TIMEOUT_S)
        prepared = finalized = 0

        def _prepare_checkpoint_engine_weight_send(self) -> None:
            self.prepared += 1

        def _finalize_checkpoint_engine_weight_send(self) -> None:
            self.finalized += 1

    class DTensorWorker(Worker):
        def _checkpoint_engine_params(self) -> Any: ...

    def send(worker: Any, **options: Any) -> Any:
        return asyncio.run(worker.send_weights_via_checkpoint_engine(**options))

    engine, worker = Worker.checkpoint_engine, DTensorWorker()
    own = engine.prepare() | {"rank": rank}
    metadata: list[Any] = [None] * world_size
    dist.all_gather_object(metadata, own)
    metadata += [{"engine_world_size": 1, "rank": 0}] * ENGINES
    engine.init_policy_process_group(
        worker_rank=rank, train_world_size=2, rollout_world_size=ENGINES, metadata=metadata
    )
    clients = [StoreClient(port, 1, f"engine {i}") for i in range(ENGINES)] if rank == 0 else []
    for client in clients:
        client.call("init", metadata)
    result: dict[str, Any] = {"wrong": []}
    factor = 1.0
    for next_factor in FACTORS:
        step(worker.model, next_factor)
        factor *= next_factor
        received = [in_thread(client.call, "receive") for client in clients]
        send(worker)
        for future in received:
            future.result(TIMEOUT_S)
        result["wrong"] += [client.call("wrong", factor) for client in clients]
    for client in clients:
        client.call("end")
    result["brackets"] = worker.prepared, worker.finalized
    result["megatron"] = message_of(lambda: send(Worker()))
    result["scales"] = message_of(lambda: send(worker, kv_scales={}))
    worker.checkpoint_engine = object()
    result["another engine"] = send(worker)
    return result


@pytest.mark.multirank
def test_nemo_rl_refits_its_engines() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with (
        Ranks(nemo_worker_body, 1, store.port, "engine 0", 0) as one,
        Ranks(nemo_worker_body, 1, store.port, "engine 1", 1) as other,
    ):
        first, second = run_ranks(nemo_body, 2, store.port)
        one.results()
        other.results()
    assert first["wrong"] == [[[]]] * ENGINES * len(FACTORS)
    for result in (first, second):
        assert result["brackets"] == (len(FACTORS),) * 2
        assert "expected one of DTensor" in result["megatron"]
        assert "scales of an FP8 KV cache" in result["scales"]
        assert result["another engine"] == "theirs"


def nemo_colocated_worker_body(rank: int, world_size: int, port: int, name: str) -> None:
    record("nemo_rl")
    from vllm.distributed import parallel_state

    from hybridengine.integrations import nemo_rl_colocated

    importlib.import_module(REFIT).is_engine = lambda: True
    parallel_state.get_world_group = lambda: SimpleNamespace(cpu_group=dist.group.WORLD)
    nemo_rl_colocated.receive_in_workers()
    backend = sys.modules["nemo_rl.models.generation.vllm.vllm_backend"]

    class Extended(Worker, backend.VllmInternalWorkerExtension):
        def prepare_refit_info(self, info: dict[str, Any]) -> None:
            self.state_dict_info = info

    worker = Extended()
    commands = {
        "prepare": worker.prepare_refit_info,
        "receive": worker.update_weights_via_ipc_zmq,
        "wrong": worker.wrong,
    }
    follow(port, 0, commands, name)


def nemo_colocated_body(rank: int, world_size: int, port: int) -> dict[str, Any]:
    record("nemo_rl")
    from hybridengine.integrations.nemo_rl_colocated import SendsShards

    class Policy(SendsShards):
        model = trained()
        cpu_offload = False
        cfg: ClassVar = {"generation": {"vllm_cfg": {"tensor_parallel_size": 1}}}

    class DTensorPolicy(Policy):
        def _checkpoint_engine_params(self) -> Any: ...

    policy = DTensorPolicy()
    clients = [StoreClient(port, 1, f"engine {i}") for i in range(ENGINES)] if rank == 0 else []
    result: dict[str, Any] = {"wrong": [], "received": []}
    for client in clients:
        client.call("prepare", {"weight": "of NeMo RL's own policy"})
        result["received"] += client.call("receive")
    factor = 1.0
    for _ in range(2):  # the second one is of an engine that NeMo RL has connected again
        info = policy.prepare_refit_info()
        for client in clients:
            client.call("prepare", info)
        for next_factor in FACTORS:
            step(policy.model, next_factor)
            factor *= next_factor
            received = [in_thread(client.call, "receive") for client in clients]
            policy.stream_weights_via_ipc_zmq(buffer_size_bytes=1)
            for future in received:
                result["received"] += future.result(TIMEOUT_S)
            result["wrong"] += [client.call("wrong", factor) for client in clients]
    for client in clients:
        client.call("end")
    result["megatron"] = message_of(Policy().prepare_refit_info)
    result["scales"] = message_of(lambda: policy.stream_weights_via_ipc_zmq(0, {}))
    return result


@pytest.mark.multirank
def test_nemo_rl_refits_colocated_engines() -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    first, second = run_with_engines(nemo_colocated_body, nemo_colocated_worker_body)
    assert first["received"] == ["theirs"] * ENGINES + [True] * 4 * ENGINES
    assert first["wrong"] == [[[]]] * ENGINES * 4
    for result in (first, second):
        assert "expected one of DTensor" in result["megatron"]
        assert "scales of an FP8 KV cache" in result["scales"]


def test_a_colocated_policy_of_nemo_rl_gets_our_workers(recorded) -> None:
    recorded("nemo_rl")
    from hybridengine.integrations import nemo_rl_colocated

    driver = sys.modules["nemo_rl.models.policy.lm_policy"]
    registry = sys.modules[
        "nemo_rl.distributed.ray_actor_environment_registry"
    ].ACTOR_ENVIRONMENT_REGISTRY
    [theirs] = registry
    megatron = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
    config = {"generation": {"colocated": {"enabled": True}}}
    apart = {"generation": {"colocated": {"enabled": False}}}
    with nemo_rl_colocated.patched():
        ours = driver.resolve_policy_worker_cls(theirs, config)
        assert ours == "hybridengine.integrations.nemo_rl_colocated.DTensorPolicyWorkerV2"
        assert registry[ours] == "automodel"
        assert driver.resolve_policy_worker_cls(theirs, apart) == theirs
        assert driver.resolve_policy_worker_cls(theirs, {}) == theirs
        assert driver.resolve_policy_worker_cls(megatron, config) == megatron
        assert driver.resolve_policy_worker_cls(theirs, config | {"quant_cfg": 1}) == "quantized"
    assert driver.resolve_policy_worker_cls(theirs, config) == theirs


# SkyRL


def test_skyrl_starts_its_servers_with_our_backend(recorded) -> None:
    recorded("skyrl")
    from hybridengine.integrations import skyrl

    sync = sys.modules["skyrl.backends.skyrl_train.weight_sync"]
    with skyrl.patched():
        assert sync.get_vllm_receive_backend("nccl", True) == "hybridengine"
    assert sync.get_vllm_receive_backend("nccl", True) == "skyrl_nccl"


def test_skyrl_patches_every_process_of_the_job(recorded) -> None:
    recorded("skyrl")
    from hybridengine.integrations import skyrl

    ray = sys.modules["ray"]
    init = ray.init
    with skyrl.patched():
        sys.modules["skyrl.train.utils.utils"].initialize_ray(True)
    ((runtime_env, options),) = ray.calls
    hook = "hybridengine.integrations.skyrl.patch"
    assert runtime_env == {"env_vars": {"A": "1"}, "worker_process_setup_hook": hook}
    assert options == {"log_to_driver": True}
    assert ray.init is init


class FsdpWeightSource:
    """As SkyRL's."""

    def __init__(self, model: Any, prefix: str = "") -> None:
        self.model, self.weight_prefix = model, prefix


def test_what_skyrl_cannot_send_is_refused() -> None:
    from hybridengine.integrations.skyrl import trained_module

    def refusal(source: Any = None, dp_size: int = 1, **config: Any) -> str:
        factory = lambda dtype, backend: source or FsdpWeightSource("model")  # noqa: E731
        with pytest.raises(LayoutError) as error:
            trained_module(SimpleNamespace(**config), factory, dp_size)
        return str(error.value)

    plain = SimpleNamespace(speculative_config=None, fp8_weight_sync_mode=None)
    ngram = SimpleNamespace(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    for config in (plain, ngram):
        assert trained_module(config, lambda *_: FsdpWeightSource("model"), 1) == "model"
    assert "data_parallel_size: got 2" in refusal(dp_size=2)
    assert "draft model" in refusal(speculative_config={"method": "mtp"})
    assert "fp8_weight_sync_mode" in refusal(fp8_weight_sync_mode="blockwise")
    assert "is a SimpleNamespace, expected SkyRL's" in refusal(SimpleNamespace())
    assert "'language_model.'" in refusal(FsdpWeightSource("model", "language_model."))


# All of them


@pytest.mark.parametrize(
    ("package", "module", "before", "after"),
    [
        ("skyrl", "weight_senders", "server_urls, ", "server_urls, secret, "),
        ("areal", "fsdp_engine", "_distributed(self, meta)", "_distributed(self, meta, specs)"),
        ("areal", "cli_args", "n_nodes=1", "n_nodes=2"),
        ("nemo_rl", "checkpoint_engine", "kv_scales=None", "scales=None"),
    ],
)
def test_another_signature_is_refused(recorded, package, module, before, after) -> None:
    source = next(
        s for n, s in RECORDED[package].items() if n.endswith(f".{module}") and before in s
    )
    recorded(package, **{module: source.replace(before, after)})
    name = REFIT if package == "nemo_rl" else f"hybridengine.integrations.{package}"
    with pytest.raises(PatchError, match="expected a signature whose calls fit"):
        importlib.import_module(name).patch()
