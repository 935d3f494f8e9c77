"""Log-probs and policy loss from hidden states, against bare matrix products and peers.

`gemm_1` and `gemm_3` are the products alone, in the same chunks and as fast as PyTorch has them:
torch.mm in the dtype of the inputs, also where ours leaves float32. They are the limit of the
forward, and of forward + backward of `linear_policy_loss`. On a CPU without fast products of that
dtype they are float32, and peers, who would take minutes, are left out. `head_...` is the trainer's
output head with [R, V] logits and without, at the head of a 135M model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from hybridengine.kernels import (
    has_fast_products,
    linear_policy_loss,
    linear_token_log_probs,
    policy_loss,
)
from hybridengine.kernels import token_log_probs as from_logits
from hybridengine.kernels.linear.arguments import budget
from hybridengine.kernels.linear.logprob import Chunks

from benchmarks import _linear_peers, peers
from benchmarks.frame import KEYS, OURS, Bench, rms_error

CLIP = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.9}


def shapes(bench: Bench) -> list[tuple[int, int, int, torch.dtype]]:
    if bench.quick:
        return [(64, 64, 2000, torch.float32), (64, 64, 2000, torch.bfloat16)]
    if bench.device.type == "cuda":
        return [(8192, 4096, 131_072, torch.bfloat16)]
    sizes = [(512, 1024, 151_936), (4096, 1024, 49_152)]
    return [(*size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]


def run(bench: Bench) -> None:
    for rows, width, vocab, dtype in shapes(bench):
        problem = Problem(bench, rows, width, vocab, dtype)
        forward(bench, problem)
        training(bench, problem)
    head(bench, Problem(bench, *((64, 64, 2000) if bench.quick else HEAD), torch.bfloat16))


HEAD = (2048, 576, 49_152)  # response tokens of a micro-batch, and SmolLM2-135M's head


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

    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()

    def compare(self, bench: Bench, op: str, pass_: str, calls: dict, **options) -> None:
        flops = self.gemm_flops * (1 if pass_ == "forward" else 3)
        bench.compare(
            op, pass_, self.shape, self.dtype, calls, flops=flops, limit="gemm", **options
        )


def forward(bench: Bench, p: Problem) -> None:
    found, missing = found_peers(p, _linear_peers.log_probs())
    functions = {OURS: linear_token_log_probs, **found}
    few = slice(0, 16)
    exact = peers.exact(p.hidden[few].double() @ p.weight.double().t(), p.token_ids[few])
    with torch.no_grad():
        errors = {
            name: max(
                rms_error(got, want)
                for got, want in zip(f(p.hidden[few], p.weight, p.token_ids[few]), exact)  # noqa: B905
            )
            for name, f in functions.items()
        }
        calls = {n: partial(f, p.hidden, p.weight, p.token_ids) for n, f in functions.items()}
        calls["gemm_1"] = bare_products(p, 1)
        p.compare(bench, "linear_logprob", "forward", calls, errors=errors)
    left_out(bench, "linear_logprob", "forward", p, missing)


def training(bench: Bench, p: Problem) -> None:
    """Loss, forward and backward, gradients of hidden states and weight."""
    dead = p.advantages.clone()
    dead[::2] = 0

    def fused(advantages):
        h, w = p.leaves()
        given = {"old_log_probs": p.old_log_probs, "advantages": advantages, **CLIP}
        loss = linear_policy_loss(h, w, p.token_ids, **given)[0]
        return torch.autograd.grad(loss, (h, w))

    def two_steps(log_prob_function):
        h, w = p.leaves()
        log_probs = log_prob_function(h, w, p.token_ids)[0]
        loss = policy_loss(log_probs, p.old_log_probs, p.advantages, **CLIP)[0]
        return torch.autograd.grad(loss, (h, w))

    def in_one(loss_function):
        h, w = p.leaves()
        loss = loss_function(h, w, p.token_ids, p.advantages, p.old_log_probs)
        return torch.autograd.grad(loss, (h, w))

    found, missing = found_peers(p, _linear_peers.log_probs())
    in_one_peers, also_missing = found_peers(p, _linear_peers.found(liger=_linear_peers.liger_grpo))
    calls = {
        OURS: partial(fused, p.advantages),
        f"{OURS}_half_dead": partial(fused, dead),
        f"{OURS}_recompute": partial(two_steps, linear_token_log_probs),
        "gemm_3": bare_products(p, 3),
        **{name: partial(two_steps, f) for name, f in found.items()},
        **{name: partial(in_one, f) for name, f in in_one_peers.items()},
    }
    p.compare(bench, "linear_policy_loss", "both", calls)
    left_out(bench, "linear_policy_loss", "both", p, missing | also_missing)


def head(bench: Bench, p: Problem) -> None:
    """One micro-batch at the trainer's output head: what model/head.py does, and did before."""

    def step(log_probs_of):
        h, w = p.leaves()
        log_probs, entropy = log_probs_of(h, w)
        loss = policy_loss(log_probs, p.old_log_probs, p.advantages, entropy=entropy, **CLIP)[0]
        return torch.autograd.grad(loss, (h, w))

    def whole(h, w):
        logits = F.linear(h.float(), w.float())
        return from_logits(logits, p.token_ids, inplace_backward=True)

    calls = {
        OURS: partial(step, lambda h, w: linear_token_log_probs(h, w, p.token_ids)),
        "whole_logits": partial(step, whole),
    }
    p.compare(bench, "trainer_head", "both", calls)


def found_peers(p: Problem, peers: tuple[dict, dict]) -> tuple[dict, dict]:
    """(functions, why the others are missing)."""
    found, missing = peers
    if has_fast_products(p.dtype, p.hidden.device):
        return found, missing
    return {}, missing | dict.fromkeys(found, f"this CPU has no fast {p.dtype} products")


def bare_products(p: Problem, count: int) -> Callable[[], None]:
    """1: the logits; 3: those and both gradient products, with nothing between them."""
    chunks = Chunks(p.hidden, p.weight, None, budget(p.hidden, None), False, count == 3)
    slices, vocab = list(chunks.slices()), p.weight.shape[0]
    hidden_in, weight = p.hidden, p.weight
    if not has_fast_products(p.dtype, p.hidden.device):
        hidden_in, weight = hidden_in.float(), weight.float()

    def call() -> None:
        room = hidden_in.new_empty(slices[0].stop, vocab)
        total = torch.zeros_like(weight) if count == 3 else None
        for rows in slices:
            hidden = hidden_in[rows]
            logits = torch.mm(hidden, weight.t(), out=room[: hidden.shape[0]])
            if total is not None:
                torch.mm(logits, weight)
                total.addmm_(logits.t(), hidden)

    return torch.no_grad()(call)


def left_out(bench: Bench, op: str, pass_: str, p: Problem, missing: dict[str, str]) -> None:
    """Rows of the peers that cannot run: no figures, and why."""
    for name, why in missing.items():
        print(f"# {op} {pass_} {p.shape}: {name} not measured: {why}", flush=True)
        bench.rows.append(
            dict.fromkeys(KEYS)
            | {"op": op, "pass": pass_, "impl": name, "shape": p.shape, "note": why,
               "dtype": str(p.dtype).removeprefix("torch."), "device": bench.device_name}
        )  # fmt: skip
