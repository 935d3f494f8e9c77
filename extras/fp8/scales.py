"""Quantization while a sync packs: float8_e4m3fn travels, with scales equal to vLLM's.

An engine rank quantizes its own tensors (fused, of its tensor-parallel slice) in blocks of 128 x
128. Such a block may be made of several trained parameters and lie in the shards of several ranks,
and each engine layout has its own blocks. So before a sync packs, every trainer rank finds the
largest magnitudes of what it holds of each block of each layout; one all-reduce (MAX, which is
exact) combines them. Then every trainer rank knows all scales: senders quantize as they pack, and
receivers that train, too, write the scales of their own tensors without receiving them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.kernels.block_quantize import (
    BLOCK,
    QUANTIZED_DTYPE,
    BlockTable,
    block_grid,
    block_scales,
    quantize_values,
)
from hybridengine.kernels.strided_copy import TABLE_COLUMNS
from hybridengine.run.failures import CollectiveGuard
from hybridengine.sync.blocks import (
    Block,
    NotABlock,
    contiguous_strides,
    cut,
    factor,
    narrow,
    reach,
)
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.planner import ReshardPlan
from hybridengine.sync.source_class import SliceCopy
from hybridengine.sync.tables import Exchange, Plain, Read, Shape, SliceRows, Weights, slice_rows
from hybridengine.sync.transport import Transport

BLOCK_COLUMN = TABLE_COLUMNS  # of the tables of this module: the number of the block of a row
_MAX_AXES = 4  # of a row
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class BlockScales(Plain):
    """The scales of all quantized tensors of all engine layouts of a plan, on one rank.

    scale: float32 [B], of the blocks of all layouts in one numbering.

    Raises LayoutError for a parameter that cannot be quantized.
    """

    def __init__(self, plan: ReshardPlan, rank: int, device: torch.device) -> None:
        self._plan, self._rank = plan, rank
        self._first: list[dict[str, int]] = []  # by layout: engine tensor → its first block
        starts = [0]  # of each layout, and the end
        for layout in plan.layouts:
            if computed := layout.by_loader & layout.quantized.keys():
                raise LayoutError(
                    f"the quantized tensor {min(computed)!r} is computed by the engine's own "
                    "loader, which does not quantize in place: build the engine without "
                    "quantization"
                )
            self._first.append({})
            starts.append(starts[-1])
            for name in layout.quantized:
                self._first[-1][name] = starts[-1]
                starts[-1] += math.prod(block_grid(layout.destinations[name].shape))
        dtypes = {q.dtype for layout in plan.layouts for q in layout.quantized.values()}
        if len(dtypes) > 1:
            raise LayoutError(f"the engines quantize values of {dtypes}; expected one dtype")
        self.dtype = next(iter(dtypes), torch.bfloat16)
        self.scale = torch.zeros(starts[-1], dtype=torch.float32, device=device)
        self._absmax = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._is_frozen = torch.zeros(starts[-1], dtype=torch.bool, device=device)
        for name, dtype in plan.sent_once:
            for number in range(len(plan.layouts)) if dtype == QUANTIZED_DTYPE else ():
                for tensor in self._names(name, number):
                    self._is_frozen[self._blocks(number, tensor)] = True
        self._of_layout = [self.scale[a:b] for a, b in itertools.pairwise(starts)]
        for name, dtype in plan.source_classes:
            source = plan.sources[name].dtype
            if dtype == QUANTIZED_DTYPE and source not in _FLOATS:
                raise LayoutError(
                    f"parameter {name!r} is {source}; expected float32, bfloat16 or float16, which "
                    "are quantized for the engine"
                )

    # Tables

    def _first_blocks(self, name: str) -> np.ndarray:
        """Return the first block of each engine tensor that a parameter is copied to.

        int64 [layouts, writes]; the second index is that of `ReshardPlan.destinations`.
        """
        of_layout = [self._names(name, layout) for layout in range(len(self._first))]
        first = np.zeros((len(of_layout), max(map(len, of_layout))), np.int64)
        for layout, names in enumerate(of_layout):
            first[layout, : len(names)] = [self._first[layout][n] for n in names]
        return first

    def shapes(self, name: str) -> tuple:
        return tuple(
            tuple(layout.destinations[n].shape for n in self._names(name, number))
            for number, layout in enumerate(self._plan.layouts)
        )

    def _names(self, name: str, layout: int) -> list[str]:
        return self._plan.destinations(name, QUANTIZED_DTYPE, self._plan.layout_of.index(layout))

    def _blocks(self, layout: int, tensor: str) -> slice:
        """Return the blocks of an engine tensor."""
        shape = self._plan.layouts[layout].destinations[tensor].shape
        first = self._first[layout][tensor]
        return slice(first, first + math.prod(block_grid(shape)))

    def number(self, table: np.ndarray, rows: SliceRows, name: str) -> None:
        """Count the blocks of the rows of one source from the first of all layouts."""
        layouts = np.array(self._plan.layout_of)[rows.ranks[rows.slice_of]]
        table[:, BLOCK_COLUMN] += self._first_blocks(name)[layouts, table[:, 1]]

    def rows(
        self, name: str, slices: Sequence[SliceCopy], way: str, strides: Shape, origin: Shape
    ) -> SliceRows:
        """Return rows int64 [R, 17] of one way, pack or local.

        The last column is the block, counted from the first of its engine tensor.
        """
        shapes = self.shapes(name)
        tables, counts = [np.empty((0, BLOCK_COLUMN + 1), np.int64)], []
        for slice_copy in slices:
            (index, block), *others = slice_copy.writes
            if others or any(axis.dim < 0 for axis in block.axes):
                raise LayoutError(
                    f"the engine holds elements of {name!r} several times, quantized, which is not "
                    "supported: build the engine without quantization"
                )
            shape = shapes[self._plan.layout_of[slice_copy.receiver]][index]
            pieces = _pieces(block.offset, block.sizes, block.strides, shape)
            offset, source = block.address(strides, origin)
            into = list(contiguous_strides(block.sizes)) if way == "pack" else block.strides
            rows = np.zeros((len(pieces), BLOCK_COLUMN + 1), np.int64)
            rows[:, 1] = index
            rows[:, 2] = offset + _addresses(pieces[:, 1], block.sizes, source)
            rows[:, 3] = _addresses(pieces[:, 1], block.sizes, into)
            rows[:, 3] += block.offset if way == "local" else 0
            rows[:, 4:8] = pieces[:, 2:6]
            rows[:, 8:12] = _addresses(pieces[:, 6:], block.sizes, source)
            rows[:, 12:16] = _addresses(pieces[:, 6:], block.sizes, into)
            rows[:, BLOCK_COLUMN] = pieces[:, 0]
            tables.append(rows)
            counts.append(len(pieces))
        slice_of = np.repeat(np.arange(len(counts)), counts)
        return slice_rows(np.concatenate(tables), slice_of, slices, way)

    def table(self, rows: np.ndarray, device: torch.device) -> QuantizingTable:
        """Return the table that quantizes with the present scales. rows: [R, 17]."""
        return QuantizingTable(_block_table(rows, device), self)

    def measuring(self, rows: np.ndarray, device: torch.device) -> BlockTable:
        """Return a table of what `rows` [R, 17] read of each block, each part once.

        Several ranks of one engine layout receive the same slices.
        """
        reads = [0, 2, *range(4, 12), BLOCK_COLUMN]
        once = np.unique(rows[:, reads], axis=0)
        table = np.zeros((len(once), BLOCK_COLUMN + 1), np.int64)
        table[:, reads] = once
        return _block_table(table, device)

    # Sync

    def prepare(
        self, transport: Transport, weights: Weights, moving: Sequence[Exchange], read: Read | None
    ) -> None:
        if not any(exchange.bucket.quantized for exchange in moving):
            return
        if read is not None:
            guard = transport.guard
            guard.phase = "finding the scales of quantized weights"
            # Those of the tensors that are sent once are not measured again.
            moves_all = len(moving) == len(self._plan.buckets)
            self._absmax *= 0 if moves_all else self._is_frozen
            for exchange in moving:
                if exchange.measured is not None:
                    exchange.measured.absmax(read(exchange), self._absmax, self.dtype)
            assert isinstance(guard, CollectiveGuard)  # of a trainer
            with guard.collective("combining the scales of quantized weights"):
                self.combine(guard)
            num_bytes = 2 * self._absmax.nbytes * (dist.get_world_size() - 1)
            num_bytes //= dist.get_world_size()  # of a ring's all-reduce
            transport.bytes_received += num_bytes
            transport.bytes_sent += num_bytes
        self._deliver(transport)
        if weights:
            layout = self._plan.layout_of[self._rank]
            for name, quantized in self._plan.layouts[layout].quantized.items():
                scale = weights[quantized.scale]
                scale.copy_(self.scale[self._blocks(layout, name)].view(scale.shape))

    def combine(self, guard: CollectiveGuard) -> None:
        """Compute the scales from the magnitudes that all trainer ranks found; collective."""
        work = dist.all_reduce(self._absmax, dist.ReduceOp.MAX, async_op=True)
        guard.wait(work, self._absmax.device)
        self.scale.copy_(block_scales(self._absmax))

    def _of_rank(self, rank: int) -> torch.Tensor:
        """Return the part of `scale` for the engine of one rank of the plan."""
        return self._of_layout[self._plan.layout_of[rank]]

    def _deliver(self, transport: Transport) -> None:
        """Send the scales to ranks that hold an engine only, an equal part from each trainer."""
        if not (receivers := transport.receivers):
            return
        where, trainers = "the scales of quantized weights", [*range(receivers.start)]
        if self._rank in receivers:
            scales = self._of_rank(self._rank)
            received = [part.nbytes for part in scales.tensor_split(len(trainers))]
            arrived = transport.post(where, None, (), received).wait()
            scales.copy_(torch.cat(arrived).view(scales.dtype))
            return
        parts = [self._of_rank(r).tensor_split(len(trainers))[self._rank] for r in receivers]
        sent = [0] * len(trainers) + [part.nbytes for part in parts]
        transport.post(where, torch.cat(parts).view(torch.uint8), sent, ()).wait()

    def expected(
        self, values: torch.Tensor, receiver: int, destination: str, block: Block
    ) -> torch.Tensor:
        number = self._plan.layout_of[receiver]
        if destination not in self._first[number]:
            return values
        *_, n, k = self._plan.layouts[number].destinations[destination].shape
        rows, columns = block_grid((n, k))
        at = torch.full(block.sizes, block.offset, device=values.device)
        for axis, (size, stride) in enumerate(zip(block.sizes, block.strides, strict=True)):
            steps = torch.arange(size, device=values.device) * stride
            at += steps.view(-1, *[1] * (len(block.sizes) - axis - 1))
        in_block = (at // (n * k) * rows + at // k % n // BLOCK) * columns + at % k // BLOCK
        scale = self.scale[in_block + self._first[number][destination]]
        return quantize_values(values.to(self.dtype), scale)


class QuantizingTable:
    """A table of slices that are quantized as they are copied, in place of a `CopyTable`."""

    def __init__(self, table: BlockTable, scales: BlockScales) -> None:
        self._table, self._scales = table, scales

    def copy(self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
        self._table.quantize(sources, destinations, self._scales.scale, self._scales.dtype)


def _block_table(rows: np.ndarray, device: torch.device) -> BlockTable:
    table, block = np.split(rows, [TABLE_COLUMNS], axis=1)
    slices, blocks = (
        torch.from_numpy(np.ascontiguousarray(part)) for part in (table, block.reshape(-1))
    )
    return BlockTable(slices, blocks, device)


@lru_cache(maxsize=1 << 12)
def _pieces(offset: int, sizes: Shape, strides: Shape, shape: Shape) -> np.ndarray:
    """Cut a region of an engine tensor of `shape` at the borders of its blocks.

    Return int64 [P, 10]: the block, and a slice of the region's elements in order of iteration:
    offset, size[4], stride[4].

    Raises LayoutError for a region that does not step through the tensor by dimensions.
    """
    try:
        whole = factor(shape, offset, sizes, strides, 0, contiguous_strides(sizes))
    except NotABlock as error:
        raise LayoutError(f"a quantized engine tensor of shape {shape}: {error}") from error
    steps = (*[1] * (len(shape) - 2), BLOCK, BLOCK)
    parts: list[tuple[int, Block]] = [(0, whole)]
    for dim, (step, count) in enumerate(zip(steps, block_grid(shape), strict=True)):
        parts = [
            (number * count + i, piece)
            for number, part in parts
            for i in range(reach(part, dim)[0] // step, (reach(part, dim)[1] - 1) // step + 1)
            for piece in cut(part, dim, i * step, (i + 1) * step)
        ]
    rows = [(number, piece) for number, part in parts for piece in _with_few_axes(part)]
    table = np.zeros((len(rows), 2 + 2 * _MAX_AXES), np.int64)
    table[:, 2 : 2 + _MAX_AXES] = 1
    for row, (number, piece) in zip(table, rows, strict=True):
        row[:2] = number, piece.offset
        if axes := len(piece.axes):
            row[2 + _MAX_AXES - axes : 2 + _MAX_AXES] = piece.sizes
            row[-axes:] = piece.strides
    return table


def _with_few_axes(block: Block) -> list[Block]:
    if len(block.axes) <= _MAX_AXES:
        return [block]
    steps = (narrow(block, 0, i, i + 1) for i in range(block.axes[0].size))
    return [part for step in steps for part in _with_few_axes(step)]


def _addresses(flat: np.ndarray, sizes: Shape, strides: Sequence[int]) -> np.ndarray:
    """Return the offsets, relative to the first element, of elements `flat` in iteration order.

    sizes, strides: those of the axes of the iteration.
    """
    address = np.zeros_like(flat)
    for size, step, stride in zip(sizes, contiguous_strides(sizes), strides, strict=True):
        address += flat // step % size * stride
    return address
