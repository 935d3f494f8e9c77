"""Matrices for the quantization in blocks."""

from __future__ import annotations

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3 = torch.float8_e4m3fn


def matrix(kind: str, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n * k)
    x = torch.randn(n, k, generator=generator)
    match kind:
        case "zeros":
            x = torch.where(x > 0, 0.0, -0.0)
        case "denormals":  # of the input, and of float8 behind larger values
            x = x * torch.tensor([1e-40, 6e-8, 1e-6, 1.0])[torch.randint(4, x.shape)]
        case "midpoints":  # between two float8 values, if the largest is 448
            values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
            between = (values[1:] + values[:-1]) / 2
            x = between[torch.randint(len(between), x.shape)] * x.sign()
            x[::64, ::64] = 448
        case "wide":
            x = x * torch.exp2(torch.randint(-20, 12, x.shape).float())
        case "infinite":
            x[n // 2, k // 2] = float("inf")
            x[0, -1] = float("-inf")
        case "nan":
            x[n // 2, k // 2] = float("nan")
            x[n // 3, -1] = -float("nan")
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for the sign and payload of NaN."""
    integer = torch.uint8 if a.itemsize == 1 else torch.int32
    assert a.shape == b.shape and a.dtype == b.dtype
    both = a.isnan() & b.isnan()
    return bool((both | (a.view(integer) == b.view(integer))).all())
