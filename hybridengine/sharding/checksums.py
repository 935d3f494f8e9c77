"""Checksums of tensors' bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["sums_of_bits"]

_ROW = 1 << 10  # 64-bit words of a checksum's table row

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Per tensor a wrapping checksum of its bits; two passes over the memory.

    It tells a frozen parameter that was written to, which version counters do not: optimizers and
    checkpoint loaders go past them. Words are summed by row and by column of a table, and these
    sums by odd weights, so two words that change places show.
    """

    def of(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        words = flat[: flat.numel() // 8 * 8].view(torch.int64)
        rows = words.numel() // _ROW
        table = words[: rows * _ROW].view(rows, _ROW)
        rest = (words[table.numel() :], flat[words.numel() * 8 :].to(torch.int64))
        return torch.stack([_weighted(t) for t in (table.sum(0), table.sum(1), *rest)]).sum()

    return torch.stack([of(t) for t in tensors]).tolist() if tensors else []


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """int64, wrapping: the sum of the values times odd numbers that depend on their index."""
    weights = torch.arange(values.numel(), device=values.device).mul_(_MIX).mul_(2).add_(1)
    return weights.mul_(values).sum()
