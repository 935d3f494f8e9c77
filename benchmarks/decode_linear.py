"""Linear layers of a decoding step: few rows, weights that are not in the cache.

The shapes are those of SmolLM2-135M, on a GPU of models with 0.5B and 7B parameters, where 4096
rows show what the fixed order of sums costs a trainer. Every call takes the next of many copies of
the weight, as a step takes the next layer. `share_of_limit` is of the machine's read bandwidth up
to 4 rows (32 on a GPU), of its rate of a large product beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels.decode_linear import inference_linear
from hybridengine.kernels.pages import prefer_huge_pages

SHAPES = {  # N, K
    "o_proj": (576, 576),
    "qkv_proj": (960, 576),
    "gate_up_proj": (3072, 576),
    "down_proj": (576, 1536),
    "head": (49_152, 576),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
GPU_SHAPES = {"down_proj": (896, 4864), "o_proj": (4096, 4096), "up_proj": (11_008, 4096)}
GPU_ROWS = (1, 8, 32, 64, 4096)
COPIES_BYTES = 256 << 20  # of all copies of a weight: several times the cache


def run(bench: Bench) -> None:
    on_gpu = bench.device.type == "cuda"
    shapes: dict[str, tuple[int, int]] = GPU_SHAPES if on_gpu else SHAPES
    row_counts: tuple[int, ...] = GPU_ROWS if on_gpu else ROWS
    if bench.quick:
        shapes, row_counts = {"quick": (96, 64)}, (1, 32)
    for dtype in (torch.bfloat16,) if on_gpu else (torch.bfloat16, torch.float32):
        for name, (n, k) in shapes.items():
            copies = max(2, (2**20 if bench.quick else COPIES_BYTES) // (n * k * dtype.itemsize))
            weights = torch.empty(copies, n, k, device=bench.device, dtype=dtype)
            prefer_huge_pages(weights.untyped_storage())  # as those of our engines
            weights.normal_(0, k**-0.5)
            for rows in row_counts:
                compare(bench, name, rows, weights)


def compare(bench: Bench, name: str, rows: int, weights: Tensor) -> None:
    """weights: [copies, N, K]."""
    _, n, k = weights.shape
    x = torch.randn(rows, k, device=bench.device).to(weights.dtype)
    ours = partial(inference_linear, max_rows=None) if x.is_cuda else inference_linear

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
            OURS: partial(multiply_next, ours, [0]),
            "torch": partial(multiply_next, torch.nn.functional.linear, [0]),
        },
        bytes_moved=weights.nbytes,
        flops=2 * rows * n * k * len(weights),
        peak="read" if rows <= (32 if x.is_cuda else 4) else "gemm",
    )
