"""Checksums of tensors, equal in every process: of exact bits, and of values in a given dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hybridengine.kernels import bit_checksum

_CHUNK = 1 << 18  # elements that `value_checksum` converts at a time: it takes a few MiB
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return `bit_checksum` of each tensor.

    It detects writes to a frozen parameter, which version counters do not: optimizers and
    checkpoint loaders bypass those.
    """
    return torch.stack([bit_checksum(t) for t in tensors]).tolist() if tensors else []


def value_checksum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a checksum (int64 scalar on the same device) of `values`, any strides, as `dtype`.

    It depends on the order of the elements, not on their strides. All NaNs count as one: their
    payload has no meaning, and casts do not keep it.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 0
    for part in chunks(values):
        part = part.to(dtype).contiguous().view(-1)
        if part.is_floating_point():
            if part.itemsize == 1:
                part = part.half()  # exact; float8 has few operations
            part = part.masked_fill(part.isnan(), float("nan"))
        total += _weighted_sum(part.view(_INTEGERS[part.itemsize]).to(torch.int64), start)
        start += part.numel()
    return total


def chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most 2^18 elements, in an order that depends on the shape alone."""
    if values.numel() <= _CHUNK:
        yield values
        return
    dim = next(d for d, size in enumerate(values.shape) if size > 1)
    for part in values.split(max(1, values.shape[dim] * _CHUNK // values.numel()), dim):
        yield from chunks(part)


def _weighted_sum(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the sum (int64, wrapping) of values[i] times an odd number made of start + i."""
    index = torch.arange(start, start + values.numel(), device=values.device)
    return index.mul_(_FACTOR).mul_(2).add_(1).mul_(values).sum()
