"""On-policy distillation from hidden states, forward and backward of the student's gradients.

`hybridengine` is the JSD with beta 0.5, as are the baselines. `gemm_4` are the products alone:
three of the student and the logits of the teacher, which has the student's shape here, over as many
rows at once as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _baselines
from benchmarks._bench import OURS, Bench
from benchmarks.linear import Gradients, Problem, bare_products
from hybridengine.kernels import linear_distillation_loss

# Response tokens of a micro-batch, and the heads of SmolLM2-135M and Qwen2.5-0.5B.
HEADS = ((2048, 576, 49_152), (1024, 896, 151_936))
DIVERGENCES = {"": 0.5, "_forward_kl": 0.0, "_reverse_kl": 1.0}  # beta, by the end of a name


def run(bench: Bench) -> None:
    sizes = ((64, 64, 2000),) if bench.quick else HEADS
    for rows, width, vocab in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            compare(bench, Problem(bench, rows, width, vocab, dtype))


def eager(h: Tensor, w: Tensor, teacher: Tensor, teacher_weight: Tensor, beta: float) -> Tensor:
    """TRL's generalized_jsd_loss, from hidden states."""
    log_q = F.linear(h, w).float().log_softmax(-1)
    log_p = F.linear(teacher, teacher_weight).float().log_softmax(-1)
    if beta in (0.0, 1.0):
        pair = (log_p, log_q) if beta else (log_q, log_p)
        return F.kl_div(*pair, reduction="batchmean", log_target=True)
    weight = log_q.new_tensor(beta)
    mixture = torch.stack([log_q + torch.log1p(-weight), log_p + weight.log()]).logsumexp(0)
    of_teacher, of_student = (
        F.kl_div(mixture, x, reduction="batchmean", log_target=True) for x in (log_p, log_q)
    )
    return beta * of_teacher + (1 - beta) * of_student


def compare(bench: Bench, p: Problem) -> None:
    generator = torch.Generator(bench.device).manual_seed(1)
    teacher, teacher_weight = (
        x + 0.3 * torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) * x.std()
        for x in (p.hidden, p.weight)
    )

    def gradients(function: Callable[..., Any], beta: float) -> Gradients:
        h, w = p.leaves()
        return torch.autograd.grad(function(h, w, teacher, teacher_weight, beta), (h, w))

    def ours(*arguments: Any) -> Tensor:
        return linear_distillation_loss(*arguments[:4], beta=arguments[4])[0]

    student = bare_products(p, 3)
    logits_of_teacher = bare_products(p, 1)

    def products() -> None:
        student()
        logits_of_teacher()

    makers = {"eager": lambda: eager, "compile": lambda: _baselines.compiled(eager)}
    baselines, missing = p.with_fast_products(_baselines.available(**makers))
    calls: dict[str, Callable[[], Any]] = {"gemm_4": products}
    for name, beta in DIVERGENCES.items():
        calls[f"{OURS}{name}"] = partial(gradients, ours, beta)
    for name, function in baselines.items():
        calls[name] = partial(gradients, function, 0.5)
    bench.compare(
        "linear_distillation", "both", p.shape, p.dtype, calls, flops=4 * p.gemm_flops, peak="gemm"
    )
    bench.leave_out("linear_distillation", "both", p.shape, p.dtype, missing)
