"""Checksums of tensors, equal in every process: of exact bits, and of values in a given dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hybridengine.kernels import bit_checksum

# Elements that `value_checksum` converts at a time, which take a few MiB. The same on all devices:
# the sum depends on it, and those that are compared may be of a CPU and of a GPU.
_CHUNK = 1 << 18


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
        part = part.to(dtype).contiguous()
        if part.is_floating_point():
            if part.itemsize == 1:
                part = part.half()  # exact; float8 has few operations
            part = part.masked_fill(part.isnan(), float("nan"))
        total += bit_checksum(part) * (2 * start + 1)
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
