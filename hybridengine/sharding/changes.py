"""Which elements of a shard have changed since the engine last received it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ChangedElements:
    """Elements of one rank's shard whose value in the engine's dtype changed.

    indices: int32 or int64 [K], ascending: positions in the local shard, contiguous order. values:
    engine dtype [K], the new ones.
    """

    indices: Tensor
    values: Tensor
