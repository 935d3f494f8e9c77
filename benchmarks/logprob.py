"""Log-prob and entropy from logits: forward, and backward through both outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import _baselines, _cute
from benchmarks._bench import OURS, Bench, Check, largest_errors
from hybridengine.kernels import token_log_probs
from hybridengine.kernels.logprob.options import row_options
from hybridengine.kernels.logprob.rows import backend_for, rows_backward, rows_forward

NOT_COMPARED = {
    "liger": "its log-softmax of given logits is a Triton kernel, without entropy",
    "cut_cross_entropy": "takes hidden states, not logits: see the benchmark linear",
}


def shapes(bench: Bench) -> list[tuple[int, int]]:
    if bench.quick:
        return [(32, 2000)]
    if bench.device.type == "cuda":
        return [(8192, 151_936), (4096, 49_152)]
    return [(512, 151_936), (4096, 49_152)]


def run(bench: Bench) -> None:
    baselines, missing = _baselines.from_logits()
    _baselines.print_missing(NOT_COMPARED)
    for rows, vocab in shapes(bench):
        for dtype in (torch.float32, torch.bfloat16):
            one_shape(bench, rows, vocab, dtype, baselines)
            for pass_ in ("forward", "backward"):
                bench.leave_out("logprob", pass_, f"T={rows} V={vocab}", dtype, missing)


def one_shape(
    bench: Bench, rows: int, vocab: int, dtype: torch.dtype, baselines: dict[str, Callable]
) -> None:
    generator = torch.Generator(bench.device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, device=bench.device, dtype=dtype) * 2
    token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=bench.device)
    functions: dict[str, Callable] = {OURS: token_log_probs, **baselines}
    few = (logits[:16], token_ids[:16])
    exact = _baselines.exact(*few)
    errors = largest_errors(functions, few, exact)
    shape = f"T={rows} V={vocab}"
    with torch.no_grad():
        calls: dict[str, Callable] = {
            name: partial(f, logits, token_ids) for name, f in functions.items()
        }
        bench.compare(
            "logprob",
            "forward",
            shape,
            dtype,
            calls,
            bytes_moved=logits.nbytes,
            peak="read",
            errors=errors,
            check=Check({n: partial(log_probs, f, *few) for n, f in baselines.items()}, exact[:1]),
        )
    calls = {name: backward_call(f, logits, token_ids) for name, f in functions.items()}
    calls[f"{OURS}_inplace"] = inplace_call(logits.clone(), token_ids)
    if "quack" in baselines:
        in_place = _cute.log_probs(inplace_backward=True)
        calls["quack_inplace"] = backward_call(in_place, logits.clone(), token_ids)
    leaf = few[0].double().requires_grad_()
    right = torch.autograd.grad(_baselines.exact(leaf, few[1])[0].sum(), leaf)
    check = Check({n: partial(gradient, f, *few) for n, f in baselines.items()}, right)
    sizes: dict[str, Any] = {"bytes_moved": 2 * logits.nbytes, "peak": "copy", "check": check}
    bench.compare("logprob", "backward", shape, dtype, calls, **sizes)


def log_probs(function: Callable, logits: Tensor, token_ids: Tensor) -> tuple[Tensor]:
    with torch.no_grad():
        return (function(logits, token_ids)[0],)


def gradient(function: Callable, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of the sum of the log-probs."""
    leaf = logits.detach().requires_grad_()
    return torch.autograd.grad(function(leaf, token_ids)[0].sum(), leaf)


def backward_call(function: Callable, logits: Tensor, token_ids: Tensor) -> Callable[[], object]:
    """Return a call of the backward alone; the first call also runs the forward."""
    state: list = []

    def call() -> object:
        if not state:
            leaf = logits.detach().requires_grad_()
            state.append((leaf, function(leaf, token_ids)))
        leaf, outputs = state[0]
        ones = [torch.ones_like(output) for output in outputs]
        return torch.autograd.grad(outputs, leaf, ones, retain_graph=True)

    return call


def inplace_call(logits: Tensor, token_ids: Tensor) -> Callable[[], object]:
    """Return a call of the backward kernel in place, which overwrites the logits every time."""
    options = row_options("logprob", token_ids, logits.shape[-1])
    with torch.no_grad():
        backend = backend_for(logits, None)
        results = list(rows_forward(logits, token_ids, options, False, backend))
    ones = torch.ones_like(results[0])
    return lambda: rows_backward(logits, logits, token_ids, options, results, ones, ones, backend)
