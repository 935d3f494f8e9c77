"""What `test_trl_server` does on ranks: syncs of TRL's trainers to vLLM servers."""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridengine.integrations import trl as adapter
from hybridengine.remote.servers import VllmServer
from tests.extras.remote.stand_in_server import digest_of
from tests.ranks import message_of

__all__ = ["TIMEOUT_S", "body", "one_rank_body"]

TIMEOUT_S = 60.0
STUCK_S = 3.0  # a rank that would go on goes on within milliseconds


def choices(rank: int, ports: dict[str, int]) -> dict[str, str]:
    """What each of the servers at `ports` is used for, or why it is refused."""
    from hybridengine.integrations.trl.server import takes_slices

    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def choose(server: str, obstacle: str = "", device: torch.device = gpu) -> str:
        taken = []
        url = f"http://127.0.0.1:{ports[server]}"
        message = message_of(lambda: taken.append(takes_slices(url, obstacle, device, TIMEOUT_S)))
        return str(taken[0]) if taken else message

    messages = {
        "ours": choose("hybridengine", device=cpu),
        "nccl": choose("nccl"),
        "nccl on a CPU": choose("nccl", device=cpu),
        "none": choose("none"),
        "obstacle": choose("hybridengine", "FSDP1"),
        "no routes": choose("no routes"),
        "gone": choose("gone"),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("HYBRIDENGINE_SECRET")
        messages["secret"] = choose("hybridengine")
    return messages


def trained(path: str, fsdp: bool) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if fsdp:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def with_adapters(path: str) -> Any:
    """A sharded model with LoRA, whose products with these factors are exact."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    config = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(trained(path, False), config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            size = tuple(parameter.shape)
            parameter.data = torch.randint(-1, 2, size, generator=generator).float()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def sync_grpo(rank: int, path: str, url: str, model: Any) -> dict[str, Any]:
    """As GRPOTrainer: make a VLLMGeneration, shard the model, and sync before each generation."""
    from trl.generation.vllm_generation import VLLMGeneration

    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
        is_main_process=rank == 0,
        device=torch.device("cpu"),
    )
    generation = VLLMGeneration(
        trained(path, False),
        accelerator,
        None,
        mode="server",
        server_base_url=url,
        server_timeout=TIMEOUT_S,
    )
    assert hasattr(generation, "vllm_client") == (rank == 0)
    generation.model = model  # sharded after TRL has made the VLLMGeneration
    sent = []
    for _ in range(2):
        change(model)
        generation.sync_weights()
        sent.append(generation._hybridengine_server.report.bytes_sent)
    return {"sent": sent} | compared(model, url)


def sync_async(rank: int, path: str, url: str, kind: str = "GRPO") -> dict[str, Any]:
    """As AsyncGRPOTrainer, whose callback initializes the transfer on rank 0 alone."""
    trainer, _ = async_trainer(rank, trained(path, True), url, kind)
    if trainer.weight_transfer is not None:
        trainer.weight_transfer.init_weight_transfer()
    for _ in range(2):
        change(trainer.model)
        trainer._sync_weight()
    return {"version": trainer.model_version} | compared(trainer.model, url)


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2.0)


def compared(model: torch.nn.Module, url: str) -> dict[str, Any]:
    """The weights of the trainers and of the server, by their digests."""
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    if hasattr(model, "peft_config"):
        full = merged(full)
    return {
        "bytes": sum(tensor.nbytes for tensor in full.values()),
        "trained": {name: digest_of(tensor) for name, tensor in full.items()},
        "served": VllmServer(url, 0, TIMEOUT_S).request("POST", "/weight_checker", {}),
    }


def merged(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {n: t for n, t in full.items() if ".lora_" not in n}
    for name in [n for n in full if ".lora_A." in n]:
        base = name.replace("lora_A.default", "base_layer")
        result[base] = full[base] + full[name.replace("lora_A", "lora_B")] @ full[name]
    return {
        n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in result.items()
    }


def one_rank_body(rank: int, world_size: int, path: str, url: str) -> dict[str, Any]:
    dist.destroy_process_group()  # a process that no launcher started
    with adapter.patched("sync"):
        return sync_grpo(rank, path, url, trained(path, False))


class NoServer:
    """As TRL's client of a server whose workers do not receive."""

    server_url = "http://server"

    def __init__(self, sent: threading.Event) -> None:
        self._sent = sent

    def start_weight_update(self, timeout: float) -> None: ...

    def update_weights(self, update_info: dict[str, Any], timeout: float) -> None:
        self._sent.wait()  # for the first tensor
        raise ConnectionError("the server ran out of memory")

    def finish_weight_update(self, timeout: float) -> None: ...

    def pause(self, timeout: float) -> None: ...

    def resume(self, timeout: float) -> None: ...


def async_trainer(
    rank: int, model: Any, url: str, kind: str = "GRPO"
) -> tuple[Any, threading.Event]:
    """What of an AsyncGRPOTrainer, or an AsyncDistillationTrainer, its `_sync_weight` uses."""
    from collections import defaultdict

    package = f"trl.experimental.async_{kind.lower()}"
    module = importlib.import_module(f"{package}.async_{kind.lower()}_trainer")
    trainer_class = getattr(module, f"Async{kind}Trainer")
    sent = threading.Event()
    trainer: Any = trainer_class.__new__(trainer_class)
    trainer.model, trainer.model_version, trainer.rollout_worker = model, 0, None
    trainer.accelerator = SimpleNamespace(
        is_main_process=rank == 0,
        device=torch.device("cpu"),
        wait_for_everyone=dist.barrier,
        unwrap_model=lambda model: model,
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
    )
    trainer.args = SimpleNamespace(vllm_server_base_url=url, weight_sync_timeout=4 * TIMEOUT_S)
    trainer._lora_sync, trainer._metrics = False, {"train": defaultdict(list)}
    transfer = importlib.import_module(f"{package}.weight_transfer").WeightTransferClient
    trainer.weight_transfer = transfer(NoServer(sent), {}) if rank == 0 else None
    trainer.vllm_client = SimpleNamespace(wait_for_server_ready=lambda: None)
    return trainer, sent


def sync_without_ours(rank: int, path: str) -> str:
    """TRL's own sync: rank 0 sends what it gathers, the server does not receive it."""
    from trl.experimental.async_grpo import weight_transfer

    trainer, sent = async_trainer(rank, trained(path, True), "")
    if rank == 0:
        trainer.weight_transfer.model_update_group = object()
    store, messages = dist.distributed_c10d._get_default_store(), list[str]()

    def produce(iterator: Iterator[Any], **options: Any) -> None:
        next(iterator)
        sent.set()
        threading.Event().wait()  # a broadcast that nobody receives

    def sync() -> None:
        messages.append(message_of(trainer._sync_weight))

    with patch.object(weight_transfer, "packed_nccl_broadcast_producer", produce):
        thread = threading.Thread(target=sync, daemon=True)
        thread.start()
        if rank == 0:
            thread.join()
            store.set("failed", "1")
            store.get("looked")
            return messages[0]
        store.get("failed")
        thread.join(STUCK_S)
        frame = sys._current_frames().get(thread.ident or 0)
        store.set("looked", "1")
        return "".join(traceback.format_stack(frame)) if frame else messages[0]


def sync_and_fail(rank: int, path: str, url: str) -> tuple[str, int]:
    trainer, _ = async_trainer(rank, trained(path, True), url)
    return message_of(trainer._sync_weight), trainer.model_version


def fail_an_update(rank: int, path: str, url: str) -> tuple[str, int]:
    """A server that has joined fails in `update_weights`; the trainers have begun to send."""
    if rank == 0:
        VllmServer(url, 0, TIMEOUT_S).request("POST", "/fail_next_update", "of the server")
    return sync_and_fail(rank, path, url)


def use_other_transfers(rank: int) -> list[str]:
    """A user's own transfer, and a server with `nccl`, are TRL's business."""
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    from hybridengine.integrations.trl import async_sync

    class Own(WeightTransferClient):
        """Of a user."""

    calls: list[str] = []

    def original(trainer: Any, t0: float) -> tuple[float, float, float]:
        calls.append("sync")
        return t0, t0, t0

    def initialize(transfer: Any) -> None:
        calls.append("init")

    own, _ = async_trainer(rank, torch.nn.Linear(2, 2), "")
    if rank == 0:
        own.weight_transfer = Own(NoServer(threading.Event()), {})
        async_sync.init_weight_transfer(own.weight_transfer, initialize)
    nccl, _ = async_trainer(rank, torch.nn.Linear(2, 2), "")
    with patch.object(async_sync.server, "takes_slices", lambda *args: False):
        for trainer in (own, own, nccl, nccl):
            marks = async_sync.sync_weight_merged(trainer, 1.0, original, initialize)
            assert marks == (1.0, 1.0, 1.0)
    return calls


def body(rank: int, world_size: int, path: str, ports: dict[str, int]) -> dict[str, Any]:
    from accelerate import PartialState

    PartialState(cpu=True)  # TRL's loggers need it
    url = f"http://127.0.0.1:{ports['serving']}"
    with adapter.patched("sync", "async_sync"):
        results = {
            "choices": choices(rank, ports),
            "fsdp": sync_grpo(rank, path, url, trained(path, True)),
            # The server has weights of another run.
            "plain": sync_grpo(rank, path, url, trained(path, False)),
            "lora": sync_grpo(rank, path, url, with_adapters(path)),
            "async": sync_async(rank, path, url),
            "distillation": sync_async(rank, path, url, "Distillation"),
            "fails": sync_and_fail(rank, path, f"http://127.0.0.1:{ports['fails']}"),
            "update fails": sync_and_fail(rank, path, f"http://127.0.0.1:{ports['update fails']}"),
            "joined, update fails": fail_an_update(rank, path, url),
            "ends": sync_and_fail(rank, path, f"http://127.0.0.1:{ports['ends']}"),
            "other transfers": use_other_transfers(rank),
        }
    return results | {"without ours": sync_without_ours(rank, path)}
