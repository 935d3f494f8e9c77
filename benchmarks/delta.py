"""Delta syncs against dense ones: a Llama of 0.5B parameters, (N, t) = (4, 2) on gloo ranks.

Between two syncs a share of the elements moves to the next or back to the former bfloat16 value.
Rows, at each share of changed elements:
  hybridengine   a delta, found by comparison with the bits that were sent last
and once, since they move everything:
  dense, dense_all_to_all   by a pull from shared memory, and by the transport between machines

The received bytes are compared with log2(elements over changes) + 16 bits per change. GB/s are
those of the link; the last lines name the largest share at which a delta is faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, Bench
from benchmarks.strided_copy import llama
from benchmarks.sync import _Tensors
from hybridengine.reshard import Resharder
from hybridengine.sync import resharder as module
from tests.ranks import run_ranks

RANKS, TP_SIZE = 4, 2
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
ROUNDS = 5


class Result(NamedTuple):
    """milliseconds: sorted, of the slowest rank. received: bytes of this rank. bound: entropy."""

    milliseconds: list[float]
    received: int
    bound: float


def run(bench: Bench) -> None:
    if bench.device.type == "cuda":
        print("# delta: gloo ranks on a CPU; delta_ops has the operators of a GPU", flush=True)
        return
    sizes = (256, 512, 1000, 2) if bench.quick else (1024, 4096, 65536, 24)
    shares = SHARES[2:4] if bench.quick else SHARES
    numel, results = run_ranks(_rank, RANKS, sizes, shares, timeout_s=580)[0]
    shape = f"{numel / 1e9:.2f}B N={RANKS} tp={TP_SIZE}"
    medians = {key: r.milliseconds[len(r.milliseconds) // 2] for key, r in results.items()}
    for (way, share), result in results.items():
        times, p50 = result.milliseconds, medians[way, share]
        dense = medians["dense", 1.0] / p50
        notes = f"  {result.received / 2**20:.2f} MiB received"
        if share < 1:
            notes += f", {result.received / result.bound:.2f}x the entropy; {dense:.1f}x vs dense,"
            notes += f" {medians['dense_all_to_all', 1.0] / p50:.1f}x vs its all-to-all"
        bench.add_sync(
            "delta",
            way,
            f"{shape} {share:.1%} changed",
            times,
            result.received,
            device=f"{RANKS} gloo ranks, 1 thread each",
            ratio_to_best_peer=dense if way == OURS else None,
            note=notes,
        )
    for dense in ("dense", "dense_all_to_all"):
        faster = [s for s in shares if medians[OURS, s] < medians[dense, 1.0]]
        print(f"# a delta is faster than {dense} up to {max(faster, default=0):.1%}", flush=True)


class _Model:
    """The shards of this rank, which `train` changes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rank: int, world_size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (world_size,))
        generator = torch.Generator().manual_seed(rank)
        self.shards: dict[str, DTensor] = {}
        for name, shape in shapes.items():
            dim = int(name.endswith(("o", "down")))
            local = [s // (world_size if i == dim else 1) for i, s in enumerate(shape)]
            values = torch.randn(local, generator=generator).bfloat16().float()
            self.shards[name] = DTensor.from_local(values, mesh, [Shard(dim)], run_check=False)
        self._locals = {name: tensor.to_local() for name, tensor in self.shards.items()}

    def choose(self, share: float) -> None:
        """Choose the elements that `train` changes."""
        self._chosen = {
            name: (torch.rand(tensor.numel()) < share).nonzero()[:, 0]
            for name, tensor in self._locals.items()
        }

    def train(self) -> None:
        for name, tensor in self._locals.items():
            bits, chosen = tensor.view(torch.int32).view(-1), self._chosen[name]
            bits[chosen] = bits[chosen] ^ (1 << 16)  # the last bit of bfloat16


def _rank(
    rank: int, world_size: int, sizes: tuple[int, int, int, int], shares: tuple[float, ...]
) -> tuple[int, dict[tuple[str, float], Result]]:
    """Return the number of parameters, and the results by (row, share of changed elements)."""
    shapes, layouts = llama(*sizes, tp=TP_SIZE)
    model = _Model(shapes, rank, world_size)
    tp_rank = rank * TP_SIZE // world_size
    engine = _Tensors(layouts[tp_rank], tp_rank, "cpu")
    results: dict[tuple[str, float], Result] = {}

    def measure(way: str, share: float, resharder: Resharder) -> None:
        model.choose(share)
        times, report = [], None
        for _ in range(ROUNDS + 1):
            model.train()
            dist.barrier()
            started = time.perf_counter()
            report = resharder.sync()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times.append(float(seconds) * 1e3)
        assert report is not None and report.delta == (share < 1)
        elements = resharder.plan.bytes_received[rank] // 2
        bound = _entropy_bytes(elements, round(elements * (report.changed or 1.0)))
        results[way, share] = Result(sorted(times[1:]), report.bytes_received, bound)
        if rank == 0:
            print(f"# {way} {share:.1%}: {[round(t) for t in times]} ms", flush=True)

    def make(**options: object) -> Resharder:
        return Resharder(lambda: model.shards, engine, **options)

    measure("dense", 1.0, make(delta="off"))
    with mock.patch.object(module, "share_memory", lambda *args: None):
        measure("dense_all_to_all", 1.0, make(delta="off"))
    resharder = make(delta="on")
    resharder.sync()
    for share in shares:
        measure(OURS, share, resharder)
    return sum(tensor.numel() for tensor in model.shards.values()), results


def _entropy_bytes(size: int, count: int) -> float:
    """log2(size over count) bits and 16 for each value, in bytes."""
    lgamma = math.lgamma
    positions = (lgamma(size + 1) - lgamma(count + 1) - lgamma(size - count + 1)) / math.log(2)
    return (positions + 16 * count) / 8
