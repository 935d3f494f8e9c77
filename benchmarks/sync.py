"""A weight sync into engine tensors without an engine: layers of Llama 2 7B, float32 into bfloat16.

One rank: casts and copies, no transport. Two ranks: at TP 2 a rank's shards lie in its own engine
tensors, at TP 1 half of the model travels; on one GPU they share it under gloo, on several they use
NCCL, or pull from symmetric memory (`all_to_all`: ours without that). The baselines gather every
parameter in full and load it (`gather_bf16`: cast before the gather; `verl`: in float32). GB/s are
the bytes that a rank reads and writes, or at TP 1 of two ranks receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import prod
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._bench import OURS, Bench
from benchmarks.strided_copy import llama
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.weight_target import WeightTarget
from tests.ranks import run_ranks

CASES = ((1, 1, 32), (2, 2, 8), (2, 1, 8))  # ranks, TP size, layers
BASELINES = ("gather_bf16", "verl")
ROUNDS = 3


def run(bench: Bench) -> None:
    device = bench.device.type
    hidden, inner, vocab = (256, 512, 1000) if device == "cpu" else (4096, 11008, 32000)
    for ranks, tp_size, layers in CASES[2:] if bench.quick else CASES:
        sizes = (hidden, inner, vocab, 2 if bench.quick else layers)
        numel = sum(map(prod, llama(*sizes, tp=tp_size)[0].values()))
        shape = f"{numel / 1e9:.2f}B N={ranks} tp={tp_size}"
        if bench.results.keep({"impl": OURS}, op="sync", shape=shape):
            continue
        # Before and after: in between the memory belongs to the ranks.
        peaks = [bench.peak("copy", torch.float32)]
        if device == "cuda":
            torch.cuda.empty_cache()
        times, bytes_moved = run_ranks(
            _rank, ranks, sizes, tp_size, device, timeout_s=240, device=device
        )[0]
        peaks.append(bench.peak("copy", torch.float32))
        medians = {name: of[len(of) // 2] for name, of in times.items()}
        best = min((p50 for name, p50 in medians.items() if name in BASELINES), default=None)
        for name, of in times.items():
            p50, is_local = medians[name], tp_size == ranks
            rate = bytes_moved[name] / p50 / 1e6
            bench.add(
                "sync",
                _transport(device, ranks),
                name,
                shape,
                dtype="float32→bf16",
                ms_p20=of[len(of) // 5],
                ms_p50=p50,
                ms_p80=of[len(of) * 4 // 5],
                gb_per_s=rate,
                share_of_limit=rate / max(peaks) if is_local and name == OURS else None,
                ratio_to_best_peer=best / p50 if best and name == OURS else None,
            )


def _transport(device: str, ranks: int) -> str:
    if ranks == 1:
        return "local"
    return "nccl" if device == "cuda" and torch.cuda.device_count() >= ranks else "gloo"


class _Tensors(WeightTarget):
    """The tensors of one TP rank's layout, and a loader that copies full parameters into them."""

    def __init__(self, layout: EngineLayout, tp_rank: int, device: str) -> None:
        self.layout, self.tp_rank = layout, tp_rank
        self._tensors = {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            for name, spec in layout.destinations.items()
        }

    def weights(self) -> dict[str, Tensor]:
        return self._tensors

    def load_full(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        copies = {copy.source: copy for copy in self.layout.copies}
        for name, full in weights:
            c = copies[name]
            target = self._tensors[c.destination]
            target.as_strided(c.sizes, c.destination_strides, c.destination_offset).copy_(
                full.as_strided(c.sizes, c.source_strides, c.source_offset)
            )

    def finish_update(self) -> None: ...


def _rank(
    rank: int, world_size: int, sizes: tuple[int, int, int, int], tp_size: int, device: str
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return by implementation the sorted ms of all rounds, and bytes.

    sizes: hidden, inner, vocabulary, layers. The time of a round is that of its slowest rank.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from hybridengine.reshard import Resharder
    from hybridengine.sync import resharder as module

    shapes, layouts = llama(*sizes, tp=tp_size)
    tp_rank = rank * tp_size // world_size
    mesh = init_device_mesh(device, (world_size,))
    shards: dict[str, DTensor] = {}
    for name, shape in shapes.items():
        dim = int(name.endswith(("o", "down")))
        local = [s // (world_size if i == dim else 1) for i, s in enumerate(shape)]
        values = torch.randn(local, device=device)
        shards[name] = DTensor.from_local(values, mesh, [Shard(dim)], run_check=False)
    engine = _Tensors(layouts[tp_rank], tp_rank, device)
    resharder = Resharder(lambda: shards, engine, delta="off")
    resharder.sync(verify=True)
    with mock.patch.object(module, "share_memory", lambda *args: None):
        all_to_all = Resharder(lambda: shards, engine, delta="off")
    numel = sum(p.numel() for p in shards.values())

    def gather(dtype: torch.dtype) -> None:
        engine.load_full((n, cast(DTensor, p.to(dtype)).full_tensor()) for n, p in shards.items())

    missing, own = numel - numel // world_size, numel // world_size
    ways: dict[str, tuple[Callable[[], object], int]] = {
        OURS: (resharder.sync, resharder.plan.bytes_received[rank]),
        "all_to_all": (all_to_all.sync, resharder.plan.bytes_received[rank]),
    }
    if device == "cpu" or _transport(device, world_size) != "gloo":
        # full_tensor() on a GPU under gloo ends the process in torch 2.11 (wait_tensor).
        ways["gather_bf16"] = (lambda: gather(torch.bfloat16), missing * 2)
        ways["verl"] = (lambda: gather(torch.float32), missing * 4)
    if tp_size == world_size:  # ours receives next to nothing: reads float32, writes bfloat16
        ways |= {OURS: (resharder.sync, own * 6), "all_to_all": (all_to_all.sync, own * 6)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (call, _) in ways.items():
            times[name].append(_slowest_ms(call, device))
    return {n: sorted(t[1:]) for n, t in times.items()}, {n: b for n, (_, b) in ways.items()}


def _slowest_ms(call: Callable[[], object], device: str) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds) * 1e3
