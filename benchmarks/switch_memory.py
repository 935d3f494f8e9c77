"""Memory that a weight sync adds on every rank, compared with gathering the full model.

Rows, each in new processes on the model of `benchmarks reshard`:
  hybridengine     the transport that the ranks choose: a pull from shared memory
  all_to_all       ours with the transport of ranks that share no memory
  gather_each      full_tensor() of one float32 parameter after the other, each loaded and freed
  gather_all       the full float32 state dict on every rank, then loaded

`peak_mib` is the most of the ranks: what is resident after a sync and was not before it was set up
(memory that ranks share counts in equal parts), and the peak above that during the second sync.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._bench import OURS, Bench, status_kib
from benchmarks.reshard import build, gather, make_resharder, write_config
from tests.ranks import run_ranks

RANKS, TP_SIZE = 4, 2


def run(bench: Bench) -> None:
    if bench.device.type == "cuda" or importlib.util.find_spec("vllm") is None:
        print("# switch_memory: needs gloo ranks on a CPU and vLLM's CPU build", flush=True)
        return
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        million = write_config(Path(folder), bench.quick)
        for name in ("gather_all", "gather_each", "all_to_all", OURS):
            peaks[name] = max(run_ranks(_rank, RANKS, folder, name, timeout_s=300))
            bench.add(
                "switch_memory",
                "sync",
                name,
                f"{million}M N={RANKS} tp={TP_SIZE}",
                dtype="float32→bf16",
                isa=None,
                device=f"{RANKS} gloo ranks, 1 thread each",
                peak_mib=peaks[name],
                note=f"  {peaks[name] / peaks['gather_all']:.2f} of a full gather's",
            )


def _rank(rank: int, world_size: int, path: str, name: str) -> float:
    """Return the MiB that a sync adds on this rank."""
    engine, parameters = build(path, world_size, TP_SIZE)
    before = _resident_kib()
    sync = _way(name, engine, parameters)
    sync()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    sync()
    transient = status_kib("VmHWM") - status_kib("VmRSS")
    dist.barrier()
    return (_resident_kib() - before + transient) / 2**10


def _way(name: str, engine: Any, parameters: dict[str, Any]) -> Callable[[], object]:
    """Return the function that syncs once."""
    if name == "gather_each":
        return lambda: gather(engine, parameters, torch.float32)
    if name == "gather_all":

        def gather_all() -> None:
            full = {name: p.detach().full_tensor() for name, p in parameters.items()}
            engine.target.load_full(full.items())

        return gather_all
    resharder = make_resharder(engine, parameters, shares_memory=name == OURS)
    return lambda: resharder.sync(1)


def _resident_kib() -> float:
    """Return the resident memory of this process, of shared pages its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("Pss:")).split()[1])
