"""Trainers that drive vLLM's own trainer interface and name our backend: what the engines get."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.extras.remote.engine_commands import StoreClient, follow
from tests.extras.remote.weight_sources import (
    Changed033,
    FullSource,
    MemoryWorker,
    OnlyFull033,
    RefusingClient,
    module_of,
    source_of,
)
from tests.extras.remote.worlds import UNEVEN
from tests.ranks import Ranks, message_of, run_ranks
from tests.sync.memory_engine import mesh_of, shard, values
from tests.sync.vllm_engines import build_llm, unequal
from tests.tiny_models import save_tiny, tiny_config

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

TIMEOUT_S = 60.0
FACTORS = (1.25, -0.5, 3.0)  # before each update: the parameters are multiplied


def new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def trainer_engine(rank: int, client: Any, source: Any, **options: Any) -> Any:
    """As code that knows vLLM's factory only, but for the init info that names the backend."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from hybridengine.integrations.vllm import HybridEngineTrainerInitInfo

    info = HybridEngineTrainerInitInfo(
        "127.0.0.1", bucket_bytes=64 << 10, rank=rank, timeout_s=TIMEOUT_S, **options
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


# A vLLM engine


def vllm_body(rank: int, world_size: int, path: str, port: int) -> None:
    """One rank of an engine of `world_size` tensor-parallel ranks."""
    from transformers import AutoModelForCausalLM

    llm = build_llm(
        path, tensor_parallel_size=world_size, max_model_len=64, kv_cache_memory_bytes=64 << 20
    )
    engine = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    def compare(factor: float, dtype: str) -> list[str]:
        """Return which weights are not those that vLLM's own loader writes."""
        full = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        trained = {name: (t * factor).to(getattr(torch, dtype)) for name, t in full.items()}
        weights = {name: parameter.data for name, parameter in engine.named_parameters()}
        return unequal(weights, lambda: engine.load_weights(iter(trained.items())))

    follow(
        port,
        rank,
        {
            "init_weight_transfer_engine": lambda i: llm.init_weight_transfer_engine(
                {"init_info": i}
            ),
            "start_weight_update": llm.start_weight_update,
            "update_weights": lambda i: llm.update_weights({"update_info": i}),
            "finish_weight_update": llm.finish_weight_update,
            "version": llm.get_weight_version,
            "compare": compare,
            "num_bytes": lambda: sum(loaded_bytes(p) for p in engine.parameters()),
            "sleep": sleep,
        },
    )


def sleep(freed: list[str]) -> None:
    """Let vLLM's allocator, which needs a GPU, show memory of weights and cache, some of it freed.

    Its records are its own.
    """
    from vllm.device_allocator.cumem import AllocationData, CuMemAllocator

    CuMemAllocator.instance = SimpleNamespace(
        pointer_to_data={
            address: AllocationData((0, 512, address, 0), tag, is_asleep=tag in freed)
            for address, tag in enumerate(("weights", "kv_cache"))
        }
    )


def loaded_bytes(parameter: torch.nn.Parameter) -> int:
    """Bytes of an engine's parameter without the rows by which vLLM pads the vocabulary."""
    layer = getattr(parameter, "weight_loader", None)
    indices = getattr(getattr(layer, "__self__", None), "shard_indices", None)
    rows = parameter.shape[0] if indices is None else indices.num_org_elements
    return parameter[:rows].nbytes


def fsdp_body(rank: int, world_size: int, path: str, port: int, tp_size: int) -> dict:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    client = StoreClient(port, tp_size) if rank == 0 else None
    engine = trainer_engine(rank, client, ModuleSource(model))
    result: dict[str, Any] = {"wrong": [], "versions": [], "sent": [], "received": []}
    factor = 1.0
    for step, next_factor in enumerate(FACTORS):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(next_factor)
        factor *= next_factor
        if step == 2:
            model.to(torch.bfloat16)
        if step == 1:
            if client is not None:
                client.call("sleep", ["weights", "kv_cache"])
            result["asleep"] = message_of(engine.send_weights)
            if client is not None:
                client.call("sleep", ["kv_cache"])
        engine.send_weights()
        result["sent"].append(engine.report.bytes_sent)
        result["received"].append(engine.report.bytes_received)
        if client is not None:
            dtype = "bfloat16" if step == 2 else "float32"
            result["wrong"] += client.call("compare", factor, dtype)
            result["versions"].append(client.call("version"))
    if client is not None:
        result["num_bytes"] = client.call("num_bytes")
        client.call("end")
    engine.shutdown()
    with pytest.raises(RuntimeError, match="trainer_init again"):
        engine.send_weights()
    return result


@pytest.mark.parametrize("tp_size", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_engines_weights_are_those_of_vllms_loader(tp_size: int, tmp_path: Path) -> None:
    store, path = new_store(), save_tiny("qwen2", tmp_path)
    with Ranks(vllm_body, tp_size, path, store.port) as engine:
        first, second = run_ranks(fsdp_body, 2, path, store.port, tp_size)
        engine.results()
    assert first["wrong"] == [[]] * tp_size * len(FACTORS)
    # The second one was refused, by worker and trainers, while the weights slept.
    assert first["versions"] == [[str(v)] * tp_size for v in (1, 3, 4)]
    assert first["asleep"] == second["asleep"]
    assert "the server sleeps, so its weights have no memory" in first["asleep"]
    # All bytes of the engine leave the trainers, half of them each; nothing is gathered.
    for one, other in zip(first["sent"], second["sent"], strict=True):
        assert one + other == sum(first["num_bytes"])
        assert one > 0 and other > 0
    assert first["received"] == second["received"] == [0, 0, 0]


# Sources


def memory_body(
    rank: int, world_size: int, port: int, name: str, fail_in: int = 0, rejects: bool = False
) -> list:
    worker = MemoryWorker(name, fail_in, rejects)
    commands = {
        "init_weight_transfer_engine": worker.join,
        "start_weight_update": lambda: None,
        "update_weights": worker.update,
        "finish_weight_update": worker.labels.append,
        "wrong": worker.wrong,
    }
    follow(port, 0, commands, name)
    return worker.labels


def source_body(
    rank: int, world_size: int, port: int, kind: str, replicas: int, num_engines: int
) -> dict:
    mesh = mesh_of(world_size, replicas)
    shards = {
        name: shard(tensor, mesh, int(UNEVEN[name][0] == "row"))
        for name, tensor in values(UNEVEN).items()
    }
    clients = [StoreClient(port, 1, f"engine {i}") for i in range(num_engines)]
    source = source_of(kind, shards)
    engine = trainer_engine(rank, clients if num_engines > 1 else clients[0], source)
    wrong, errors, reasons, factor = [], [], [], 1.0
    for next_factor in FACTORS:
        factor *= next_factor
        with torch.no_grad():
            for parameter in shards.values():
                parameter.to_local().mul_(next_factor)
        errors.append(message_of(engine.send_weights))
        statuses = engine.sender.sender.engines.values()
        reasons.append([s.reason if s.state == "dropped" else "" for s in statuses])
        dist.barrier()
        if rank == 0:
            wrong.append([client.call("wrong", factor)[0] for client in clients])
        dist.barrier()
    if rank == 0:
        for client in clients:
            client.call("end")
    return {"wrong": wrong, "errors": errors, "reasons": reasons}


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        *(("module", 1), ("0.33", 1), ("m2n", 2)),
        pytest.param("0.33", 2, marks=pytest.mark.exhaustive),
        pytest.param("m2n", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_sources(kind: str, replicas: int) -> None:
    """Uneven shards, a shard on dimension 1, and a parameter that takes the engine's loader."""
    if kind == "m2n":
        pytest.importorskip("vllm.distributed.weight_transfer.m2n_source", reason="vLLM 0.32")
    store = new_store()
    with Ranks(memory_body, 1, store.port, "engine 0") as engine:
        first, second = run_ranks(source_body, 2, store.port, kind, replicas, 1)
        assert engine.results() == [["1", "2", "3"]]
    assert first["wrong"] == [[[]]] * len(FACTORS)
    assert first["errors"] == second["errors"] == ["no error"] * len(FACTORS)


@pytest.mark.parametrize("rejects", [False, True])
def test_an_engine_that_fails_is_named_and_gets_the_next_weights(rejects: bool) -> None:
    """rejects: the receiver does not start. The trainers do not wait for it until its timeout."""
    store = new_store()
    with (
        Ranks(memory_body, 1, store.port, "engine 0") as good,
        Ranks(memory_body, 1, store.port, "engine 1", 2, rejects) as failing,
    ):
        first, second = run_ranks(source_body, 2, store.port, "module", 1, 2)
        assert good.results() == [["1", "2", "3"]]
        assert failing.results() == [["1", "3"]]
    for result in (first, second):
        assert [e.partition(":")[0] for e in result["errors"]] == [
            "no error",
            "ReshardError",
            "no error",
        ]
        assert "engine 1, update_weights: " in result["errors"][1]
        assert "ZeroDivisionError" in result["errors"][1]
        reasons = [of_failing for _, of_failing in result["reasons"]]
        assert [bool(reason) for reason in reasons] == [False, True, False]
        assert "ZeroDivisionError" in reasons[1]
    assert [of_good for of_good, _ in first["wrong"]] == [[]] * len(FACTORS)
    assert [bool(of_failing) for _, of_failing in first["wrong"]] == [False, True, False]


def ending_body(rank: int, world_size: int, port: int) -> None:
    """An engine whose process ends between two syncs, and whose server does not answer then."""
    worker, starts = MemoryWorker("engine 0", 0, False), count(1)
    commands = {
        "init_weight_transfer_engine": worker.join,
        "start_weight_update": lambda: next(starts) == 1 or os._exit(1),
        "update_weights": worker.update,
        "finish_weight_update": worker.labels.append,
    }
    follow(port, 0, commands, "engine 0")


def sync_twice_body(rank: int, world_size: int, port: int) -> list[str]:
    mesh = mesh_of(world_size, 1)
    shards = {
        name: shard(tensor, mesh, int(UNEVEN[name][0] == "row"))
        for name, tensor in values(UNEVEN).items()
    }
    engine = trainer_engine(rank, StoreClient(port, 1, "engine 0"), source_of("module", shards))
    return [message_of(engine.send_weights) for _ in range(2)]


def test_an_engine_that_ends_between_two_syncs_is_named() -> None:
    store = new_store()
    with Ranks(ending_body, 1, store.port):
        results = run_ranks(sync_twice_body, 2, store.port)
    error = "ReshardError: on rank 0: engine 0, start_weight_update: rank 0 has ended"
    assert results == [["no error", error]] * 2


def test_the_configuration_of_the_model_is_compared_with_the_engines() -> None:
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource

    from hybridengine.remote.vllm_transfer.engine_sender import sender_arguments

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    assert sender_arguments(ModuleSource(model)).config == model.config.to_dict()
    assert sender_arguments(ModuleSource(model.model.layers)).config == {}


# What is refused


def refusal_body(rank: int, world_size: int, used_port: int) -> dict[str, str]:
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from hybridengine.remote.vllm_transfer.trainer import HybridEngineTrainerTransfer

    mesh = mesh_of(world_size, 1)
    module = module_of({"a": shard(torch.ones(6, 4), mesh, 0), "b": shard(torch.ones(3), mesh, 0)})
    good, client = ModuleSource(module), RefusingClient()

    @dataclass(frozen=True)
    class StridedShard:
        dim: int

    sources = {
        "None": None,
        "full": FullSource(),
        "full 0.33": OnlyFull033(module),
        "neither": SimpleNamespace(),
        "owners": Changed033(module, owners=lambda m: (1,), mesh_shape=lambda m: (1,)),
        "name": Changed033(module, name=lambda m: m.name * 2),
        "dtype": Changed033(module, dtype=lambda m: torch.bfloat16),
        "shape": Changed033(module, shape=lambda m: (2, *m.shape[1:])),
        "replicated": Changed033(module, placements=lambda m: None),
        "placement": Changed033(module, placements=lambda m: (StridedShard(0),)),
    }
    no_module = ModuleSource(module)
    del no_module._module
    sources["no module"] = no_module

    def init(source: Any = good, client: Any = client, rank: int = rank, **options: Any) -> str:
        return message_of(lambda: trainer_engine(rank, client, source, **options))

    messages = {name: init(source) for name, source in sources.items()}
    messages["rank"] = init(rank=1 - rank)
    messages["client"] = init(client=object())
    messages["no client"] = init(client=[])
    messages["port"] = init(master_port=used_port)
    messages["engine"] = init()
    messages["option"] = init(packed=False, world_size=4)
    info = NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=rank)
    messages["init_info"] = message_of(
        lambda: HybridEngineTrainerTransfer.trainer_init(info, client=client, source=good)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HYBRIDENGINE_SECRET")
        messages["secret"] = init()
    assert "hybridengine" in WeightTransferTrainerFactory._registry
    return messages


REFUSALS = {
    "None": "source: got None; expected vLLM's ModuleSource",
    "full": "FullSource, which yields full tensors; expected vLLM's ModuleSource",
    "full 0.33": "OnlyFull033, which does not implement iter_local(); expected",
    "neither": "source: got a types.SimpleNamespace; expected vLLM's ModuleSource",
    "owners": "declares the ranks (1,) as owners of 'a'; expected each of the 2 trainer ranks",
    "name": "yields 'a' where its metadata declares 'aa'",
    "dtype": "yields 'a' in torch.float32, but its metadata declares torch.bfloat16",
    "shape": "'a' of shape (2, 4) has placements",
    "replicated": "yields 'a' of shape (3, 4), but its metadata declares (6, 4) on every rank",
    "placement": "placement refusal_body.<locals>.StridedShard(dim=0) of 'a'; expected Replicate",
    "no module": "ModuleSource without the attribute _module of vLLM 0.32 and 0.33",
    "rank": "init_info.rank: got 1, but this process has rank 0",
    "client": "a object has no init_weight_transfer_engine, start_weight_update",
    "no client": "client: got none, expected one for each engine",
    "port": "opening a store at master_address='127.0.0.1', master_port=",
    "engine": "engine 0, init_weight_transfer_engine: ConnectionRefusedError: no server",
    "option": "the backend 'hybridengine' has no packed, world_size; expected bucket_bytes",
    "init_info": "init_info: got a NCCLTrainerInitInfo, expected HybridEngineTrainerInitInfo",
    "secret": "HYBRIDENGINE_SECRET is not set",
}


def test_what_cannot_be_used_is_refused_by_name_on_every_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        first, second = run_ranks(refusal_body, 2, used.getsockname()[1])
    assert first.keys() == REFUSALS.keys()
    for case, text in REFUSALS.items():
        assert text in first[case], case
        assert second[case] == first[case], case


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.init_process_group first"):
        trainer_engine(0, RefusingClient(), FullSource())


def test_a_ray_client_is_one_engine_for_each_handle() -> None:
    from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient

    from hybridengine.remote.vllm_transfer.trainer import clients_of

    plain = RefusingClient()
    ray = RayVLLMWeightSyncClient(["a", "b"])
    first, second, third = clients_of([ray, plain])
    assert (first.handles, second.handles, third) == (["a"], ["b"], plain)


def test_verify_is_the_trainers_choice_where_they_are_elsewhere() -> None:
    from hybridengine.remote.vllm_transfer.transfer import HybridEngineTransfer

    worker = HybridEngineTransfer.__new__(HybridEngineTransfer)
    versions: list[int | None] = []
    worker.server = SimpleNamespace(receive=versions.append)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="verify is for an engine on the trainers' ranks"):
        worker.receive_weights(worker.parse_update_info({"version": 3, "verify": True}))
    with pytest.raises(ValueError, match="unexpected keyword argument 'names'"):
        worker.parse_update_info({"names": [], "dtype_names": [], "shapes": []})
    worker.receive_weights(worker.parse_update_info({"version": 3}))
    assert versions == [3]
