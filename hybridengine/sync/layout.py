"""How an engine's weights, and a checkpoint's tensors, derive from trained parameters.

Plain data: strided copies between named tensors. `hybridengine.sync.loader` records it.

A → T followed by T → B is a copy A → B; `compose` computes it. So intermediate tensors need not
exist: a checkpoint tensor that is a slice of a trained parameter (one expert of a fused weight), or
a temporary of the loader (a concatenation).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hybridengine.kernels.block_quantize import block_grid
from hybridengine.sync.blocks import Block, NotABlock, contiguous_strides, cut, factor, reach

Region = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, sizes, strides, in elements


@dataclass(frozen=True, order=True)
class Copy:
    """One strided copy from tensor `source` to tensor `destination`.

    Offsets and strides are in elements; both sides share `sizes`. The source is addressed as the
    contiguous global tensor.
    """

    source: str
    destination: str
    source_offset: int
    destination_offset: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def read(self) -> Region:
        """What it reads of the source."""
        return self.source_offset, self.sizes, self.source_strides

    @property
    def written(self) -> Region:
        """What it writes of the destination."""
        return self.destination_offset, self.sizes, self.destination_strides

    def block(self, shape: tuple[int, ...]) -> Block:
        """Return this copy in the coordinates of its source, which has `shape`."""
        return factor(shape, *self.read, self.destination_offset, self.destination_strides)


def compose(read: Copy, writes: Iterable[Copy]) -> list[Copy]:
    """Return copies from the sources of `writes` to the destination of `read`.

    writes: copies into the tensor that `read` copies from. Elements that no write fills are left
    out. Raises NotABlock if the strides of the two are incompatible, or if two writes fill the same
    element.
    """
    composed = [copy for write in writes for copy in _through(read, write)]
    if sum(copy.numel for copy in composed) > read.numel:
        raise NotABlock("an element is written twice before it is read")
    return composed


def _through(read: Copy, write: Copy) -> Iterable[Copy]:
    """Compose one read and one write: copies of the elements that both have in common."""
    first, last = read.source_offset, _last(*read.read)
    if 0 in (*read.sizes, *write.sizes) or last < write.destination_offset:
        return
    if first > _last(*write.written):
        return
    if write.written == read.read:
        yield replace(
            write,
            destination=read.destination,
            destination_offset=read.destination_offset,
            destination_strides=read.destination_strides,
        )
        return
    # View the tensor with dimensions […, s1/s2, s2/s3, s3], s the strides of the write.
    walk = zip(write.destination_strides, write.sizes, write.source_strides, strict=True)
    axes = sorted((axis for axis in walk if axis[1] > 1), reverse=True)
    steps = [stride for stride, _, _ in axes]
    outer = steps[0] if steps else 1
    end = max(last, write.destination_offset + outer * (axes[0][1] if axes else 1)) // outer + 1
    shape, low = [end], [write.destination_offset // outer]
    for inner in [*steps[1:], 1] if steps else []:
        if outer % inner:
            raise NotABlock(f"strides {write.destination_strides} do not divide one another")
        shape.append(outer // inner)
        low.append(write.destination_offset // inner % shape[-1])
        outer = inner
    extents = [size for _, size, _ in axes] + [1]
    source_strides = [stride for _, _, stride in axes] + [0]
    high = [start + extent for start, extent in zip(low, extents, strict=False)]
    if any(h > n for h, n in zip(high, shape, strict=True)):
        raise NotABlock(f"a write with strides {write.destination_strides} crosses a dimension")
    blocks: list[Block] = [read.block(tuple(shape))]
    for dim, (first, stop) in enumerate(zip(low, high, strict=True)):
        blocks = [part for block in blocks for part in cut(block, dim, first, stop)]
    for block in blocks:
        offset, strides = block.address(tuple(source_strides[: len(low)]), tuple(low))
        yield Copy(
            write.source,
            read.destination,
            write.source_offset + offset,
            block.offset,
            block.sizes,
            tuple(strides),
            block.strides,
        )


def _last(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the highest address of a strided region."""
    return offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def merge(
    copies: Iterable[Copy],
    source_shapes: Mapping[str, tuple[int, ...]],
    destination_shapes: Mapping[str, tuple[int, ...]],
) -> list[Copy]:
    """Merge copies of equal boxes at equal distances into one copy with one more axis.

    A fused weight of E experts, loaded expert by expert, is E copies that merge into one.
    source_shapes, destination_shapes: the shapes of the tensors, by name.
    """
    alike: dict[tuple, dict[tuple[int, int], Copy]] = {}
    for c in copies:
        key = (c.source, c.destination, c.sizes, c.source_strides, c.destination_strides)
        alike.setdefault(key, {})[c.source_offset, c.destination_offset] = c
    merged: list[Copy] = []
    for group in alike.values():
        while group:
            first = group[min(group)]
            for run, (source_step, destination_step) in _runs(group):
                joined = replace(
                    first,
                    sizes=(run, *first.sizes),
                    source_strides=(source_step, *first.source_strides),
                    destination_strides=(destination_step, *first.destination_strides),
                )
                if _is_box(source_shapes[first.source], joined.read) and _is_box(
                    destination_shapes[first.destination], joined.written
                ):
                    break
            else:
                run, source_step, destination_step, joined = 1, 0, 0, first
            merged.append(joined)
            for i in range(run):
                del group[
                    first.source_offset + i * source_step,
                    first.destination_offset + i * destination_step,
                ]
    return merged


