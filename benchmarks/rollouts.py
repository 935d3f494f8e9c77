"""Memory of a step's rollouts per rank, on 1 to 8 gloo ranks, without a model.

Every rank generates its part of synthetic rollouts (ids, log-probs and text), receives what it
trains on and packs it into micro-batches. The baseline gathers the rollouts of all ranks as Python
objects on each rank and packs the same micro-batches. `held` counts the bytes of all tensors,
arrays, lists and strings afterwards, `peak` is the growth of the process, ms is the time of the
exchange and the packing; all of the worst rank.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, ROOT, Bench, status_kib

WORLD_SIZES = (1, 2, 4, 8)
PROMPTS, RESPONSES, PROMPT_TOKENS, MAX_TOKENS = 64, 16, 256, 1024
MICRO_BATCH_TOKENS = 16_384


def run(bench: Bench) -> None:
    if bench.quick:
        print("# rollouts: several processes, not in a quick run", flush=True)
        return
    for name in (OURS, "replicated"):
        for world_size in WORLD_SIZES:
            held, peak, ms, tokens = _measure_ranks(name, world_size)
            shape = f"{world_size} ranks, {tokens} tokens"
            for pass_, mib in (("held", held), ("peak", peak)):
                bench.add("rollouts", pass_, name, shape, dtype="mixed", ms_p50=ms, peak_mib=mib)


def _measure_ranks(name: str, world_size: int) -> list[float]:
    """Run one process per rank; return MiB held, peak MiB and ms of the worst rank, and tokens."""
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            [sys.executable, "-m", "benchmarks.rollouts", name, str(rank), str(world_size), folder]
            for rank in range(world_size)
        ]
        ranks = [
            subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, text=True) for call in calls
        ]
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{name} on {world_size} ranks failed; see the error above")
    return json.loads(outputs[0].splitlines()[-1])


def worker(name: str, rank: int, world_size: int, folder: Path) -> list[float]:
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.data import Subset
    from hybridengine.train.rollouts import Rollouts

    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dp = DataParallel(Session(PhaseStatus(folder, rank)), 1)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status_kib("VmHWM")
    prompts, own = _generate(rank, world_size)
    start = time.perf_counter()
    rollouts = Rollouts.gather(Subset(prompts, range(PROMPTS)), own, rank)
    gathered: list[Any] = [None] * world_size
    if name != OURS:
        dist.all_gather_object(gathered, own)
    batch = dp.build_batch(rollouts, 1, MICRO_BATCH_TOKENS)
    ms = (time.perf_counter() - start) * 1e3
    held = total_bytes([rollouts, gathered, batch]) / 2**20
    peak = (status_kib("VmHWM") - before) / 2**10
    worst = torch.tensor([held, peak, ms], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.barrier()
    return [*worst.tolist(), int(rollouts.outcomes.lengths.sum())]


def _generate(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """Return all prompts, and the responses of every world_size-th of them."""
    from hybridengine.engine.response import Response
    from hybridengine.train.data import PromptSample
    from hybridengine.train.rollouts import ScoredResponse

    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, MAX_TOKENS + 1, (PROMPTS, RESPONSES), generator=draw).tolist()
    ids = torch.randint(50_000, (PROMPTS, PROMPT_TOKENS), generator=draw).tolist()
    prompts = [PromptSample(i, own, "x" * 4 * len(own), "", "", {}) for i, own in enumerate(ids)]
    rollouts = [
        ScoredResponse(
            Response(array("i", [7] * n), array("f", [-0.5] * n), "stop"), i, "x" * 4 * n
        )
        for i in range(rank, PROMPTS, world_size)
        for n in lengths[i]
    ]
    return prompts, rollouts


def total_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Count the bytes of tensors, arrays, lists and strings in dataclasses and containers, once."""
    seen = set() if seen is None else seen
    if id(value) in seen or value is None:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return sum(total_bytes(part, seen) for part in value)
    parts = value.values() if isinstance(value, Mapping) else value
    own = sys.getsizeof(value)
    if isinstance(parts, str | array) or not hasattr(parts, "__iter__"):
        return own
    return own + sum(total_bytes(part, seen) for part in parts)


if __name__ == "__main__":
    print(json.dumps(worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
