"""Tables of cosines and sines of rotary position embeddings (Su et al. 2021), position by position.

On a CPU torch computes elements at the end of a thread's part by another function than the others,
so that an angle's bits depend on where it lies. Here a position is always computed at its place in
a chunk of one size, by one thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backend import native

_CHUNK = 64  # positions: few enough for one thread, and complete vectors for any even dimension


class RotaryTable:
    """cos and sin of position * inv_freq, [positions, D / 2] float32 each, times `scaling`.

    inv_freq: float32 [D / 2].

    Example:
        >>> cos, sin = RotaryTable(torch.ones(1)).rows(torch.tensor([0, 0]))
        >>> cos.tolist(), sin.tolist()
        ([[1.0], [1.0]], [[0.0], [0.0]])
    """

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0) -> None:
        self._inv_freq = inv_freq.detach().float().clone()
        self._scaling = scaling
        self._cos = self._sin = self._inv_freq.new_empty(0, self._inv_freq.numel())

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the positions, integers [...]: [..., D / 2] each."""
        if positions.is_cuda:  # one function for all elements; the largest position is not known
            return self._angles(positions)
        needed = int(positions.max()) + 1 if positions.numel() else 0
        if needed > len(self._cos):
            self._grow(max(needed, 2 * len(self._cos)))
        return self._cos[positions], self._sin[positions]

    def _grow(self, count: int) -> None:
        first = len(self._cos)
        chunks: tuple[list[Tensor], list[Tensor]] = ([self._cos], [self._sin])
        for begin in range(first, count, _CHUNK):
            positions = torch.arange(begin, begin + _CHUNK, device=self._inv_freq.device)
            for parts, values in zip(chunks, self._angles(positions), strict=True):
                parts.append(values)
        self._cos, self._sin = (torch.cat(parts) for parts in chunks)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self._inv_freq
        return angles.cos() * self._scaling, angles.sin() * self._scaling


def trained_rotary(
    self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """The forward of a rotary embedding of transformers: cosines and sines [B, T, D].

    They are in the module's own form: of neighbours or of halves, in the dtype of `x` or float32.
    """
    prefix = f"{layer_type}_" if layer_type else ""
    forms, form = vars(self).setdefault("_forms", {}), (prefix, x.dtype)
    with torch.no_grad():
        if form not in forms:  # the frequencies are on the meta device before loading
            given = (getattr(self, prefix + key) for key in ("inv_freq", "attention_scaling"))
            options = {"layer_type": layer_type} if layer_type else {}
            ones = torch.ones_like(position_ids[..., :1])
            cos = type(self).forward(self, x, ones, **options)[0]
            of_neighbours, is_wide = torch.equal(cos[..., 0], cos[..., 1]), cos.dtype != x.dtype
            forms[form] = RotaryTable(*given), of_neighbours, is_wide
    if position_ids.dim() == 3:  # M-RoPE: the positions of text are the same in every section
        position_ids = position_ids[0]
    table, of_neighbours, is_wide = forms[form]
    cos, sin = (
        t.repeat_interleave(2, -1) if of_neighbours else torch.cat([t, t], -1)
        for t in table.rows(position_ids)
    )
    return (cos, sin) if is_wide else (cos.to(x.dtype), sin.to(x.dtype))


def rotate(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False
) -> Tensor:
    """Return the heads of `x` turned by the angles of their positions, without a gradient.

    On a CPU that is in place. Pairs (x1, x2) of the first R elements of a head become (x1 cos - x2
    sin, x2 cos + x1 sin). Each product is rounded to the dtype of the tables, and the sum to that
    of `x`: transformers' bits.

    Args:
        x: [T, H, D], float32 or bfloat16, with contiguous heads.
        positions: int64 [T].
        cos, sin: tables [positions, R / 2] of the dtype of `x`, or float32; R at most D.
        neighbours: pairs are neighbours (elements 2 i and 2 i + 1), not the halves of R elements.

    Raises:
        ValueError: shapes or dtypes do not fit, or a position is not in the tables.
    """
    extension = native()
    if extension is not None and x.device.type == "cpu":
        extension.rotary_(x, positions, cos, sin, neighbours)
        return x
    cos, sin = (t[positions][:, None] for t in (cos, sin))
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if neighbours else turned.chunk(2, -1)
    pairs = [first * cos - second * sin, second * cos + first * sin]
    joined = torch.stack(pairs, -1).flatten(-2) if neighbours else torch.cat(pairs, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)
