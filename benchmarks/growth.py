"""Growth of time and memory of log-probs from hidden states with T and with V, with plots.

`python -m benchmarks growth` also writes growth_T.png and growth_V.png in benchmarks/results/.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks import _baselines
from benchmarks._bench import OURS, ROOT, Bench
from hybridengine.kernels import linear_token_log_probs

WIDTH = 256


def run(bench: Bench) -> None:
    scale = 16 if bench.device.type == "cuda" else 1
    tokens = [64, 128] if bench.quick else [256 * scale * 2**i for i in range(4)]
    vocabularies = [500, 1000] if bench.quick else [8192 * 2**i for i in range(4)]
    first = len(bench.rows)
    for rows in tokens:
        point(bench, "T", rows, vocabularies[-1])
    for vocab in vocabularies:
        point(bench, "V", tokens[-2], vocab)
    if not bench.quick:
        for axis in ("T", "V"):
            plot(bench.rows[first:], axis, bench.device_name)


def point(bench: Bench, axis: str, rows: int, vocab: int) -> None:
    """Forward and backward, both gradients, with a budget of 32 MiB for the logits."""
    generator = torch.Generator(bench.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=bench.device)
    hidden, weight = draw(rows, WIDTH), draw(vocab, WIDTH) / WIDTH**0.5
    token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=bench.device)

    def step(function: Callable) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
        log_probs, entropy = function(*leaves, token_ids)
        return torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves)

    functions: dict[str, Callable] = {
        OURS: partial(linear_token_log_probs, budget_bytes=2**25),
        "eager": _baselines.eager_from_hidden,
    }
    steps = {name: partial(step, function) for name, function in functions.items()}
    shape, flops = f"T={rows} V={vocab}", 6 * rows * WIDTH * vocab
    bench.compare(f"growth_{axis}", "both", shape, hidden.dtype, steps, flops=flops)


def plot(rows: list[dict], axis: str, device: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("# matplotlib is not installed: no plot")
        return
    figure, (time_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for name in (OURS, "eager"):
        chosen = [r for r in rows if r["op"] == f"growth_{axis}" and r["impl"] == name]
        column = 0 if axis == "T" else 1
        x = [int(r["shape"].split()[column].split("=")[1]) for r in chosen]
        time_axes.loglog(x, [r["ms_p50"] for r in chosen], "o-", label=name)
        memory_axes.semilogx(x, [r["peak_mib"] for r in chosen], "o-", label=name)
    for axes in (time_axes, memory_axes):
        axes.set_xticks(x, labels=[f"{n:,}" for n in x])
        axes.set_xticks([], minor=True)
    time_axes.set(xlabel=axis, ylabel="ms, forward + backward")
    memory_axes.set(xlabel=axis, ylabel="peak MiB, gradients included")
    time_axes.legend()
    figure.suptitle(f"log-probs from hidden states, H={WIDTH}: {device}", fontsize=9)
    figure.tight_layout()
    target = ROOT / "benchmarks" / "results" / f"growth_{axis}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
