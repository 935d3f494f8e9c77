"""encode_gaps, decode_gaps: ascending positions in about one byte each.

A field of 1, 2 or 3 bytes (little endian) holds how many positions lie between a position and the
one before. A field of all ones skips as many positions as it counts and names none, so k positions
below n take at most k + n / 255 fields of one byte. With the best of the three widths and 16 bits
for a value, k changes of n elements take at most 1.3 times log2(n over k) + 16 k bits, wherever
they lie, for every k / n from 1e-7 to 0.33.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._backend import choose_backend, native, register_backends

register_backends("gaps", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

_WIDTHS = (1, 2, 3)  # bytes


def encode_gaps(
    positions: Tensor, start: int = 0, *, backend: str | None = None
) -> tuple[Tensor, int]:
    """Return (gaps uint8 [B], bytes of a field) of ascending positions, int64 [K], from `start` on.

    Examples:
        >>> encode_gaps(torch.tensor([2, 3, 300]))
        (tensor([  2,   0, 255,  41], dtype=torch.uint8), 1)
    """
    if choose_backend("gaps", positions.device, backend) != "reference":
        return native().encode_gaps(positions, start)
    ends = positions.new_tensor([start - 1])
    gaps = positions - torch.cat([ends, positions[:-1]]) - 1 if len(positions) else positions
    sizes = {w: w * (len(gaps) + int((gaps // _escape(w)).sum())) for w in _WIDTHS}
    width = min(_WIDTHS, key=lambda w: sizes[w])
    escape = _escape(width)
    fields = gaps.new_full((sizes[width] // width,), escape)
    fields[(gaps // escape + 1).cumsum(0) - 1] = gaps % escape
    shifts = 8 * torch.arange(width, device=fields.device)
    return ((fields[:, None] >> shifts) & 255).to(torch.uint8).view(-1), width


def decode_gaps(
    gaps: Tensor, width: int, start: int, end: int, count: int, *, backend: str | None = None
) -> Tensor:
    """Return the `count` positions, int64, that `encode_gaps` made `gaps` of.

    Raises:
        ValueError: the bytes do not give as many positions, or not all in [start, end).
    """
    if choose_backend("gaps", gaps.device, backend) != "reference":
        return native().decode_gaps(gaps, width, start, end, count)
    if width not in _WIDTHS or len(gaps) % width:
        raise ValueError(f"decode_gaps: got {len(gaps)} bytes of width {width}")
    shifts = 8 * torch.arange(width, device=gaps.device)
    fields = (gaps.view(-1, width).to(torch.int64) << shifts).sum(1)
    named = fields != _escape(width)
    positions = (fields + named).cumsum(0)[named] - 1 + start
    if len(positions) != count or (count and int(positions[-1]) >= end):
        raise ValueError(
            f"decode_gaps: the bytes do not give {count} positions in [{start}, {end})"
        )
    return positions


def _escape(width: int) -> int:
    return (1 << 8 * width) - 1
