"""The experts of a mixture: products of tokens that are sorted by expert, and complete experts.

64 experts, 8 per token, uniformly random. `gemm` is one dense product of the same operations, which
reads one weight instead of 64: the limit. On a GPU, where torch's product is the default of
bfloat16, `hybridengine (triton)` is ours. Complete experts are transformers' Qwen3-MoE module with
each of its implementations; `batched_mm` copies a weight per token and expert, and is left out
where these copies exceed BATCHED_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks import _cute
from benchmarks._baselines import available
from benchmarks._bench import OURS, Bench, Check
from hybridengine.kernels import grouped_linear
from hybridengine.moe.experts import EXPERTS

NUM_EXPERTS, TOP_K = 64, 8
SHAPES = ((512, 1024, 768), (2048, 1024, 768), (512, 256, 128))  # tokens, hidden, intermediate
BATCHED_BYTES = 4 << 30
PASSES = ("forward", "forward+backward")


def run(bench: Bench) -> None:
    for tokens, hidden, inner in ((16, 32, 16),) if bench.quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            compare_products(bench, tokens, hidden, inner, dtype)
            compare_experts(bench, tokens, hidden, inner, dtype)


def routes(tokens: int) -> Tensor:
    """Return experts of every token, [tokens, TOP_K]."""
    return torch.rand(tokens, NUM_EXPERTS).topk(TOP_K).indices


def compare_products(bench: Bench, tokens: int, k: int, n: int, dtype: torch.dtype) -> None:
    expert_ids = routes(tokens).flatten()
    cu_counts = torch.zeros(NUM_EXPERTS + 1, dtype=torch.int32)
    cu_counts[1:] = expert_ids.bincount(minlength=NUM_EXPERTS).cumsum(0)
    make = partial(torch.randn, dtype=dtype, device=bench.device)
    x, weight = make(len(expert_ids), k), make(NUM_EXPERTS, n, k) * k**-0.5
    grad, cu_counts = make(len(expert_ids), n), cu_counts.to(bench.device)
    leaves = [t.requires_grad_() for t in (x, weight)]

    def loop(x: Tensor, weight: Tensor, cu_counts: Tensor) -> Tensor:
        parts = x.split(cu_counts.diff().tolist())
        return torch.cat([rows @ w.t() for rows, w in zip(parts, weight, strict=True)])

    def grouped_mm(x: Tensor, weight: Tensor, cu_counts: Tensor) -> Tensor:
        return nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=cu_counts[1:])

    def gemm(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
        return x @ weight.t()

    products = {OURS: grouped_linear, "loop": loop, "grouped_mm": grouped_mm, "gemm": gemm}
    shape = f"T={tokens} K={k} N={n}"
    if bench.device.type == "cuda":
        products[f"{OURS} (triton)"] = partial(grouped_linear, backend="triton")
    if bench.device.type == "cuda" and dtype == torch.bfloat16:
        peers, missing = available(quack=_cute.grouped_product)
        products |= peers
        for pass_ in PASSES:
            bench.leave_out("grouped_linear", pass_, shape, dtype, missing)
    flops = 2 * len(x) * n * k
    dense = [x, weight[0].detach().clone().requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out = loop(wide[0], wide[1], cu_counts)
    exact = {PASSES[0]: (out.detach(),), PASSES[1]: torch.autograd.grad(out, wide, grad.double())}
    own = {"gemm": dense}
    _compare(bench, shape, leaves, grad, products, flops, cu_counts, own_leaves=own, exact=exact)


def compare_experts(bench: Bench, tokens: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    experts = Qwen3MoeExperts(config).to(bench.device, dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=hidden**-0.5)
    make = partial(torch.randn, tokens, hidden, dtype=dtype, device=bench.device)
    x, grad, index = make().requires_grad_(), make(), routes(tokens).to(bench.device)
    weights = torch.rand(tokens, TOP_K, dtype=dtype, device=bench.device).requires_grad_()

    def call(implementation: str, x: Tensor, *_: Tensor) -> Tensor:
        config._experts_implementation = implementation
        return experts(x, index, weights)

    shape = f"experts T={tokens} H={hidden} I={inner}"
    names = {OURS: EXPERTS, "eager": "eager", "grouped_mm": "grouped_mm"}
    copies = tokens * TOP_K * 2 * inner * hidden * dtype.itemsize
    if copies <= BATCHED_BYTES:
        names["batched_mm"] = "batched_mm"
    else:
        reason = {"batched_mm": f"it copies weights of {copies / 2**30:.0f} GiB"}
        bench.leave_out("grouped_linear", "forward", shape, dtype, reason)
    forms = {name: partial(call, implementation) for name, implementation in names.items()}
    flops = 2 * tokens * TOP_K * 3 * inner * hidden
    _compare(bench, shape, [x, *experts.parameters(), weights], grad, forms, flops)


def _compare(
    bench: Bench,
    shape: str,
    leaves: list[Tensor],
    grad: Tensor,
    forms: Mapping[str, Callable[..., Tensor]],
    flops: int,
    *arguments: Tensor,
    own_leaves: Mapping[str, list[Tensor]] = MappingProxyType({}),
    exact: Mapping[str, tuple[Tensor, ...]] | None = None,
) -> None:
    """flops: of the forward. own_leaves: of forms that do not take `leaves`, by name.

    exact: results in float64 of both passes, of forms that take `leaves`.
    """

    def forward(form: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor]:
        with torch.no_grad():
            return (form(*leaves[:2], *arguments),)

    def both(form: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(form(*leaves[:2], *arguments), leaves, grad)

    for name, step, times in zip(PASSES, (forward, both), (1, 3), strict=True):
        calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {
            impl: partial(step, form, own_leaves.get(impl, leaves)) for impl, form in forms.items()
        }
        checked = {n: c for n, c in calls.items() if n not in own_leaves and not n.startswith(OURS)}
        check = Check(checked, exact[name]) if exact else None
        rate: dict[str, Any] = {"flops": flops * times, "peak": "gemm", "check": check}
        bench.compare("grouped_linear", name, shape, grad.dtype, calls, **rate)
