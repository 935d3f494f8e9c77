"""What an engine's weights are made of: strided copies of trained parameters."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from hybridengine.sharding.copies import Copy, compose, merge
from hybridengine.sharding.geometry import NotABlock, contiguous_strides, reach

__all__ = [
    "Checkpoint",
    "EngineLayout",
    "LayoutError",
    "Shape",
    "TensorSpec",
    "identity_layout",
    "split_layer",
]

Shape = tuple[int, ...]


class LayoutError(RuntimeError):
    """The engine's weights cannot be described, or no longer match their description."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, element strides and dtype of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass
class EngineLayout:
    """Everything the reshard needs to know about one rank's engine weights.

    `constants` are regions the loader fills with one value (vocabulary padding), written by every
    sync before the copies, which may go over them. `fallback`: source name → why it is gathered
    whole and left to the engine's loader, which then writes (some of) the tensors in `by_loader`.
    """

    destinations: dict[str, TensorSpec]
    copies: list[Copy] = field(default_factory=list)
    constants: list[tuple[str, int, Shape, Shape, float]] = field(default_factory=list)
    fallback: dict[str, str] = field(default_factory=dict)
    by_loader: set[str] = field(default_factory=set)

    def digest(self) -> str:
        """Equal for equal layouts, in every process."""
        fields = (self.destinations, self.copies, self.constants, self.fallback)
        return hashlib.sha256(repr((fields, sorted(self.by_loader))).encode()).hexdigest()

    def ordered(self) -> EngineLayout:
        """This layout in an order that does not depend on how it was recorded."""
        return EngineLayout(
            dict(sorted(self.destinations.items())),
            sorted(self.copies),
            sorted(self.constants),
            dict(sorted(self.fallback.items())),
            self.by_loader,
        )

    def layer(self, number: int, to: int) -> EngineLayout:
        """What belongs to layer `number`, as that of layer `to`."""

        def here(name: str) -> bool:
            return split_layer(name)[1] == number

        def new(name: str) -> str:
            return split_layer(name)[0].replace("*", str(to), 1)

        return EngineLayout(
            {new(n): spec for n, spec in self.destinations.items() if here(n)},
            [
                replace(c, source=new(c.source), destination=new(c.destination))
                for c in self.copies
                if here(c.destination)
            ],
            [(new(n), *rest) for n, *rest in self.constants if here(n)],  # type: ignore[misc]
            {
                new(n): ": ".join((new(why.partition(": ")[0]), why.partition(": ")[2]))
                for n, why in self.fallback.items()
                if here(n)
            },
            {new(n) for n in self.by_loader if here(n)},
        ).ordered()

    def of_parameters(self, checkpoint: Checkpoint) -> EngineLayout:
        """This layout, whose sources are checkpoint tensors, with trained parameters as sources."""
        composed: dict[str, list[Copy]] = {name: [] for name in checkpoint.tensors}
        impure = dict(self.fallback)
        for copy in self.copies:
            try:
                parts = compose(copy, checkpoint.copies[copy.source])
                for part in parts:
                    part.block(checkpoint.parameters[part.source])
                composed[copy.source] += parts
            except NotABlock as error:
                impure[copy.source] = f"{copy.destination}: reordered: {error}"
        # A parameter is moved or gathered: what else is cut from a gathered one goes with it.
        gathered: dict[str, str] = {}
        spread = impure
        while spread:
            gathered |= {c.source: why for n, why in spread.items() for c in checkpoint.copies[n]}
            impure |= spread
            spread = {
                name: gathered[c.source]
                for name, copies in checkpoint.copies.items()
                for c in copies
                if c.source in gathered and name not in impure
            }
        by_loader = {c.destination for c in self.copies if c.source in impure}
        kept = [c for name, copies in composed.items() if name not in impure for c in copies]
        shapes = {name: spec.shape for name, spec in self.destinations.items()}
        return replace(
            self,
            copies=merge(kept, checkpoint.parameters, shapes),
            fallback=gathered,
            by_loader=self.by_loader | by_loader,
        )

    def sliced_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Checkpoint name → the dimension along which this engine rank takes only a part of it.

        A row-parallel weight answers 1: sharding it on that dimension keeps a rank's rows inside
        its own engine slice.
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
class Checkpoint:
    """What each tensor of a model's checkpoint is made of.

    parameters: trained parameter (or stored buffer) → shape. tensors: checkpoint name → shape.
    copies: checkpoint name → the copies of parameters that fill it, contiguous. buffers: which of
    `parameters` are stored buffers. config: the model's configuration.
    """

    parameters: dict[str, Shape]
    tensors: dict[str, Shape]
    copies: dict[str, list[Copy]]
    buffers: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def layer_traits(self) -> dict[int, list[tuple]]:
        """Layer number → all that its parameters and checkpoint tensors are, without the number."""
        traits: dict[int, list[tuple]] = defaultdict(list)
        for name, shape in self.parameters.items():
            plain, number = split_layer(name)
            if number is not None:
                traits[number].append((plain, "parameter", shape))
        for name, shape in self.tensors.items():
            plain, number = split_layer(name)
            if number is None:
                continue
            cuts = [plain, shape]
            for c in self.copies[name]:
                source, source_number = split_layer(c.source)
                cuts.append(source if source_number == number else c.source)
                cuts += (c.source_offset, c.sizes, c.source_strides, c.destination_strides)
            traits[number].append(tuple(cuts))
        return traits

    def assemble(
        self, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint tensors out of whole parameters, each as soon as all of its own have come."""
        missing = {name: {c.source for c in copies} for name, copies in self.copies.items()}
        held: dict[str, torch.Tensor] = {}
        for parameter, whole in parameters:
            held[parameter] = whole.contiguous()
            for name in [n for n, sources in missing.items() if sources <= held.keys()]:
                yield name, self._fill(name, held)
                del missing[name]
            held = {n: held[n] for n in held.keys() & set().union(*missing.values())}

    def _fill(self, name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One checkpoint tensor, contiguous; a view of its parameter where it can be."""
        shape, copies = self.tensors[name], self.copies[name]
        parts = [
            whole[c.source].as_strided(c.sizes, c.source_strides, c.source_offset) for c in copies
        ]
        if len(parts) == 1 and copies[0].destination_strides == contiguous_strides(copies[0].sizes):
            return parts[0].reshape(shape).contiguous()
        tensor = parts[0].new_empty(shape)
        for c, part in zip(copies, parts, strict=True):
            tensor.as_strided(c.sizes, c.destination_strides, c.destination_offset).copy_(part)
        return tensor


def split_layer(name: str) -> tuple[str, int | None]:
    """(name without the number of its layer, that number): the first part that is a number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            parts[i] = "*"
            return ".".join(parts), int(part)
    return name, None


def identity_layout(parameters: Mapping[str, torch.Tensor]) -> EngineLayout:
    """The layout of an engine that keeps each checkpoint tensor whole under its own name."""
    specs = {name: TensorSpec.of(tensor) for name, tensor in parameters.items()}
    copies = [
        Copy(name, name, 0, 0, spec.shape, contiguous_strides(spec.shape), spec.stride)
        for name, spec in specs.items()
    ]
    return EngineLayout(specs, copies)
