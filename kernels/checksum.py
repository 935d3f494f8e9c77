"""bit_checksum: a checksum of the bits of a tensor, equal in every process and on every device.

The sum of w[i] x[i] modulo 2^64 over the 32-bit words x, unsigned, the last one padded with zeros,
with the weights w[0] = 2^32 + 1 and w[i] = 2 i - 1. Up to 2^31 words (8 GiB) these always change
it:

- bits that flip within one word: the weight is odd, so nothing but 0 times it is 0 modulo 2^64;
- two bits anywhere: unless they have the same position b in their words, the sum changes by an odd
  multiple of the lower one; else by 2^b (w ± w'), where b < 32 and 0 < |w ± w'| < 2^33;
- two words that change places: by (w - w')(x' - x), where |w - w'| <= 2^32 > |x' - x|;
- the same number d added to every word, as by `mul_(2)` of floats, or by ones instead of zeros: by
  d times the sum of n weights, (n - 1)^2 + 1 + 2^32, which is odd or twice an odd number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check as check
from ._backend import choose_backend, native, register_backends

register_backends("bit_checksum", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_FIRST_WEIGHT = (1 << 32) + 1
_ROW = 1 << 10  # words
_CHUNK = 1 << 22  # words that the reference converts at a time: 32 MiB


def bit_checksum(tensor: Tensor, *, backend: str | None = None) -> Tensor:
    """Return a checksum of the bits of a tensor, in one pass over the memory.

    It does not depend on dtype, shape, device, alignment or the number of threads.

    Args:
        tensor: any dtype; one that is not contiguous is copied.
        backend: `cpp`, `cuda` or `reference`; None takes the best one.

    Returns:
        An int64 scalar on the tensor's device.

    Examples:
        >>> bit_checksum(torch.tensor([1, 2, 3], dtype=torch.int32)).item()  # w[0] + 1 * 2 + 3 * 3
        4294967308
    """
    check.untransformed("bit_checksum", tensor=tensor)
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if choose_backend("bit_checksum", data.device, backend) != "reference":
        return native().bit_checksum(data)
    return _odd_weights(data[4:]) + _FIRST_WEIGHT * _odd_weights(data[:4])


def _odd_weights(data: Tensor) -> Tensor:
    """Return the sum of (2 i + 1) x[i]."""
    if data.storage_offset() % 4:
        data = data.clone()
    end = data.numel() // 4 * 4
    words = data[:end].view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(words), _CHUNK):
        total += _weighted_sum(words[start : start + _CHUNK], start)
    last = torch.nn.functional.pad(data[end:], (0, (end - data.numel()) % 4)).view(torch.int32)
    return total + _weighted_sum(last, len(words))


def _weighted_sum(words: Tensor, start: int) -> Tensor:
    """Return the sum of (2 i + 1) words[i - start]: of a table's rows and columns."""
    rows = len(words) // _ROW
    table = words[: rows * _ROW].to(torch.int64).bitwise_and_(0xFFFFFFFF).view(rows, _ROW)
    rest = words[rows * _ROW :].to(torch.int64).bitwise_and_(0xFFFFFFFF)
    index = torch.arange(max(rows, _ROW), device=words.device)
    by_column = (2 * index[:_ROW] + 1) * table.sum(0)
    by_row = 2 * (start + _ROW * index[:rows]) * table.sum(1)
    by_word = (2 * (start + rows * _ROW + index[: len(rest)]) + 1) * rest
    return by_column.sum() + by_row.sum() + by_word.sum()
