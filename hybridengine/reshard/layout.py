"""What an engine's weights are made of: strided copies of trained parameters, recorded.

The engine's own `load_weights` runs once over meta tensors under a `CopyRecorder`; so does the
conversion that names and cuts the checkpoint's tensors from the trained parameters. The two chain
into copies from parameters to engine tensors. That is exact for fused, replicated, padded and tied
weights of every architecture the engine loads, with no table of names. What is not a pure copy is
listed in `EngineLayout.fallback` with its reason.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from hybridengine.reshard.copies import Copy, compose, merge
from hybridengine.reshard.geometry import NotABlock, contiguous_strides, reach
from hybridengine.reshard.recorder import Contents, CopyRecorder

__all__ = [
    "Checkpoint",
    "Copy",
    "EngineLayout",
    "LayoutError",
    "TensorSpec",
    "engine_tensors",
    "identity_layout",
    "record_checkpoint",
    "record_layout",
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


def record_checkpoint(
    parameters: Mapping[str, Shape],
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> Checkpoint:
    """Run `convert`, parameters → checkpoint tensors, over meta tensors and note what it cuts.

    Raises LayoutError for a checkpoint tensor that is computed rather than copied.
    """
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in parameters.items()}
    with CopyRecorder(stand_ins) as recorder, torch.no_grad():
        tensors = dict(convert(dict(stand_ins)))
    copies: dict[str, list[Copy]] = {}
    for name, tensor in tensors.items():
        contents = recorder.reads(tensor, name)
        if contents.computed or contents.fills:
            raise LayoutError(
                f"checkpoint tensor {name!r} is no copy of trained parameters "
                f"{sorted(contents.origins)}: {contents.computed or 'partly constant'}"
            )
        copies[name] = contents.copies
    return Checkpoint(
        dict(parameters), {name: tuple(t.shape) for name, t in tensors.items()}, copies
    )


def record_layout(
    model: torch.nn.Module,
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    checkpoint_shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    expected: Callable[[str], bool] = lambda name: True,
) -> EngineLayout:
    """Run `load_weights` over meta checkpoint tensors and write down what it copies where.

    model: the engine's module, of which nothing is read; on the meta device it takes no memory.
    checkpoint_shapes: checkpoint name → global shape, as `load_weights` expects them.
    dtype: the dtype in which the engine receives its weights.
    expected: which of the engine's parameters those tensors must write.

    The layout's sources are checkpoint tensors; `EngineLayout.of_parameters` goes on from there.
    Raises LayoutError when a parameter of the engine is written by no checkpoint tensor, and for
    every error of the loader.
    """
    checkpoint = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in checkpoint_shapes.items()
    }
    # Parameters must be loaded; buffers (a router's bias correction) are where the loader does.
    destinations = engine_tensors(model)
    specs = {name: TensorSpec.of(t) for name, t in destinations.items()}
    storages = {name: t.untyped_storage() for name, t in destinations.items()}
    recorder = CopyRecorder(checkpoint, destinations)
    with recorder, torch.no_grad():
        _load(load_weights, checkpoint)

    layout = EngineLayout({})
    missing: list[str] = []
    impure: dict[str, str] = {}  # checkpoint name → why
    known = {storage._cdata for storage in storages.values()}
    for name, tensor in engine_tensors(model).items():
        if name in storages and tensor.untyped_storage()._cdata == storages[name]._cdata:
            continue
        if name in storages or tensor.untyped_storage()._cdata not in known:
            how = "replaces the storage of" if name in storages else "creates"
            contents = recorder.reads(tensor, name)
            impure |= {source: f"{name}: the loader {how} it" for source in contents.origins}
            layout.by_loader.add(name)
    for name, storage in storages.items():
        contents = recorder.contents(storage)
        if name in layout.by_loader:
            layout.destinations[name] = specs[name]
        elif contents is not None:
            layout.destinations[name] = specs[name]
            impure |= _note_contents(layout, name, contents, checkpoint_shapes)
        elif isinstance(destinations[name], torch.nn.Parameter) and expected(name):
            missing.append(name)
    if missing:
        raise LayoutError(
            f"the engine parameter {missing[0]!r} (and {len(missing) - 1} more) is written by no "
            f"checkpoint tensor; the checkpoint names start with "
            f"{list(checkpoint_shapes)[:3]}. Is this the model the engine was built for?"
        )
    # Whatever else the loader makes of those tensors comes with them.
    layout.fallback = impure
    layout.by_loader |= {c.destination for c in layout.copies if c.source in impure}
    layout.copies = [c for c in layout.copies if c.source not in impure]
    return layout


def _load(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    checkpoint: Mapping[str, torch.Tensor],
) -> None:
    """Run the engine's loader. Its errors, many of them without a text, become LayoutErrors."""
    last: list[str] = []

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint.items():
            last[:] = [name]
            yield name, tensor

    try:
        load_weights(given())
    except LayoutError:
        raise
    except Exception as error:
        at = f"{last[0]!r} of shape {tuple(checkpoint[last[0]].shape)}" if last else "none"
        text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:300]
        raise LayoutError(
            f"the engine's loader does not accept the trained model's tensors (the last that it "
            f"took is {at}; {text}). Were both built from the same model?"
        ) from error


def _note_contents(
    layout: EngineLayout, name: str, contents: Contents, shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """Add one engine tensor's copies to `layout`; or which tensors it falls back for, and why."""
    reason = contents.computed or _not_blocks(contents.copies, shapes)
    if reason is None:
        layout.constants += [(name, *region, value) for region, value in contents.fills]
        layout.copies += _last_writes(contents.copies)
        return {}
    if not contents.origins:
        raise LayoutError(f"engine tensor {name!r}: {reason}, from no checkpoint tensor")
    layout.by_loader.add(name)
    return {source: f"{name}: {reason}" for source in contents.origins}


def engine_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, one name per storage: tied weights are written once."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
    return dict(first.values())


def _not_blocks(copies: Iterable[Copy], shapes: Mapping[str, Shape]) -> str | None:
    for copy in copies:
        try:
            copy.block(tuple(shapes[copy.source]))
        except NotABlock as error:
            return f"reordered: {error}"
    return None


def _last_writes(copies: list[Copy]) -> list[Copy]:
    """Drop a copy that a later one repeats onto the very same destination region."""
    last = {
        (c.destination, c.destination_offset, c.sizes, c.destination_strides): c for c in copies
    }
    return list(last.values())


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