_NEIGHBOURS = 4  # candidates for the next copy of a run: gate and up of all experts alternate


def _runs(offsets: Iterable[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """Return (length, step) of the arithmetic runs from the smallest offset on, longest first.

    offsets: (source, destination). Runs have at least two entries and ascend on both sides.
    """
    known = set(offsets)
    s, d = min(known)
    runs = []
    for near in heapq.nsmallest(_NEIGHBOURS + 1, known)[1:]:
        step = (near[0] - s, near[1] - d)
        run = 1
        while min(step) > 0 and (s + run * step[0], d + run * step[1]) in known:
            run += 1
        if run > 1:
            runs.append((run, step))
    return sorted(runs, reverse=True)


def _is_box(shape: tuple[int, ...], region: Region) -> bool:
    """Return whether a region of a tensor of `shape` is a box: one range of each dimension."""
    try:
        axes = factor(shape, *region, 0, region[2]).axes
    except NotABlock:
        return False
    return all(axis.step == 1 for axis in axes) and len({axis.dim for axis in axes}) == len(axes)


Shape = tuple[int, ...]
Constant = tuple[str, int, Shape, Shape, float]  # tensor, offset, sizes, strides, value


class LayoutError(RuntimeError):
    """The engine's weights cannot be described, or no longer match their description."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, strides (in elements) and dtype of one tensor."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


class Quantized(NamedTuple):
    """How a float8_e4m3fn engine tensor [..., N, K] is made: by `kernels.block_quantize`.

    dtype: the engine's dtype, to which values are rounded before they are quantized.
    scale: the engine tensor that holds the scales of the blocks.
    """

    dtype: torch.dtype
    scale: str


@dataclass
class EngineLayout:
    """How one engine rank's weights derive from source tensors.

    destinations: engine tensor → spec.
    copies: the copies from source tensors to engine tensors.
    constants: regions that the loader fills with one value (vocabulary padding); a sync writes them
      before the copies, which may overwrite them.
    fallback: source → "engine tensor: reason" for what is no copy; it is gathered in full and
      passed to the engine's loader.
    by_loader: engine tensors that the loader writes.
    quantized: destinations that hold quantized values of the sources.
    """

    destinations: dict[str, TensorSpec]
    copies: list[Copy] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    fallback: dict[str, str] = field(default_factory=dict)
    by_loader: set[str] = field(default_factory=set)
    quantized: dict[str, Quantized] = field(default_factory=dict)

    @property
    def scales(self) -> dict[str, TensorSpec]:
        """The engine tensors of the scales of quantized tensors."""
        grids = {
            q.scale: block_grid(self.destinations[name].shape) for name, q in self.quantized.items()
        }
        return {
            name: TensorSpec(grid, contiguous_strides(grid), torch.float32)
            for name, grid in grids.items()
        }

    def digest(self) -> str:
        """Return a hash that is equal for equal layouts in every process."""
        fields = (self.destinations, self.copies, self.constants, self.fallback, self.quantized)
        return hashlib.sha256(repr((fields, sorted(self.by_loader))).encode()).hexdigest()

    def ordered(self) -> EngineLayout:
        """Return this layout in an order that does not depend on how it was recorded."""
        return EngineLayout(
            dict(sorted(self.destinations.items())),
            sorted(self.copies),
            sorted(self.constants),
            dict(sorted(self.fallback.items())),
            self.by_loader,
            dict(sorted(self.quantized.items())),
        )

    def with_full_tensors(self, tensors: Mapping[str, torch.Tensor | TensorSpec]) -> EngineLayout:
        """Return this layout plus each of `tensors`, unsharded and contiguous, by its own name."""
        if not tensors:
            return self
        added = identity_layout(
            {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()}
        )
        return replace(
            self,
            destinations=self.destinations | added.destinations,
            copies=self.copies + added.copies,
        )

    def without(self, sources: Iterable[str]) -> EngineLayout:
        """Return the layout of the tensors that are written from other sources than these."""
        left_out = set(sources)
        copies = [copy for copy in self.copies if copy.source not in left_out]
        written = {copy.destination for copy in copies}
        return replace(
            self,
            destinations={n: spec for n, spec in self.destinations.items() if n in written},
            copies=copies,
            constants=[constant for constant in self.constants if constant[0] in written],
            quantized={n: q for n, q in self.quantized.items() if n in written},
        )

    def sliced_dims(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        """Return source → the dimension of which this engine rank reads only a part.

        It is 1 for a row-parallel weight: sharded on that dimension, a rank's shard lies inside its
        own engine slice. shapes: of the sources.
        """
        reached: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
        for copy in self.copies:
            block = copy.block(shapes[copy.source])
            for dim in range(len(block.start)):
                reached[copy.source, dim].add(reach(block, dim))
        sliced: dict[str, int] = {}
        for (source, dim), spans in reached.items():
            if sum(high - low for low, high in spans) < shapes[source][dim]:
                sliced.setdefault(source, dim)
        return sliced


@dataclass
class CheckpointLayout:
    """How each tensor of a model's checkpoint is cut from its trained parameters.

    parameters: trained parameter (or persistent buffer) → shape.
    tensors: checkpoint tensor → shape.
    copies: checkpoint tensor → the copies of parameters that fill it, contiguous.
    buffers: which of `parameters` are persistent buffers.
    config: the model's configuration.
    """

    parameters: dict[str, Shape]
    tensors: dict[str, Shape]
    copies: dict[str, list[Copy]]
    buffers: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)

    def assemble(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield checkpoint tensors of full parameters, each as soon as it is complete."""
        missing = {name: {c.source for c in copies} for name, copies in self.copies.items()}
        held: dict[str, torch.Tensor] = {}
        for parameter, full in parameters:
            held[parameter] = full.contiguous()
            for name in [n for n, sources in missing.items() if sources <= held.keys()]:
                yield name, self._fill(name, held)
                del missing[name]
            held = {n: held[n] for n in held.keys() & set().union(*missing.values())}

    def _fill(self, name: str, full: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return one checkpoint tensor, contiguous; a view of its parameter where possible."""
        shape, copies = self.tensors[name], self.copies[name]
        parts = [
            full[c.source].as_strided(
                c.sizes, c.source_strides, full[c.source].storage_offset() + c.source_offset
            )
            for c in copies
        ]
        if len(parts) == 1 and copies[0].destination_strides == contiguous_strides(copies[0].sizes):
            return parts[0].reshape(shape).contiguous()
        tensor = parts[0].new_empty(shape)
        for c, part in zip(copies, parts, strict=True):
            tensor.as_strided(c.sizes, c.destination_strides, c.destination_offset).copy_(part)
        return tensor


def identity_layout(tensors: Mapping[str, torch.Tensor]) -> EngineLayout:
    """Return the layout of an engine that holds each source unsharded, under the same name."""
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    copies = [
        Copy(name, name, 0, 0, spec.shape, contiguous_strides(spec.shape), spec.stride)
        for name, spec in specs.items()
    ]
    return EngineLayout(specs, copies)
