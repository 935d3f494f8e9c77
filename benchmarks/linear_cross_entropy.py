"""Cross-entropy of SFT from hidden states, forward and backward, both gradients.

`gemm_3` are the three products alone, as in `benchmarks.linear`. `hybridengine_half_ignored`: half
of the labels are ignored; `hybridengine_smoothing`: with label smoothing and z-loss. On a CPU
without fast bfloat16 products only the head of SmolLM2-135M, of the sizes of `benchmarks.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import _baselines
from benchmarks._bench import OURS, Bench
from benchmarks.linear import HEADS, Gradients, Problem, bare_products, shapes
from hybridengine.kernels import has_fast_products, linear_cross_entropy


def run(bench: Bench) -> None:
    sizes = shapes(bench)
    if not (bench.quick or has_fast_products(torch.bfloat16, bench.device)):
        sizes = [(*HEADS[0], dtype) for dtype in (torch.float32, torch.bfloat16)]
    for rows, width, vocab, dtype in sizes:
        compare(bench, Problem(bench, rows, width, vocab, dtype))


def compare(bench: Bench, p: Problem) -> None:
    half = p.token_ids.clone()
    half[::2] = -100

    def ours(labels: Tensor, active_rows: Tensor | None = None, **options: float) -> Gradients:
        h, w = p.leaves()
        loss, _ = linear_cross_entropy(h, w, labels, active_rows=active_rows, **options)
        return torch.autograd.grad(loss, (h, w))

    def baseline(function: Callable[..., Tensor]) -> Gradients:
        h, w = p.leaves()
        return torch.autograd.grad(function(h, w, p.token_ids), (h, w))

    functions, missing = p.with_fast_products(_baselines.cross_entropy_from_hidden())
    calls: dict[str, Callable[[], Any]] = {
        OURS: partial(ours, p.token_ids),
        f"{OURS}_half_ignored": partial(ours, half, p.half_of_rows()),
        f"{OURS}_smoothing": partial(ours, p.token_ids, label_smoothing=0.1, lse_square_scale=1e-4),
        "gemm_3": bare_products(p, 3),
        **{name: partial(baseline, function) for name, function in functions.items()},
    }
    errors, check = loss_errors(p, functions), p.check_cross_entropy(functions)
    p.compare(bench, "linear_cross_entropy", "both", calls, missing, errors, check)


def loss_errors(p: Problem, functions: dict[str, Callable]) -> dict[str, float]:
    """Return the error of the mean loss of a few rows against float64."""
    few = slice(0, 16)
    logits = p.hidden[few].double() @ p.weight.double().t()
    exact = torch.nn.functional.cross_entropy(logits, p.token_ids[few])
    own = {OURS: lambda *arguments: linear_cross_entropy(*arguments)[0]}
    errors = {}
    with torch.no_grad():
        for name, function in (functions | own).items():
            try:
                loss = function(p.hidden[few], p.weight, p.token_ids[few])
            except Exception:  # `Bench.compare` records why
                continue
            errors[name] = (loss.double() - exact).abs().item()
    return errors
