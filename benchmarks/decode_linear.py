"""Linear layers of a decoding step: few rows, weights that are not in the cache.

The shapes are those of SmolLM2-135M. Every call takes the next of many copies of the weight, as a
step takes the next layer. `share_of_limit` is of the machine's read bandwidth up to 4 rows, of its
rate of a large product beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from hybridengine.kernels.decode_linear import inference_linear
from torch import Tensor

from benchmarks._bench import OURS, Bench

SHAPES = {  # N, K
    "o_proj": (576, 576),
    "qkv_proj": (960, 576),
    "gate_up_proj": (3072, 576),
    "down_proj": (576, 1536),
    "head": (49_152, 576),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
COPIES_BYTES = 256 << 20  # of all copies of a weight: several times the cache


def run(bench: Bench) -> None:
    shapes = {"quick": (96, 64)} if bench.quick else SHAPES
    for dtype in (torch.bfloat16, torch.float32):
        for name, (n, k) in shapes.items():
            copies = max(2, (2**20 if bench.quick else COPIES_BYTES) // (n * k * dtype.itemsize))
            weights = (torch.randn(copies, n, k) * k**-0.5).to(dtype)
            for rows in (1, 32) if bench.quick else ROWS:
                compare(bench, name, rows, weights)


def compare(bench: Bench, name: str, rows: int, weights: Tensor) -> None:
    """weights: [copies, N, K]."""
    _, n, k = weights.shape
    x = torch.randn(rows, k).to(weights.dtype)

    @torch.inference_mode()
    def multiply_next(linear: Callable[..., Tensor], position: list[int]) -> None:
        for _ in range(len(weights)):  # more than one: a product takes some microseconds
            position[0] = (position[0] + 1) % len(weights)
            linear(x, weights[position[0]], None)

    bench.compare(
        "decode_linear",
        "forward",
        f"{name} rows={rows}",
        weights.dtype,
        {
            OURS: partial(multiply_next, inference_linear, [0]),
            "torch": partial(multiply_next, torch.nn.functional.linear, [0]),
        },
        bytes_moved=weights.nbytes,
        flops=2 * rows * n * k * len(weights),
        peak="read" if rows <= 4 else "gemm",
    )
