"""Log-prob and entropy from logits: forward, and backward through both outputs."""

from __future__ import annotations

import torch
from hybridengine.kernels import logprob, token_log_probs

from benchmarks import peers
from benchmarks.frame import OURS, Bench, rms_error

NOT_COMPARED = {
    "liger": "its log-softmax of given logits is a Triton kernel, without entropy",
    "cut_cross_entropy": "takes hidden states, not logits: see linear_logprob",
}


def shapes(bench: Bench) -> list[tuple[int, int]]:
    if bench.quick:
        return [(32, 2000)]
    if bench.device.type == "cuda":
        return [(8192, 151_936), (4096, 49_152)]
    return [(512, 151_936), (4096, 49_152)]


def run(bench: Bench) -> None:
    for name, why in NOT_COMPARED.items():
        print(f"# {name}: {why}")
    for rows, vocab in shapes(bench):
        for dtype in (torch.float32, torch.bfloat16):
            one_shape(bench, rows, vocab, dtype)


def one_shape(bench: Bench, rows: int, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(bench.device).manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, device=bench.device, dtype=dtype) * 2
    token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=bench.device)
    functions = {OURS: token_log_probs, **peers.from_logits()}
    exact = peers.exact(logits[:16], token_ids[:16])
    errors = {
        name: max(
            rms_error(got, want)
            for got, want in zip(function(logits[:16], token_ids[:16]), exact, strict=True)
        )
        for name, function in functions.items()
    }
    shape = f"T={rows} V={vocab}"
    with torch.no_grad():
        bench.compare(
            "logprob",
            "forward",
            shape,
            dtype,
            {name: lambda f=f: f(logits, token_ids) for name, f in functions.items()},
            bytes_moved=logits.nbytes,
            limit="read",
            errors=errors,
        )
    calls = {name: backward_call(f, logits, token_ids) for name, f in functions.items()}
    calls[f"{OURS}_inplace"] = inplace_call(logits.clone(), token_ids)
    bench.compare(
        "logprob", "backward", shape, dtype, calls, bytes_moved=2 * logits.nbytes, limit="copy"
    )


def backward_call(function, logits, token_ids):
    """The gradient of both outputs alone; the graph is built here, once, at the first call."""
    state: list = []

    def call():
        if not state:
            leaf = logits.detach().requires_grad_()
            state.append((leaf, function(leaf, token_ids)))
        leaf, outputs = state[0]
        ones = [torch.ones_like(output) for output in outputs]
        return torch.autograd.grad(outputs, leaf, ones, retain_graph=True)

    return call


def inplace_call(logits, token_ids):
    """In place the logits are used up, so the kernel itself is called, on what it left behind."""
    plain = logprob.RowOptions(1.0, None, 1.0, 0.0, -100, None, None, "")
    with torch.no_grad():
        results = list(logprob.rows_forward(logits, token_ids, plain, False, None)[:4])
    ones = torch.ones_like(results[0])
    return lambda: logprob.rows_backward(
        logits, logits, token_ids, plain, results, ones, ones, None
    )
