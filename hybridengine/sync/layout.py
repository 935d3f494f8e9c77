"""How an engine's weights, and a checkpoint's tensors, derive from trained parameters.

Plain data: strided copies between named tensors. `hybridengine.sync.record` makes it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hybridengine.kernels.block_quantize import block_grid
from hybridengine.sync.copies import Copy
from hybridengine.sync.geometry import contiguous_strides, reach

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
