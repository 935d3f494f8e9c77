"""A dense weight sync from FSDP2 ranks into vLLM ranks, against gathering full parameters.

Rows, on the same ranks, model and engine:
  hybridengine    the transport that the ranks choose: a pull from shared memory
  all_to_all      ours with the transport of ranks that share no memory
  verl            full_tensor() of every float32 parameter on every rank, then the engine's
                  load_weights (verl's FSDP workers; TRL and AReaL's FSDP paths do the same),
                  without its copy into a transfer bucket
  gather_bf16     the same, cast to the engine's dtype before the gather

A full run also draws benchmarks/results/reshard.png. `--transport ipc`: `_reshard_ipc`.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import _reshard_ipc
from benchmarks._bench import OURS, ROOT, Bench
from tests.ranks import run_ranks
from tests.sync.vllm_engines import build_engine

CASES = ((2, 2), (4, 2), (8, 2), (4, 4))
BASELINES = ("gather_bf16", "verl")
ROUNDS = 3


def run(bench: Bench) -> None:
    if bench.device.type == "cuda" or importlib.util.find_spec("vllm") is None:
        print("# reshard: gloo ranks on a CPU with vLLM's CPU build; elsewhere `sync`", flush=True)
        return
    if bench.transport == "ipc":
        _reshard_ipc.run(bench)
        return
    for ranks, tp_size in CASES[:1] if bench.quick else CASES:
        with tempfile.TemporaryDirectory() as folder:
            million = write_config(Path(folder), bench.quick)
            results = run_ranks(_rank, ranks, folder, tp_size, timeout_s=580)
        medians = {name: times[len(times) // 2] for name, (times, _) in results[0].items()}
        best_baseline = min(p50 for name, p50 in medians.items() if name in BASELINES)
        for name, (times, received) in results[0].items():
            p50 = medians[name]
            bench.add_sync(
                "reshard",
                name,
                f"{million}M N={ranks} tp={tp_size}",
                times,
                received,
                device=f"{ranks} gloo ranks, 1 thread each",
                ratio_to_best_peer=best_baseline / p50 if name == OURS else None,
                note=f"  {received / 2**20:.1f} MiB received per rank",
            )
        verl, two_copies = (medians[name] / medians[OURS] for name in ("verl", "all_to_all"))
        print(f"# {verl:.1f}x vs verl's way, {two_copies:.2f}x vs our all-to-all", flush=True)
    if not bench.quick:
        plot(bench.rows, ROOT / "benchmarks" / "results" / "reshard.png")


def plot(rows: list[dict], path: Path) -> None:
    """Draw bars per case on a logarithmic axis, labelled with verl's time over ours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    taken = {(r["shape"], r["impl"]): r["ms_p50"] for r in rows if r["op"] == "reshard"}
    shapes = list(dict.fromkeys(shape for shape, _ in taken))
    figure = Figure(figsize=(9, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = ((OURS, "#2563eb"), ("gather_bf16", "#868e96"), ("verl", "#d9480f"))
    for i, (impl, colour) in enumerate(kinds):
        positions = [n + (i - 1) * 0.27 for n in range(len(shapes))]
        bars = axes.bar(positions, [taken[s, impl] for s in shapes], 0.25, color=colour, label=impl)
        if impl == OURS:
            ratios = [f"{taken[s, 'verl'] / taken[s, OURS]:.1f}×" for s in shapes]
            axes.bar_label(bars, ratios, padding=3, fontweight="bold", color=colour)
    axes.set_yscale("log")
    axes.set_ylabel("ms per sync, slowest rank")
    axes.set_xticks(range(len(shapes)), [s.split(" ", 1)[1] for s in shapes])
    axes.set_title(
        f"Weight sync into vLLM, {shapes[0].split()[0]} parameters; × = verl's time over ours",
        loc="left",
        fontweight="bold",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    figure.savefig(path)


def write_config(folder: Path, quick: bool) -> int:
    """Write the config of a Llama of 0.5B parameters (quick: 5M); return the millions of them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=1024 if quick else 65536,
        hidden_size=256 if quick else 1024,
        intermediate_size=512 if quick else 4096,
        num_hidden_layers=2 if quick else 24,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return round(sum(p.numel() for p in model.parameters()) / 1e6)


def build(path: str, world_size: int, tp_size: int) -> tuple[Any, dict[str, Any]]:
    """Return (engine, FSDP2-sharded parameters of random values) of a rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {id(p): name for name, p in model.named_parameters()}
    engine, checkpoint = build_engine(path, tp_size, torch.bfloat16)
    sliced = engine.target.layout.sliced_dims(checkpoint.parameters)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (world_size,)),
        shard_placement_fn=lambda p: Shard(sliced.get(names[id(p)], 0)),
    )
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_()
    return engine, dict(model.named_parameters())


def make_resharder(engine: Any, parameters: dict[str, Any], *, shares_memory: bool = True) -> Any:
    """Return a dense Resharder, by default with the transport that the ranks choose."""
    from hybridengine.reshard import Resharder
    from hybridengine.sync import resharder as module

    share = module.share_memory if shares_memory else lambda *args: None
    with mock.patch.object(module, "share_memory", share):
        return Resharder(lambda: parameters, engine, delta="off")


def gather(engine: Any, parameters: dict[str, Any], dtype: torch.dtype) -> None:
    """Gather one full parameter after the other in `dtype` and load it into the engine."""
    engine.target.load_full((n, p.detach().to(dtype).full_tensor()) for n, p in parameters.items())


def _rank(rank: int, world_size: int, path: str, tp_size: int) -> dict:
    """Time each implementation on this rank; the time of a round is that of its slowest rank."""
    engine, parameters = build(path, world_size, tp_size)
    resharder = make_resharder(engine, parameters)
    all_to_all = make_resharder(engine, parameters, shares_memory=False)
    own = sum(p.to_local().numel() for p in parameters.values())
    rest = sum(p.numel() for p in parameters.values()) - own
    ways = {
        OURS: (lambda: resharder.sync(1), resharder.plan.bytes_received[rank]),
        "all_to_all": (lambda: all_to_all.sync(1), resharder.plan.bytes_received[rank]),
        "gather_bf16": (lambda: gather(engine, parameters, torch.bfloat16), rest * 2),
        "verl": (lambda: gather(engine, parameters, torch.float32), rest * 4),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (call, _) in ways.items():
            dist.barrier()
            started = time.perf_counter()
            call()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(float(seconds) * 1e3)
    return {name: (sorted(times[name][1:]), ways[name][1]) for name in ways}
