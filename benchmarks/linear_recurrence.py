"""linear_recurrence against transformers' torch form, which runs each sequence alone, and fla.

flash-linear-attention is compared on a GPU where it is installed.

Gated DeltaNet with 16 heads of 128. Packed lengths are uniform or have a long tail; in a group, 8
responses continue one prompt, which transformers' form computes 8 times. Operations are those of
the form by chunks of 64 tokens, whichever form runs: 142 thousand a token and head forward, 400
thousand backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import linear_recurrence

HEADS, DIM = 16, 128
FLOPS = {"forward": 142_000, "both": 542_000}  # per token and head
UNIFORM = (512,) * 8
LONG_TAIL = (2_100, 800, 430, 260, 180, 120, 90, 60, 40, 16)
GROUP = (2_048, *(512,) * 8)


def run(bench: Bench) -> None:
    scale = 32 if bench.quick else 1
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in (("uniform", UNIFORM), ("long tail", LONG_TAIL)):
            compare(bench, name, [max(1, n // scale) for n in lengths], None, dtype)
    prompt, *responses = (n // scale for n in GROUP)
    compare(bench, "group", [prompt, *responses], [-1, *(0 for _ in responses)], torch.float32)
    compare(bench, "group alone", [prompt + n for n in responses], None, torch.float32)


def compare(
    bench: Bench, name: str, lengths: list[int], parents: list[int] | None, dtype: torch.dtype
) -> None:
    """parents: segments that others continue; transformers' form is left out then."""
    heads = 2 if bench.quick else HEADS
    tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(tokens, heads, DIM, generator=generator) for _ in range(4))
    g = -torch.rand(tokens, heads, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    operands = [q.to(dtype), k.to(dtype), v.to(dtype), g, beta]
    operands = [x.to(bench.device) for x in operands]
    grad = grad.to(bench.device, dtype)
    ends = torch.tensor([0, *lengths], device=bench.device).cumsum(0)
    options: dict[str, Any] = {"cu_seqlens": ends, "l2_norm": True}
    if parents is not None:
        options["parents"] = torch.tensor(parents, device=bench.device)

    def ours(*operands: Tensor) -> Tensor:
        return linear_recurrence(*operands, **options)[0]

    functions: dict[str, Callable[..., Tensor]] = {OURS: ours}
    if parents is None:
        functions["transformers"] = partial(_each_alone, lengths)
        if bench.device.type == "cuda" and find_spec("fla") is not None:
            functions["flash-linear-attention"] = partial(_fla, ends)

    def forward(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*operands)

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in operands]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    for pass_, call in (("forward", forward), ("both", both)):
        bench.compare(
            "linear_recurrence",
            pass_,
            f"{name} T={tokens} H={heads} D={DIM}",
            dtype,
            {impl: partial(call, function) for impl, function in functions.items()},
            flops=FLOPS[pass_] * tokens * heads,
            peak="gemm",
        )


def _fla(ends: Tensor, *operands: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found, unused-ignore]
        chunk_gated_delta_rule,
    )

    q, k, v, g, beta = (x[None] for x in operands)
    out: Tensor = chunk_gated_delta_rule(
        q, k, v, g, beta.to(q.dtype), cu_seqlens=ends, use_qk_l2norm_in_kernel=True
    )[0][0]
    return out


def _each_alone(lengths: list[int], *operands: Tensor) -> Tensor:
    chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule
    parts = zip(*(x[None].split(lengths, 1) for x in operands), strict=True)
    outs = [
        chunked(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        for q, k, v, g, beta in parts
    ]
    return torch.cat(outs, 1)[0]
