"""Profile the kernels that have goals, and tree attention, under Nsight Compute: part `profile`.

    python tools/gpu_profile.py --json FILE [--resume] [--device cpu]

One launch of each kernel on the shape of its goal (docs/notes.md), after two that are
not profiled.
A row has the kernel, its metrics by Nsight Compute's names, and what failed. Where `ncu` is not
installed or may not read the counters, the rows say so. `--device cpu` runs each call once on a
small shape, without the profiler.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 100  # of a kernel
# Time, shares of the peaks of memory and of the units that multiply, what limits the occupancy.
METRICS = (
    *("gpu__time_duration.sum", "sm__cycles_elapsed.avg.per_second", "dram__bytes.sum"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    *("launch__registers_per_thread", "launch__shared_mem_per_block"),
)
# name → the function that is profiled.
KERNELS = {  # the farthest from its goal first
    "tree_attention": "forward_kernel",
    "strided_copy": "copy_chunks",
    "linear_policy_loss": "unscaled_kernel",
    "logprob_forward": "forward_slices",
    "pack": "move_kernel",
    "logprob_backward": "backward_slices",
}


def calls(device: str) -> dict[str, Callable[[], object]]:
    """The calls by name; on a CPU of small shapes."""
    import torch

    from hybridengine.kernels import linear_policy_loss, pack, strided_copy, token_log_probs
    from hybridengine.kernels.attention import tree_attention

    on_gpu = device == "cuda"
    rows, vocab = (8192, 151_936) if on_gpu else (16, 1000)
    tokens, heads, length = (16_384, 32, 2048) if on_gpu else (64, 2, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def logits() -> tuple[Any, Any]:
        values = torch.randn(rows, vocab, device=device, dtype=dtype).requires_grad_()
        return values, torch.randint(vocab, (rows,), device=device)

    def forward() -> object:
        values, ids = logits()
        return token_log_probs(values.detach(), ids)

    def backward() -> object:
        values, ids = logits()
        return torch.autograd.grad(token_log_probs(values, ids)[0].sum(), values)

    def copy() -> object:
        size = rows * vocab // 4
        source = torch.randn(size, device=device)
        target = torch.empty(size, device=device, dtype=torch.bfloat16)
        row = [0, 0, 0, 0, 1, 1, 1, size, 0, 0, 0, 1, 0, 0, 0, 1]
        return strided_copy([source], [target], torch.tensor([row]))

    def packed() -> object:
        mask = torch.rand(tokens // length, length, device=device) < 0.6
        hidden = torch.randn(*mask.shape, 64 * heads, device=device, dtype=dtype)
        return pack([hidden], mask)

    def attention() -> object:
        q, k, v = (
            torch.randn(tokens, n, 128 if on_gpu else 16, device=device, dtype=dtype)
            for n in (heads, max(1, heads // 4), max(1, heads // 4))
        )
        ends = torch.arange(tokens, device=device) // length * length + length
        return tree_attention(q, k, v, ends.int())

    def loss() -> object:
        width, entries = (4096, 128_256) if on_gpu else (32, vocab)
        sizes = ((rows, width), (entries, width))
        hidden, weight = (torch.randn(*s, device=device, dtype=dtype) for s in sizes)
        hidden.requires_grad_()
        ids = torch.randint(entries, (rows,), device=device)
        advantages = torch.randn(rows, device=device)
        return linear_policy_loss(hidden, weight, ids, old_log_probs=None, advantages=advantages)

    named = (attention, copy, loss, forward, packed, backward)
    return dict(zip(KERNELS, named, strict=True))


def command_of(name: str, device: str, profiler: str | None) -> list[str]:
    """profiler: path of ncu; None: run the call alone."""
    script = [sys.executable, str(Path(__file__)), "--run", name, "--device", device]
    if profiler is None:
        return script
    # ncu would lock the clocks, of a card that others may use, at the base clock.
    options = ["--clock-control", "none", "--csv", "--target-processes", "all"]
    options += ["--metrics", ",".join(METRICS)]
    chosen = ("-k", KERNELS[name], "--launch-skip", "2", "--launch-count", "1")
    return [profiler, *options, *chosen, *script]


def parse(output: str) -> dict[str, Any]:
    """Return the metrics of a CSV that ncu printed, and the kernel's name; {} if there is none."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    found: dict[str, Any] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        found["function"] = row["Kernel Name"]
        found[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return found


def profile(name: str, device: str, profiler: str | None) -> dict[str, Any]:
    """Return the row of a kernel, without its name."""
    command = command_of(name, device, profiler)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"outcome": "not finished"}
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        return {"outcome": "skipped", "message": "the driver does not let users read the counters"}
    metrics = parse(done.stdout)
    if done.returncode or (profiler is not None and not metrics):
        return {"outcome": "failed", "message": output[-2000:]}
    return {"outcome": "passed", **metrics}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="changes nothing here")
    parser.add_argument("--resume", action="store_true", help="run what has not passed")
    parser.add_argument("--run", choices=KERNELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        repeats = 4 if arguments.device == "cuda" else 1
        call = calls(arguments.device)[arguments.run]
        for one in [call] * repeats:
            one()
        return 0
    on_cpu, profiler = arguments.device == "cpu", shutil.which("ncu")
    earlier = json.loads(arguments.json.read_text())["rows"] if arguments.resume else []
    rows: list[dict[str, Any]] = [row for row in earlier if row["outcome"] == "passed"]
    run = partial(profile, device=arguments.device, profiler=None if on_cpu else profiler)
    for name in [name for name in KERNELS if name not in {row["kernel"] for row in rows}]:
        missing = profiler is None and not on_cpu
        skipped = {"outcome": "skipped", "message": "ncu is not installed"}
        rows.append({"kernel": name, **(skipped if missing else run(name))})
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print(f"# {name}: {rows[-1]}", flush=True)
    return int(any(row["outcome"] not in ("passed", "skipped") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
