"""Log-probs and policy loss from hidden states, against bare matrix products and peers.

`gemm_1` and `gemm_3` are the products alone, in the same chunks: the limit of the forward and of
forward + backward of `linear_policy_loss`.
"""

from __future__ import annotations

from functools import partial

import torch
from hybridengine.kernels import linear_policy_loss, linear_token_log_probs, policy_loss
from hybridengine.kernels.linear_logprob import Chunks, accumulator, budget

from benchmarks import peers
from benchmarks.frame import OURS, Bench, rms_error


def shapes(bench: Bench) -> list[tuple[int, int, int, torch.dtype]]:
    if bench.quick:
        return [(64, 64, 2000, torch.float32), (64, 64, 2000, torch.bfloat16)]
    if bench.device.type == "cuda":
        return [(8192, 4096, 131_072, torch.bfloat16)]
    return [
        (512, 1024, 151_936, torch.float32),
        (512, 1024, 151_936, torch.bfloat16),
        (4096, 1024, 49_152, torch.float32),
    ]


def run(bench: Bench) -> None:
    for rows, width, vocab, dtype in shapes(bench):
        problem = Problem(bench, rows, width, vocab, dtype)
        forward(bench, problem)
        training(bench, problem)


class Problem:
    def __init__(self, bench: Bench, rows: int, width: int, vocab: int, dtype: torch.dtype):
        generator = torch.Generator(bench.device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=bench.device)
        self.hidden = draw(rows, width).to(dtype)
        self.weight = (draw(vocab, width) * width**-0.5).to(dtype)
        self.token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=bench.device)
        self.advantages = draw(rows)
        with torch.no_grad():
            found = linear_token_log_probs(self.hidden, self.weight, self.token_ids)[0]
        self.old_log_probs = found + 0.05 * draw(rows)  # a few rows are clipped, most are alive
        self.shape, self.dtype = f"T={rows} H={width} V={vocab}", dtype
        self.gemm_flops = 2 * rows * width * vocab


def forward(bench: Bench, p: Problem) -> None:
    functions = {OURS: linear_token_log_probs, **peers.fused_linear()}
    few = slice(0, 16)
    exact = peers.exact(p.hidden[few].double() @ p.weight.double().t(), p.token_ids[few])
    errors = {
        name: max(
            rms_error(got.flatten(), want)
            for got, want in zip(f(p.hidden[few], p.weight, p.token_ids[few]), exact, strict=True)
        )
        for name, f in functions.items()
    }
    calls = {n: partial(f, p.hidden, p.weight, p.token_ids) for n, f in functions.items()}
    with torch.no_grad():
        bench.compare(
            "linear_logprob",
            "forward",
            p.shape,
            p.dtype,
            calls | {"gemm_1": bare_products(p, 1)},
            flops=p.gemm_flops,
            limit="gemm",
            errors=errors,
        )


def training(bench: Bench, p: Problem) -> None:
    """Loss, forward and backward, gradients of hidden states and weight."""
    dead = p.advantages.clone()
    dead[::2] = 0

    def fused(advantages):
        h, w = p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()
        loss = linear_policy_loss(h, w, p.token_ids, advantages, p.old_log_probs,
                                  clip_ratio_low=0.9, clip_ratio_high=0.9)[0]  # fmt: skip
        return torch.autograd.grad(loss, (h, w))

    def two_steps(log_prob_function):
        h, w = p.hidden.detach().requires_grad_(), p.weight.detach().requires_grad_()
        log_probs = log_prob_function(h, w, p.token_ids)[0].flatten()
        loss = policy_loss(log_probs, p.old_log_probs, p.advantages,
                           clip_ratio_low=0.9, clip_ratio_high=0.9)[0]  # fmt: skip
        return torch.autograd.grad(loss, (h, w))

    calls = {
        OURS: partial(fused, p.advantages),
        f"{OURS}_half_dead": partial(fused, dead),
        f"{OURS}_recompute": partial(two_steps, linear_token_log_probs),
        "gemm_3": bare_products(p, 3),
        **{name: partial(two_steps, f) for name, f in peers.fused_linear().items()},
    }
    bench.compare(
        "linear_policy_loss",
        "both",
        p.shape,
        p.dtype,
        calls,
        flops=3 * p.gemm_flops,
        limit="gemm",
    )


def bare_products(p: Problem, count: int):
    """1: the logits; 3: those and both gradient products, with nothing between them."""

    def call():
        chunks = Chunks(p.hidden, p.weight, None, budget(p.hidden, None), False, count == 3)
        total = accumulator(p.weight) if count == 3 else None
        for rows in chunks.slices():
            logits = chunks.logits(rows)
            if count == 3:
                chunks.hidden_grad(logits)
                chunks.add_weight_grad(total, logits, p.hidden[rows])

    return torch.no_grad()(call)
