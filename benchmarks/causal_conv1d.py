"""causal_conv1d with SiLU against torch's conv1d, which runs each sequence alone.

The shapes of a Gated DeltaNet layer of Qwen3-Next: 8,192 channels, width 4. Bytes are those of the
input and the output, in the backward also of both gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import causal_conv1d

CHANNELS, WIDTH = 8_192, 4
LENGTHS = (2_100, 800, 430, 260, 180, 120, 90, 60, 40, 16)


def run(bench: Bench) -> None:
    channels = 256 if bench.quick else CHANNELS
    lengths = [max(1, n // 32) for n in LENGTHS] if bench.quick else list(LENGTHS)
    for dtype in (torch.float32, torch.bfloat16):
        compare(bench, lengths, channels, dtype)


def compare(bench: Bench, lengths: list[int], channels: int, dtype: torch.dtype) -> None:
    tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
    x, grad, weight = (
        torch.randn(*shape, generator=generator).to(bench.device, dtype)
        for shape in ((tokens, channels), (tokens, channels), (channels, WIDTH))
    )
    ends = torch.tensor([0, *lengths], device=bench.device).cumsum(0)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d(x, weight, cu_seqlens=ends, activation="silu")

    def each_alone(x: Tensor, weight: Tensor) -> Tensor:
        outs = []
        for part in x.split(lengths):
            out = F.conv1d(part.t()[None], weight[:, None], padding=WIDTH - 1, groups=channels)
            outs.append(F.silu(out[0, :, : len(part)]).t())
        return torch.cat(outs)

    functions: dict[str, Callable[..., Tensor]] = {OURS: ours, "torch": each_alone}

    def forward(function: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return function(x, weight)

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [y.detach().requires_grad_() for y in (x, weight)]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    for pass_, call, arrays in (("forward", forward, 2), ("both", both, 5)):
        calls: dict[str, Callable[[], Any]] = {
            impl: partial(call, function) for impl, function in functions.items()
        }
        bench.compare(
            "causal_conv1d",
            pass_,
            f"T={tokens} C={channels} W={WIDTH}",
            dtype,
            calls,
            bytes_moved=arrays * x.nbytes,
            peak="copy",
        )
