"""A weight sync from FSDP2 trainers to engines in other processes of the same devices.

    python -m benchmarks reshard --transport ipc

The way of a trainer beside vLLM server or worker processes, on a CPU. Rows, in turn on the same
trainers, model and engines, Qwen2.5-0.5B with random weights:
  hybridengine   `WeightSender`: engine ranks map the trainers' memory, and read what they need
  verl           every trainer gathers every parameter in full, in float32, and casts it; one per
                 engine rank copies it into a bucket of POSIX shared memory, from which the engine's
                 vLLM runs load_weights (verl's `BucketedWeightSender`, which keeps float32)
  in_process     `Resharder`: the trainers hold such an engine themselves

Bytes between processes are those that trainers send to each other and to engines. The memory is
what a sync takes at its peak in addition to what a process holds without it; what two processes
map counts in both.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, Bench, status_kib
from hybridengine.run.messages import SECRET, new_secret
from hybridengine.sync.weight_target import bit_checksums
from tests.ranks import Ranks
from tests.sync.vllm_engines import build_engine

CASES = ((2, 1), (4, 2))  # trainers, TP size of the engine
ROUNDS = 5
BUCKET_BYTES = 512 << 20  # verl's: the largest weight must fit
TIMEOUT_S = 500.0


class Result(NamedTuple):
    """Of one rank and implementation. milliseconds: of the slowest trainer, by round.

    sent: bytes to other processes. peak: bytes of memory at the peak.
    """

    milliseconds: list[float]
    sent: int
    peak: int


def run(bench: Bench) -> None:
    for trainers, tp_size in CASES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            os.environ.setdefault(SECRET, new_secret())  # the worlds inherit it
            million = _write_config(Path(folder), bench.quick)
            store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            place = folder, store.port, tp_size
            worlds = [
                stack.enter_context(Ranks(body, ranks, *place, timeout_s=TIMEOUT_S))
                for body, ranks in ((_trainer, trainers), (_engine, tp_size))
            ]
            of_trainers, of_engine = [world.results() for world in worlds]
        _report(bench, f"{million}M {trainers} → tp={tp_size} ipc", of_trainers, of_engine)


def _report(
    bench: Bench,
    shape: str,
    of_trainers: list[dict[str, Result]],
    of_engine: list[tuple[dict[str, int], int]],
) -> None:
    """of_engine: by rank, (implementation → bytes of memory at the peak, bytes of its weights)."""
    ways = of_trainers[0]
    medians = {name: sorted(ways[name].milliseconds)[ROUNDS // 2] for name in ways}
    lacking = sum(weights for _, weights in of_engine) / 2**20
    for name, result in ways.items():
        times, p50 = sorted(result.milliseconds), medians[name]
        sent = sum(rank[name].sent for rank in of_trainers)
        peaks = [max(rank[name].peak for rank in of_trainers) / 2**20]
        peaks += [max(rank.get(name, 0) for rank, _ in of_engine) / 2**20]
        note = f"  {sent / 2**20:.0f} MiB between processes, peak {peaks[0]:.0f} MiB in a trainer"
        if name != "in_process":
            note += f", {peaks[1]:.0f} in an engine rank; the engine lacks {lacking:.0f} MiB"
        bench.add_sync(
            "reshard",
            name,
            shape,
            times,
            sent,
            device="gloo ranks, 1 thread each",
            peak_mib=max(peaks),
            ratio_to_best_peer=medians["verl"] / p50 if name == OURS else None,
            note=note,
        )


def _write_config(folder: Path, quick: bool) -> int:
    """Write the config of Qwen2.5-0.5B (quick: 1M); return the millions of parameters."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=1024 if quick else 151936,
        hidden_size=896,
        intermediate_size=512 if quick else 4864,
        num_hidden_layers=2 if quick else 24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return round(sum(p.numel() for p in model.parameters()) / 1e6)


