"""The segments of a packed batch: runs of tokens that continue a state, and whose state it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridengine.run.errors import ModelError

__all__ = ["Segments", "find_segments"]


class Segments:
    """What `linear_recurrence` and `causal_conv1d` take.

    FSDP2 copies dataclasses among the arguments of a module; this is none, and stays one object.

    Attributes:
        cu_seqlens: int32 [S + 1], 0 and the end of every segment.
        parents: int32 [S], the earlier segment that a segment continues, or -1; None: -1 for all.
    """

    def __init__(self, cu_seqlens: Tensor, parents: Tensor | None = None) -> None:
        self.cu_seqlens, self.parents = cu_seqlens, parents
        for x in (cu_seqlens, parents):
            if x is not None:
                torch._dynamo.maybe_mark_dynamic(x, 0)  # for a compiled layer

    @staticmethod
    def of_forest(subtree_ends: Tensor) -> Segments:
        """Return the segments of packed trees; subtree_ends: integers [T] of `pack_forest`.

        A token continues the one before it if the two have one subtree. A segment continues the
        last one before it whose subtree it is in.

        Examples:
            >>> segments = Segments.of_forest(torch.tensor([5, 5, 4, 4, 5, 6]))
            >>> segments.cu_seqlens.tolist(), segments.parents.tolist()
            ([0, 2, 4, 5, 6], [-1, 0, 0, -1])
        """
        ends = subtree_ends.cpu()
        bounds = _bounds(ends.diff() != 0)
        parents, path = list[int](), list[tuple[int, int]]()
        for segment, start in enumerate(bounds[:-1].tolist()):
            while path and path[-1][1] <= start:
                path.pop()
            parents.append(path[-1][0] if path else -1)
            path.append((segment, int(ends[start])))
        numbers = torch.tensor(parents, dtype=torch.int32)
        device = subtree_ends.device
        return Segments(bounds.int().to(device), numbers.to(device))


def find_segments(arguments: Mapping[str, Any]) -> Segments | None:
    """Return the segments that the keyword arguments of a model's forward describe; None: no pack.

    Packed sequences are one row, described by `cu_seq_lens_q` (with `subtree_ends` where prefixes
    are shared), by `seq_idx`, or by position_ids that restart.

    Raises:
        ModelError: sequences that are packed in several rows, or divided over ranks.
    """
    if arguments.get("sequence_parallel") is not None:
        raise ModelError(
            "sequence parallelism of linear attention is not supported, as a rank would need the "
            "state at the end of the rank before it; set ulysses_sequence_parallel_size to 1"
        )
    if (subtree_ends := arguments.get("subtree_ends")) is not None:
        return Segments.of_forest(subtree_ends)
    if (cu_seqlens := arguments.get("cu_seq_lens_q")) is not None:
        return Segments(cu_seqlens.int())
    if (numbers := arguments.get("seq_idx")) is not None:
        changes = numbers.diff(dim=-1) != 0
    else:
        changes = _restarts(arguments)
    if changes is None or not changes.any():
        return None
    if changes.shape[0] != 1:
        raise ModelError(
            f"sequences are packed in {changes.shape[0]} rows; pack those of a batch in one row, "
            "or pad each to a row of its own"
        )
    return Segments(_bounds(changes[0]).int().to(changes.device))


def _restarts(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return where position_ids [B, L] restart, bool [B, L - 1]; None with a mask or a cache."""
    position_ids = arguments.get("position_ids")
    if position_ids is None or any(
        arguments.get(x) is not None for x in ("attention_mask", "past_key_values", "cache_params")
    ):
        return None
    if position_ids.ndim == 3:  # M-RoPE: the positions in the text come first, where there are any
        if position_ids.shape[0] != 4:
            return None
        position_ids = position_ids[0]
    return position_ids.diff(dim=-1) != 1


def _bounds(changes: Tensor) -> Tensor:
    """Return 0, the starts of further segments and the number of tokens; changes: bool [T - 1]."""
    starts = changes.nonzero().flatten().cpu() + 1
    return torch.cat([starts.new_tensor([0]), starts, starts.new_tensor([len(changes) + 1])])
