"""A weight sync from FSDP2 trainers to vLLM engines in other processes, against full broadcasts.

Rows, on the same ranks, model and engines:
  hybridengine     trainers send to each engine rank what it needs, replicas share it
  broadcast_bf16   every parameter cast and gathered in full, broadcast from trainer rank 0 to all
                   engine ranks, then vLLM's load_weights: vLLM's NCCL backend, over gloo
  broadcast_fp32   the same in the dtype of the master weights, as vLLM's ModuleSource yields it
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, Bench
from benchmarks.reshard import write_config
from hybridengine.run.messages import SECRET, new_secret
from tests.engines import build_engine
from tests.ranks import Ranks

CASES = ((2, 2, 1), (2, 1, 2))  # trainers, engines, TP size
BASELINES = {"broadcast_bf16": torch.bfloat16, "broadcast_fp32": torch.float32}
ROUNDS = 3
TIMEOUT_S = 500.0


def run(bench: Bench) -> None:
    if bench.device.type == "cuda" or importlib.util.find_spec("vllm") is None:
        print("# disaggregated: gloo ranks on a CPU with vLLM's CPU build", flush=True)
        return
    for trainers, engines, tp_size in CASES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            os.environ.setdefault(SECRET, new_secret())  # the worlds inherit it
            million = write_config(Path(folder), bench.quick)
            store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            place = folder, store.port, engines, tp_size
            worlds = [Ranks(_trainer, trainers, *place, timeout_s=TIMEOUT_S)]
            worlds += [
                Ranks(_engine, tp_size, *place, i, timeout_s=TIMEOUT_S) for i in range(engines)
            ]
            for world in worlds:
                stack.enter_context(world)
            results, *_ = [world.results() for world in worlds]
        _report(bench, f"{million}M {trainers} → {engines}x tp={tp_size}", results)


def _report(bench: Bench, shape: str, results: list[dict]) -> None:
    """results: by trainer rank and implementation, (ms of each round, bytes to engines)."""
    times = {name: sorted(rounds) for name, (rounds, _) in results[0].items()}
    best = min(times[name][ROUNDS // 2] for name in BASELINES)
    for name, rounds in times.items():
        p50 = rounds[ROUNDS // 2]
        out = [rank[name][1] for rank in results]
        bench.add_sync(
            "disaggregated",
            name,
            shape,
            rounds,
            sum(out),
            device="gloo ranks, 1 thread each",
            ratio_to_best_peer=best / p50 if name == OURS else None,
            note="  MiB to engines by trainer rank: " + ", ".join(f"{b / 2**20:.1f}" for b in out),
        )


def _broadcast_group(port: int, rank: int, size: int) -> tuple[dist.Store, Any]:
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    prefix = dist.PrefixStore("broadcast", store)
    return store, dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=TIMEOUT_S))


def _trainer(
    rank: int, world_size: int, path: str, port: int, engines: int, tp_size: int
) -> dict[str, tuple[list[float], int]]:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridengine.reshard import WeightSender

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_()
    parameters = dict(model.named_parameters())
    members = engines * tp_size
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    group = _broadcast_group(port, 0, 1 + members)[1] if rank == 0 else None
    sender = WeightSender(
        lambda: parameters, store, num_engines=engines, timeout_s=TIMEOUT_S, delta="off"
    )

    def broadcast(dtype: torch.dtype) -> int:
        sent = 0
        for parameter in parameters.values():
            full = parameter.detach().to(dtype).full_tensor()
            if group is not None:
                group.broadcast(full, 0).wait()
                sent += full.nbytes  # to one engine rank; a ring passes it on
        if group is not None:
            group.barrier().wait()
        dist.barrier()
        return sent

    results: dict[str, tuple[list[float], int]] = {}
    ways: dict[str, Callable[[int], int]] = {OURS: lambda version: sender.sync(version).bytes_sent}
    for name, dtype in BASELINES.items():
        ways[name] = partial(lambda chosen, version: broadcast(chosen), dtype)
    for version in range(1, ROUNDS + 2):
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            sent = way(version)
            times, _ = results.setdefault(name, ([], 0))
            if version > 1:  # the first round plans and connects
                times.append((time.perf_counter() - started) * 1e3)
            results[name] = times, sent
    return results


def _engine(
    rank: int, world_size: int, path: str, port: int, engines: int, tp_size: int, index: int
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridengine.model.parameters import checkpoint_layout
    from hybridengine.reshard import WeightReceiver

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    engine = build_engine(
        "vllm",
        path,
        checkpoint=checkpoint_layout(model),
        tensor_model_parallel_size=tp_size,
        dtype="bfloat16",
        kv_cache_gib=16 / 1024,
    )
    store, group = _broadcast_group(port, 1 + index * tp_size + rank, 1 + engines * tp_size)
    receiver = WeightReceiver(engine, store, index=index, timeout_s=TIMEOUT_S)
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def received(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            full = torch.empty(shape, dtype=dtype)
            group.broadcast(full, 0).wait()
            yield name, full

    for _ in range(ROUNDS + 1):
        receiver.receive()
        for dtype in BASELINES.values():
            engine.target.load_full(received(dtype))
            group.barrier().wait()
