"""The local moves of a reshard: many strided slices with a cast, against one torch call each."""

from __future__ import annotations

import torch
from hybridengine.kernels import strided_copy

from benchmarks.frame import OURS, Bench


def run(bench: Bench) -> None:
    hidden = 256 if bench.quick else 4096 if bench.device.type == "cuda" else 1024
    for source_dtype in (torch.float32, torch.bfloat16):
        layers(bench, hidden, 24, source_dtype)


def layers(bench: Bench, hidden: int, count: int, source_dtype: torch.dtype) -> None:
    """Row-parallel weights of `count` layers: the left half of the columns of each goes over."""
    target_dtype = torch.bfloat16
    sources = [
        torch.randn(hidden, hidden, device=bench.device).to(source_dtype) for _ in range(count)
    ]
    half = hidden // 2
    bucket = torch.empty(count * hidden * half, device=bench.device, dtype=target_dtype)
    table = torch.tensor(
        [
            [i, 0, 0, i * hidden * half, 1, 1, hidden, half, 0, 0, hidden, 1, 0, 0, half, 1]
            for i in range(count)
        ]
    )

    def eager():
        views = bucket.view(count, hidden, half)
        for source, view in zip(sources, views, strict=True):
            view.copy_(source[:, :half])

    moved = bucket.numel() * (sources[0].element_size() + bucket.element_size())
    bench.compare(
        "strided_copy",
        "pack",
        f"{count}x[{hidden},{half}]",
        source_dtype,
        {OURS: lambda: strided_copy(sources, [bucket], table), "eager": eager},
        bytes_moved=moved,
        limit="copy",
    )
