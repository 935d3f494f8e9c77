"""Which elements of a shard differ between two of its states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ChangedElements:
    """Elements of one rank's shard whose value in the engine's dtype changed.

    indices: int32 or int64 [K], ascending: positions in the local shard, contiguous order.
    values: engine dtype [K], the new ones.
    before, after: `hybridengine.kernels.bit_checksum` of the shard in the two states, as int; None
      where it is not known. The changes are sent if the engine has the former and the shard the
      latter state, else everything is.
    """

    indices: Tensor
    values: Tensor
    before: int | None
    after: int | None
