"""Newton-Schulz of Muon, compared with torch's, for SmolLM2-135M's matrices and larger ones.

`torch` is the function of `torch.optim.Muon`, one matrix at a time. The operations are those of all
products in full; ours computes half of the symmetric ones.
"""

from __future__ import annotations

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import orthogonalize

SHAPES = ((4, 192, 576), (4, 576, 576), (4, 576, 1536), (2, 1536, 576), (1, 2048, 2048))
STEPS = 5


def run(bench: Bench) -> None:
    for shape in ((2, 24, 40),) if bench.quick else SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            compare(bench, shape, dtype)


def compare(bench: Bench, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, device=bench.device)
    exact = orthogonalize(x.double())

    def torchs() -> torch.Tensor:
        coefficients = (3.4445, -4.7750, 2.0315)
        return torch.stack(
            [_zeropower_via_newtonschulz(one, coefficients, STEPS, 1e-7) for one in x]
        )

    calls = {OURS: lambda: orthogonalize(x)}
    if dtype == torch.bfloat16:  # torch's is in no other dtype
        calls["torch"] = torchs
    errors = {
        name: float((call().double() - exact).norm() / exact.norm()) for name, call in calls.items()
    }
    count, short, long = shape[0], min(shape[1:]), max(shape[1:])
    flops = STEPS * count * 2 * short * short * (2 * long + short)
    name = "x".join(map(str, shape))
    bench.compare(
        "orthogonalize", "fwd", name, dtype, calls, flops=flops, peak="gemm", errors=errors
    )