class _Memory:
    """How much memory calls take at their peak. Their first call may leave shared memory mapped."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}  # KiB
        self.peaks: dict[str, int] = {}  # bytes

    def measure(self, name: str, call: Callable[[], Any]) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, shared = status_kib("VmRSS"), status_kib("RssShmem")
        result = call()
        kept = self._kept.setdefault(name, status_kib("RssShmem") - shared)
        if name in self.peaks:
            before -= kept
        self.peaks[name] = (status_kib("VmHWM") - before) << 10
        return result


# verl's way


def _send_in_full(weights: Iterable[tuple[str, torch.Tensor]], store: dist.Store, key: str) -> int:
    """Send full weights to an engine rank, a bucket at a time; return the bytes."""
    path, sent, used, number = f"/dev/shm/benchmark-{uuid.uuid4().hex}", 0, 0, 0
    bucket = torch.from_file(path, shared=True, size=BUCKET_BYTES, dtype=torch.uint8)
    inside: list[tuple[str, tuple[int, ...], int]] = []

    def tell(is_last: bool) -> None:
        store.set(f"{key}/{number}", json.dumps([path, is_last, inside]))
        store.wait([f"{key}/{number}/read"])

    for name, weight in weights:
        if used + weight.nbytes > BUCKET_BYTES:
            tell(is_last=False)
            inside, used, number = [], 0, number + 1
        bucket[used : used + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)
        inside.append((name, tuple(weight.shape), used))
        used, sent = used + weight.nbytes, sent + weight.nbytes
    tell(is_last=True)
    os.unlink(path)
    return sent


def _received_in_full(store: dist.Store, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    bucket, number, is_last = None, 0, False
    while not is_last:
        path, is_last, inside = json.loads(store.get(f"{key}/{number}"))
        if bucket is None:
            bucket = torch.from_file(path, shared=True, size=BUCKET_BYTES, dtype=torch.uint8)
        for name, shape, offset in inside:
            size = 2 * math.prod(shape)
            yield name, bucket[offset : offset + size].view(torch.bfloat16).view(shape)
        store.set(f"{key}/{number}/read", "")
        number += 1


# Ranks


def _connect(port: int) -> dist.Store:
    timeout = timedelta(seconds=TIMEOUT_S)
    return dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, wait_for_workers=False, timeout=timeout
    )


def _build_engine(path: str, tp_size: int) -> tuple[Any, Any, dict[str, int]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    engine, checkpoint = build_engine(path, tp_size, torch.bfloat16)
    return engine, model, engine.target.layout.sliced_dims(checkpoint.parameters)


def _trainer(rank: int, world_size: int, path: str, port: int, tp_size: int) -> dict[str, Result]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    from hybridengine.reshard import Resharder, WeightSender

    engine, model, sliced = _build_engine(path, tp_size)
    names = {id(p): name for name, p in model.named_parameters()}
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (world_size,)),
        shard_placement_fn=lambda p: Shard(sliced.get(names[id(p)], 0)),
    )
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_()
    parameters = dict(model.named_parameters())
    store = _connect(port)
    sender = WeightSender(
        lambda: parameters, store, num_engines=1, timeout_s=TIMEOUT_S, delta="off"
    )
    resharder = Resharder(lambda: parameters, engine, delta="off")
    own = sum(p.to_local().numel() for p in parameters.values())
    gathered = 4 * (world_size - 1) * own  # its shard, to every other rank

    def send_in_full(version: int) -> int:
        full = ((n, p.detach().full_tensor().bfloat16()) for n, p in parameters.items())
        if rank < tp_size:
            return gathered + _send_in_full(full, store, f"full/{version}/{rank}")
        for _ in full:
            pass
        return gathered

    ways: dict[str, Callable[[int], int]] = {
        OURS: lambda version: sender.sync(version).bytes_sent,
        "verl": send_in_full,
        "in_process": lambda version: resharder.sync(version).bytes_sent,
    }
    memory, times, sent = _Memory(), dict[str, list[float]](), dict[str, int]()
    for version in range(1, ROUNDS + 2):
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            sent[name] = memory.measure(name, lambda: way(version))  # noqa: B023
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times.setdefault(name, []).append(float(seconds) * 1e3)
    return {name: Result(times[name][1:], sent[name], memory.peaks[name]) for name in ways}


def _engine(
    rank: int, world_size: int, path: str, port: int, tp_size: int
) -> tuple[dict[str, int], int]:
    from hybridengine.reshard import WeightReceiver

    engine, _, _ = _build_engine(path, tp_size)
    store = _connect(port)
    receiver = WeightReceiver(engine, store, index=0, timeout_s=TIMEOUT_S)
    memory, checksums = _Memory(), []
    for version in range(1, ROUNDS + 2):
        full = _received_in_full(store, f"full/{version}/{rank}")
        ways: dict[str, Callable[[], object]] = {
            OURS: receiver.receive,
            "verl": lambda: engine.target.load_full(full),  # noqa: B023
        }
        for name, way in ways.items():
            memory.measure(name, way)
            if version == 1:
                checksums.append(bit_checksums(list(engine.target.weights().values())))
    assert checksums[0] == checksums[1], "both ways move the same weights"
    return memory.peaks, sum(t.nbytes for t in engine.target.weights().values())
