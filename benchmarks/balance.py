"""Balancing lengths over bins against verl's Karmarkar-Karp."""

from __future__ import annotations

import torch
from hybridengine.kernels import balance, imbalance

from benchmarks.frame import OURS, Bench


def run(bench: Bench) -> None:
    shapes = [(512, 8)] if bench.quick else [(4096, 16), (65536, 256)]
    try:
        from benchmarks._verl import seqlen_balancing
    except ImportError as error:
        print(f"# verl left out: {error}")
        seqlen_balancing = None
    for count, bins in shapes:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(count).log_normal_(6, 1, generator=generator).long().tolist()
        for equal_count in (False, True):
            compare(bench, lengths, bins, equal_count, seqlen_balancing)


def compare(bench: Bench, lengths: list[int], bins: int, equal_count: bool, theirs) -> None:
    implementations = {OURS: lambda: balance(lengths, bins, equal_count=equal_count)}
    # Above this size verl's free partition takes minutes: its states all hold every bin.
    if theirs is not None and (equal_count or len(lengths) <= 4096):
        implementations["verl"] = lambda: theirs.karmarkar_karp(lengths, bins, equal_count)
    for name, call in implementations.items():
        print(f"# {name}: {imbalance(lengths, call())}")
    bench.compare(
        "balance",
        "equal" if equal_count else "free",
        f"{len(lengths)} over {bins}",
        torch.int64,
        implementations,
    )
