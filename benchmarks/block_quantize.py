"""Quantizing a weight to FP8 in blocks of 128 x 128, against what vLLM does as it loads one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks._baselines import available, require_compile
from benchmarks._bench import OURS, Bench
from hybridengine.kernels import block_quantize


def run(bench: Bench) -> None:
    rows, columns = (200, 300) if bench.quick else (11008, 4096)  # gate_proj of a 7B model
    shape = f"{rows}x{columns}"
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(rows, columns, device=bench.device).to(dtype)
        baselines, missing = available(vllm=_vllm)
        calls: dict[str, Callable[[], object]] = {
            OURS: partial(block_quantize, weight),
            "eager": partial(block_quantize, weight, backend="reference"),
            **{name: partial(call, weight) for name, call in baselines.items()},
        }
        # Read once, as a block stays in a cache; the scales are 1/8000 of it.
        moved = weight.nbytes + weight.numel()
        bench.compare(
            "block_quantize", "forward", shape, dtype, calls, bytes_moved=moved, peak="copy"
        )
        bench.leave_out("block_quantize", "forward", shape, dtype, missing)


def _vllm() -> Callable:
    require_compile()
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return partial(per_block_cast_to_fp8, block_size=[128, 128])
