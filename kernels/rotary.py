"""Tables of cosines and sines of rotary position embeddings (Su et al. 2021), position by position.

torch computes elements at the end of a thread's part by another function than the others, so that
an angle's bits depend on where it lies. Here a position is always computed at its place in a chunk
of one size, by one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        needed = int(positions.max()) + 1 if positions.numel() else 0
        if needed > len(self._cos):
            self._grow(max(needed, 2 * len(self._cos)))
        return self._cos[positions], self._sin[positions]

    def _grow(self, count: int) -> None:
        first = len(self._cos)
        chunks: tuple[list[Tensor], list[Tensor]] = ([self._cos], [self._sin])
        for begin in range(first, count, _CHUNK):
            positions = torch.arange(begin, begin + _CHUNK, device=self._inv_freq.device)
            angles = positions[:, None].float() * self._inv_freq
            chunks[0].append(angles.cos() * self._scaling)
            chunks[1].append(angles.sin() * self._scaling)
        self._cos, self._sin = (torch.cat(parts) for parts in chunks)
