"""Balancing sequence lengths against verl's Karmarkar-Karp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks._baselines import verl_algorithms
from benchmarks._bench import OURS, Bench
from hybridengine.kernels import balance, imbalance


def run(bench: Bench) -> None:
    shapes = [(512, 8)] if bench.quick else [(4096, 16), (65536, 256)]
    verl = verl_algorithms()
    for count, bins in shapes:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(count).log_normal_(6, 1, generator=generator).long().tolist()
        for equal_count in (False, True):
            compare(bench, lengths, bins, equal_count, verl)


def compare(
    bench: Bench, lengths: list[int], bins: int, equal_count: bool, verl: Any | None
) -> None:
    implementations: dict[str, Callable[[], list]] = {
        OURS: lambda: balance(lengths, bins, equal_count=equal_count)
    }
    # Above this size verl's partition without equal counts takes minutes.
    if verl is not None and (equal_count or len(lengths) <= 4096):
        karmarkar_karp = verl.seqlen_balancing.karmarkar_karp
        implementations["verl"] = partial(karmarkar_karp, lengths, bins, equal_count)
    for name, call in implementations.items():
        print(f"# {name}: {imbalance(lengths, call())}")
    kind, shape = "equal" if equal_count else "free", f"{len(lengths)} over {bins}"
    bench.compare("balance", kind, shape, torch.int64, implementations)
