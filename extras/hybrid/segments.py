"""The segments of a packed batch: runs of tokens that continue a state, and whose state it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.model.attention import exchange, gather_seq_scatter_heads
from hybridengine.run.errors import ModelError

__all__ = ["Segments", "Share", "find_segments"]


class Segments:
    """What `linear_recurrence` and `causal_conv1d` take.

    FSDP2 copies dataclasses among the arguments of a module; this is none, and stays one object.

    Attributes:
        cu_seqlens: int32 [S + 1], 0 and the end of every segment.
        parents: int32 [S], the earlier segment that a segment continues, or -1; None: -1 for all.
        share: where the ranks of a group have equal shares of the tokens, that of this rank.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        parents: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.cu_seqlens, self.parents = cu_seqlens, parents
        _mark_dynamic(cu_seqlens, parents)
        self.share = None if group is None else Share(cu_seqlens, parents, group)

    @staticmethod
    def of_forest(subtree_ends: Tensor, group: dist.ProcessGroup | None = None) -> Segments:
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
        return Segments(bounds.int().to(device), numbers.to(device), group)


_ROWS = 3  # before a token, that the widest convolution reads


class Share:
    """A rank's tokens, of which each of s ranks has as many, in their order (Ulysses).

    A recurrence gets all tokens of some heads. A convolution stays where its tokens are: ranks
    exchange only the rows that one reads of another, so no channel is sent twice.

    Attributes:
        cu_seqlens, parents: as of `Segments`, of the parts of segments that are here.
        sent: int64 [s * n], the rows that rank 0 reads of this one, then those of rank 1, ...
        before: int64 [S, 3], those before each segment, oldest first: 1 + index into the received
            rows, or 0 for none.
    """

    def __init__(
        self, cu_seqlens: Tensor, parents: Tensor | None, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        size, rank, device = group.size(), group.rank(), cu_seqlens.device
        bounds = cu_seqlens.long().cpu()
        starts, ends, length = bounds[:-1], bounds[1:], int(bounds[-1]) // size
        of = torch.full_like(starts, -1) if parents is None else parents.long().cpu()
        previous = torch.arange(-1, length * size)  # of each token on its path; -1: of none
        previous[starts] = torch.where(of < 0, -1, ends[of] - 1)
        previous[-1] = -1
        read, parts = list[Tensor](), list[tuple[Tensor, ...]]()
        for begin in range(0, length * size, length):
            here = ((starts < begin + length) & (ends > begin)).nonzero().flatten()
            row = starts[here].clamp(min=begin)
            rows = [row := previous[row] for _ in range(_ROWS)]
            continues = (starts[here] >= begin) & (rows[0] >= begin)  # a segment that is here
            before = torch.stack(rows[::-1], 1).masked_fill(continues[:, None], -1)
            read.append(before[before >= 0].unique())
            cuts = torch.cat([row.new_tensor([0]), ends[here].clamp(max=begin + length) - begin])
            parts.append((cuts, torch.where(continues, of[here] - here[0], -1), before))
        counts = torch.stack([torch.bincount(x // length, minlength=size) for x in read])
        most = max(1, int(counts.max()))
        sent = torch.zeros(size, most, dtype=torch.int64)
        for reader, tokens in enumerate(read):
            own = tokens[tokens // length == rank] - rank * length
            sent[reader, : len(own)] = own
        cuts, of, before = parts[rank]
        owners = read[rank] // length
        first = counts[rank].cumsum(0) - counts[rank]
        places = torch.zeros_like(previous)
        places[read[rank]] = 1 + owners * most + torch.arange(len(owners)) - first[owners]
        self.cu_seqlens, self.parents = cuts.int().to(device), of.int().to(device)
        self.sent, self.before = sent.flatten().to(device), places[before].to(device)
        _mark_dynamic(self.cu_seqlens, self.parents, self.sent, self.before)

    def of_convolution(self, x: Tensor, width: int) -> dict[str, Any]:
        """Return what `causal_conv1d` takes besides x [T / s, C]; width: of its weight."""
        sent = x[self.sent].unflatten(0, (self.group.size(), -1))
        received = torch.cat([x.new_zeros(1, x.shape[1]), exchange(sent, self.group).flatten(0, 1)])
        before = received[self.before[:, _ROWS + 1 - width :]]
        return {"cu_seqlens": self.cu_seqlens, "parents": self.parents, "initial_state": before}

    def gather_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Exchange the T / s tokens of all heads for all tokens of 1 / s of the heads."""
        gathered: dict[int, Tensor] = {}  # as torch.compile can trace it
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            of = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            parts = gather_seq_scatter_heads(*[tensors[i] for i in of], group=self.group)
            gathered |= dict(zip(of, parts, strict=True))
        return [gathered[i] for i in range(len(tensors))]


def find_segments(arguments: Mapping[str, Any]) -> Segments | None:
    """Return the segments that the keyword arguments of a model's forward describe; None: no pack.

    Packed sequences are one row, described by `cu_seq_lens_q` (with `subtree_ends` where prefixes
    are shared), by `seq_idx`, or by position_ids that restart.

    Raises:
        ModelError: sequences that are packed in several rows.
    """
    group = arguments.get("sequence_parallel")
    if (subtree_ends := arguments.get("subtree_ends")) is not None:
        return Segments.of_forest(subtree_ends, group)
    if (cu_seqlens := arguments.get("cu_seq_lens_q")) is not None:
        return Segments(cu_seqlens.int(), None, group)
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


def _mark_dynamic(*tensors: Tensor | None) -> None:
    """Let a compiled layer take other sizes."""
    for x in tensors:
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, 0)


def _bounds(changes: Tensor) -> Tensor:
    """Return 0, the starts of further segments and the number of tokens; changes: bool [T - 1]."""
    starts = changes.nonzero().flatten().cpu() + 1
    return torch.cat([starts.new_tensor([0]), starts, starts.new_tensor([len(changes) + 1])])
