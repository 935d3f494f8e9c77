"""Move ragged rows between ranks, and gather rows of numbers: tensors only, no pickled objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_MAX_ELEMENTS = 1 << 24  # that a rank sends or receives at once, where one row is not more


@dataclass(frozen=True)
class RowLocations:
    """Where N rows lie.

    held: for each rank, the rows that it holds; a row may be on several ranks.
    sources: int64 [N], one rank of these, which passes the row on.
    """

    held: Sequence[Sequence[int]]
    sources: Tensor


class RowExchange:
    """Move N ragged rows: row i lies on rank `sources[i]`; rank d receives the rows `wanted[d]`.

    sources: int64 [N].
    wanted: for each rank, row numbers in any order; a row may go to several ranks. All ranks pass
      the same arguments, so the sizes of all messages are known everywhere.
    group: of the ranks; None: the default group.

    Example, on both of two ranks:
        >>> exchange = RowExchange(torch.tensor([0, 1, 1]), [[1], [2, 0]])
        >>> exchange(values, lengths=torch.tensor([3, 1, 2]))  # rank 1 receives rows 2 and 0: [5]
    """

    def __init__(
        self,
        sources: Tensor,
        wanted: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        self._group, self._rank, self._world_size = group, group.rank(), group.size()
        self._sources = sources
        self._wanted = [torch.tensor(rows, dtype=torch.int64) for rows in wanted]

    def __call__(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the wanted rows end to end. Collective.

        values: this rank's rows end to end, in ascending order.
        lengths: int64 [N] on the CPU, the elements of every row.
        """
        return torch.cat([values.new_empty(0), *self.pieces(values, lengths)])

    def pieces(
        self, values: Tensor, lengths: Tensor, max_elements: int = _MAX_ELEMENTS
    ) -> Iterator[Tensor]:
        """Yield the wanted rows in pieces, in order; every rank gets the same number of pieces.

        Collective: every rank must take all pieces. max_elements: that any rank sends or receives
        at once; a longer row is a piece of its own.
        """
        own = torch.zeros_like(lengths).masked_fill(self._sources == self._rank, 1) * lengths
        starts = own.cumsum(0) - own
        for wanted in self._split(lengths, max_elements):
            yield self._move(values, starts, lengths, wanted)

    def _split(self, lengths: Tensor, max_elements: int) -> Iterator[list[Tensor]]:
        """Split every rank's rows into the same number of pieces."""
        sent = torch.zeros(self._world_size, dtype=torch.int64)
        for rows in self._wanted:
            sent.index_add_(0, self._sources[rows], lengths[rows])
        received = [int(lengths[rows].sum()) for rows in self._wanted]
        count = max(1, -(-max(int(sent.max()), *received) // max_elements))
        parts = [rows.tensor_split(count) for rows in self._wanted]
        for k in range(count):
            yield [part[k] for part in parts]

    def _move(
        self, values: Tensor, starts: Tensor, lengths: Tensor, wanted: list[Tensor]
    ) -> Tensor:
        sent = [rows[self._sources[rows] == self._rank] for rows in wanted]
        to_send = [
            values[start : start + length]
            for start, length in _pairs(torch.cat(sent), starts, lengths)
        ]
        received_rows = wanted[self._rank]
        sources = self._sources[received_rows]
        size = values.itemsize  # bytes: neither gloo nor NCCL moves every type
        in_sizes = [size * int(lengths[rows].sum()) for rows in sent]
        out_sizes = torch.zeros(self._world_size, dtype=torch.int64)
        out_sizes.index_add_(0, sources, lengths[received_rows])
        received = values.new_empty(int(out_sizes.sum()))
        buffer = torch.cat([values.new_empty(0), *to_send])
        self._group.alltoall_base(
            received.view(torch.uint8),
            buffer.view(torch.uint8),
            (size * out_sizes).tolist(),
            in_sizes,
        ).wait()
        by_source = sources.argsort(stable=True)  # the order in which they arrive
        arrived = received.split(lengths[received_rows[by_source]].tolist())
        ordered = [arrived[i] for i in by_source.argsort().tolist()]
        return torch.cat([values.new_empty(0), *ordered])


def _pairs(rows: Tensor, *columns: Tensor) -> Iterator[tuple[int, ...]]:
    return zip(*(column[rows].tolist() for column in columns), strict=True)


def all_gather_rows(rows: Tensor) -> list[Tensor]:
    """Return the rows of every rank, [n_r, ...] each, of any number n_r per rank. Collective."""
    world_size = dist.get_world_size()
    counts = [rows.new_zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, counts[0].new_tensor([rows.shape[0]]))
    sizes = [int(count) for count in counts]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [part[:size] for part, size in zip(gathered, sizes, strict=True)]
