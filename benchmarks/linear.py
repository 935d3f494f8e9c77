"""Log-probs and policy loss from hidden states, against bare matrix products and baselines.

`gemm_1` and `gemm_3` are the products alone, over as many rows at once: torch.mm in the dtype of
the inputs, also where ours leaves float32. They bound the forward, and forward + backward of
`linear_policy_loss`. On a CPU without fast products of that dtype they are float32, and baselines,
which would take minutes, are left out. `trainer_head` is the output head of the trainer for a 135M
and a 0.5B model: in one pass, in two steps whose logits are computed again or kept, and with [T, V]
logits; each with all rows active and with half of them (on a GPU ours is told which).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _baselines
from benchmarks._bench import OURS, Bench, Check, largest_errors
from hybridengine.kernels import (
    has_fast_products,
    linear_policy_loss,
    linear_token_log_probs,
    policy_loss,
)
from hybridengine.kernels import token_log_probs as from_logits
from hybridengine.kernels.linear.arguments import check_budget
from hybridengine.kernels.linear.chunks import Chunks

CLIP = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.9}
# Response tokens of a micro-batch, and the heads of SmolLM2-135M and Qwen2.5-0.5B.
HEADS = ((2048, 576, 49_152), (1024, 896, 151_936))
FEW = 128  # rows of which results are compared
Gradients = tuple[Tensor, ...]


def shapes(bench: Bench) -> list[tuple[int, int, int, torch.dtype]]:
    if bench.quick:
        return [(64, 64, 2000, torch.float32), (64, 64, 2000, torch.bfloat16)]
    if bench.device.type == "cuda":
        return [(8192, 4096, 128_256, torch.bfloat16)]
    sizes = [(512, 1024, 151_936), (4096, 1024, 49_152)]
    return [(*size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]


def run(bench: Bench) -> None:
    for rows, width, vocab, dtype in shapes(bench):
        problem = Problem(bench, rows, width, vocab, dtype)
        forward(bench, problem)
        training(bench, problem)
    for size in [(64, 64, 2000)] if bench.quick else HEADS:
        head(bench, Problem(bench, *size, torch.bfloat16))


class Problem:
    """Random hidden states [T, H], weight [V, H] and arguments of the loss."""

    def __init__(self, bench: Bench, rows: int, width: int, vocab: int, dtype: torch.dtype):
        generator = torch.Generator(bench.device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=bench.device)
        self.hidden = draw(rows, width).to(dtype)
        self.weight = (draw(vocab, width) * width**-0.5).to(dtype)
        self.token_ids = torch.randint(0, vocab, (rows,), generator=generator, device=bench.device)
        self.advantages = draw(rows)
        with torch.no_grad():
            log_probs = linear_token_log_probs(self.hidden, self.weight, self.token_ids)[0]
        self.old_log_probs = log_probs + 0.05 * draw(rows)  # most rows have a nonzero gradient
        self.is_wanted = bench.is_wanted
        self.shape, self.dtype = f"T={rows} H={width} V={vocab}", dtype
        self.gemm_flops = 2 * rows * width * vocab

    def half_zero_advantages(self) -> Tensor:
        advantages = self.advantages.clone()
        advantages[::2] = 0
        return advantages

    def half_of_rows(self) -> Tensor:
        """The rows with nonzero advantages among those."""
        return torch.arange(1, len(self.advantages), 2, device=self.advantages.device)

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def check_cross_entropy(self, functions: Mapping[str, Callable[..., Tensor]]) -> Check:
        """Compare the mean cross-entropy (hidden, weight, labels) of FEW rows, and its gradients.

        Float64 is right.
        """
        hidden, ids = self.hidden[:FEW], self.token_ids[:FEW]

        def results(function: Callable[..., Tensor], dtype: torch.dtype) -> Gradients:
            h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, self.weight))
            loss = function(h, w, ids)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        exact = results(lambda h, w, ids: F.cross_entropy(h @ w.t(), ids), torch.float64)
        return Check({n: partial(results, f, self.dtype) for n, f in functions.items()}, exact)

    def with_fast_products(self, baselines: _baselines.Available) -> _baselines.Available:
        """Leave out all baselines where this CPU has no fast products of the dtype.

        Those that were not chosen are not run at all.
        """
        functions, missing = baselines
        functions = {name: f for name, f in functions.items() if self.is_wanted(name)}
        if has_fast_products(self.dtype, self.hidden.device):
            return functions, missing
        reason = f"this CPU has no fast {self.dtype} products"
        return {}, missing | dict.fromkeys(functions, reason)

    def compare(
        self,
        bench: Bench,
        op: str,
        pass_: str,
        calls: Mapping[str, Callable[[], Any]],
        missing: dict[str, str],
        errors: dict[str, float] | None = None,
        check: Check | None = None,
    ) -> None:
        flops = self.gemm_flops * (1 if pass_ == "forward" else 3)
        limits: dict[str, Any] = {"flops": flops, "peak": "gemm", "errors": errors, "check": check}
        bench.compare(op, pass_, self.shape, self.dtype, calls, **limits)
        bench.leave_out(op, pass_, self.shape, self.dtype, missing)


def forward(bench: Bench, p: Problem) -> None:
    baselines, missing = p.with_fast_products(_baselines.from_hidden())
    more, more_missing = p.with_fast_products(_baselines.forward_from_hidden())
    baselines, missing = baselines | more, missing | more_missing
    functions = {OURS: linear_token_log_probs, **baselines}
    few = slice(0, 16)
    exact = _baselines.exact(p.hidden[few].double() @ p.weight.double().t(), p.token_ids[few])
    given = (p.hidden[few], p.weight, p.token_ids[few])
    check = Check({n: partial(first, f, *given) for n, f in baselines.items()}, exact[:1])
    with torch.no_grad():
        errors = largest_errors(functions, given, exact)
        calls: dict[str, Callable] = {
            n: partial(f, p.hidden, p.weight, p.token_ids) for n, f in functions.items()
        }
        calls["gemm_1"] = bare_products(p, 1)
        p.compare(bench, "linear_logprob", "forward", calls, missing, errors, check)


def first(function: Callable[..., tuple[Tensor, ...]], *arguments: Tensor) -> tuple[Tensor]:
    return (function(*arguments)[0],)


def training(bench: Bench, p: Problem) -> None:
    """Loss, forward and backward, gradients of hidden states and weight."""
    half_zero, half = p.half_zero_advantages(), p.half_of_rows()

    def fused(advantages: Tensor, active_rows: Tensor | None = None) -> Gradients:
        h, w = p.leaves()
        given = {"old_log_probs": p.old_log_probs, "advantages": advantages, **CLIP}
        loss = linear_policy_loss(h, w, p.token_ids, active_rows=active_rows, **given)[0]
        return torch.autograd.grad(loss, (h, w))

    def from_log_probs(log_prob_function: Callable) -> Gradients:
        h, w = p.leaves()
        log_probs = log_prob_function(h, w, p.token_ids)[0]
        loss = policy_loss(log_probs, p.old_log_probs, p.advantages, **CLIP)[0]
        return torch.autograd.grad(loss, (h, w))

    def from_loss(loss_function: Callable) -> Gradients:
        h, w = p.leaves()
        loss = loss_function(h, w, p.token_ids, p.advantages, p.old_log_probs)
        return torch.autograd.grad(loss, (h, w))

    log_probs, missing = p.with_fast_products(_baselines.from_hidden())
    losses, missing_losses = p.with_fast_products(_baselines.loss_from_hidden())
    calls: dict[str, Callable[[], Any]] = {
        OURS: partial(fused, p.advantages),
        f"{OURS}_half_inactive": partial(fused, half_zero, half),
        f"{OURS}_recompute": partial(from_log_probs, linear_token_log_probs),
        "gemm_3": bare_products(p, 3),
        **{name: partial(from_log_probs, f) for name, f in log_probs.items()},
        **{name: partial(from_loss, f) for name, f in losses.items()},
    }
    means: dict[str, Callable[..., Tensor]] = {
        name: partial(mean_of_log_probs, f) for name, f in log_probs.items()
    }
    means |= {name: f for name, f in losses.items() if name.endswith("_cross_entropy")}
    check = p.check_cross_entropy(means)
    p.compare(bench, "linear_policy_loss", "both", calls, missing | missing_losses, check=check)


def mean_of_log_probs(function: Callable[..., tuple[Tensor, ...]], *arguments: Tensor) -> Tensor:
    return -function(*arguments)[0].mean()


def head(bench: Bench, p: Problem) -> None:
    """One micro-batch at the output head of the trainer, and with logits."""

    def one_pass(advantages: Tensor, active_rows: Tensor | None = None) -> Gradients:
        h, w = p.leaves()
        given = {"old_log_probs": None, "advantages": advantages, "active_rows": active_rows}
        return torch.autograd.grad(
            linear_policy_loss(h, w, p.token_ids, **given, **CLIP)[0], (h, w)
        )

    def two_steps(
        log_probs_of: Callable, advantages: Tensor, active_rows: Tensor | None = None
    ) -> Gradients:
        h, w = p.leaves()
        log_probs, entropy = log_probs_of(h, w, p.token_ids)
        loss = policy_loss(log_probs, None, advantages, entropy=entropy, **CLIP)[0]
        return torch.autograd.grad(loss, (h, w))

    def with_logits(h: Tensor, w: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(h.float(), w.float())
        return from_logits(logits, token_ids, inplace_backward=True)

    recomputing, keeping = (
        partial(linear_token_log_probs, budget_bytes=budget_bytes)
        for budget_bytes in (2**28, 2**33)
    )
    functions: dict[str, Callable[..., Gradients]] = {
        OURS: one_pass,
        f"{OURS}_two_steps": partial(two_steps, recomputing),
        f"{OURS}_two_steps_kept": partial(two_steps, keeping),
        "full_logits": partial(two_steps, with_logits),
    }
    calls: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        calls[name] = partial(function, p.advantages)
        calls[f"{name}_half_inactive"] = partial(
            function, p.half_zero_advantages(), p.half_of_rows()
        )
    p.compare(bench, "trainer_head", "both", calls, {})


def bare_products(p: Problem, count: int) -> Callable[[], None]:
    """Return a call of the logits product (count 1), or of it and both gradient products (3)."""
    budget_bytes, num_rows = check_budget("linear_token_log_probs", p.hidden, None), len(p.hidden)
    chunks = Chunks(p.hidden, p.weight, None, budget_bytes, False, num_rows if count == 3 else 0)
    step = chunks.rows if count == 1 else len(chunks.grad_logits)
    hidden_in, weight = p.hidden, p.weight
    if not has_fast_products(p.dtype, p.hidden.device):
        hidden_in, weight = hidden_in.float(), weight.float()

    def call() -> None:
        buffer = hidden_in.new_empty(min(step, num_rows), len(weight))
        total = torch.empty_like(weight) if count == 3 else None
        for begin in range(0, num_rows, step):
            hidden = hidden_in[begin : begin + step]
            logits = torch.mm(hidden, weight.t(), out=buffer[: len(hidden)])
            if total is not None:
                torch.mm(logits, weight)
                torch.addmm(total, logits.t(), hidden, beta=float(begin > 0), out=total)

    return torch.no_grad()(call)
