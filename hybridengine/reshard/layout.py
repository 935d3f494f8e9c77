"""What an engine's weights are made of: strided copies of checkpoint tensors, recorded.

The engine's own `load_weights` runs once over meta tensors under `_CopyRecorder`; every `copy_` it
performs becomes a `Copy`. That is exact for fused, replicated, padded and tied weights of every
architecture the engine loads, with no table of names. What is not a pure copy is listed in
`EngineLayout.fallback` with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine.reshard.geometry import Block, NotABlock, contiguous_strides, factor, reach

__all__ = ["Copy", "EngineLayout", "LayoutError", "TensorSpec", "identity_layout", "record_layout"]

_aten = torch.ops.aten


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


@dataclass(frozen=True)
class Copy:
    """One strided copy: checkpoint tensor `source` → engine tensor `destination`.

    Offsets and strides count elements from the start of each tensor; both sides share `sizes`.
    The source is addressed as the contiguous global tensor.
    """

    source: str
    destination: str
    source_offset: int
    destination_offset: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]

    def block(self, shape: tuple[int, ...]) -> Block:
        """This copy seen from the dimensions of its source of `shape`."""
        return factor(
            shape,
            self.source_offset,
            self.sizes,
            self.source_strides,
            self.destination_offset,
            self.destination_strides,
        )


@dataclass
class EngineLayout:
    """Everything the reshard needs to know about one rank's engine weights.

    `constants` are regions the loader fills with one value (vocabulary padding); they are written
    once, when the reshard is set up. `fallback`: checkpoint name → why it is no pure copy.
    """

    destinations: dict[str, TensorSpec]
    copies: list[Copy] = field(default_factory=list)
    constants: list[tuple[str, int, tuple[int, ...], tuple[int, ...], float]] = field(
        default_factory=list
    )
    fallback: dict[str, str] = field(default_factory=dict)

    def sliced_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Checkpoint name → the dimension along which this engine rank takes only a part of it.

        A row-parallel weight answers 1: sharding it on that dimension keeps a rank's rows inside
        its own engine slice.
        """
        reached: dict[str, list[set[tuple[int, int]]]] = {}
        for copy in self.copies:
            block = copy.block(shapes[copy.source])
            spans = reached.setdefault(copy.source, [set() for _ in block.start])
            for dim, span in enumerate(spans):
                span.add(reach(block, dim))
        sliced: dict[str, int] = {}
        for source, spans in reached.items():
            for dim, span in enumerate(spans):
                if sum(high - low for low, high in span) < shapes[source][dim]:
                    sliced.setdefault(source, dim)
        return sliced


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _CopyRecorder(TorchDispatchMode):
    """Notes each in-place write to an engine tensor while a loader runs over meta tensors."""

    def __init__(self, sources: dict[int, str], destinations: dict[int, str]) -> None:
        super().__init__()
        self.sources = sources
        self.destinations = destinations
        self.copies: list[Copy] = []
        self.constants: list[tuple[str, int, tuple[int, ...], tuple[int, ...], float]] = []
        self.impure: dict[str, str] = {}  # destination → why

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func._schema.is_mutable or not args or not isinstance(args[0], torch.Tensor):
            return result
        written = args[0]
        destination = self.destinations.get(_storage_key(written))
        if destination is None:
            return result
        if func is _aten.copy_.default:
            self._note_copy(destination, written, args[1])
        elif func in (_aten.fill_.Scalar, _aten.zero_.default):
            value = float(args[1]) if len(args) > 1 else 0.0
            self.constants.append(
                (
                    destination,
                    written.storage_offset(),
                    tuple(written.shape),
                    tuple(written.stride()),
                    value,
                )
            )
        else:
            self.impure[destination] = f"the loader computes it with {func}"
        return result

    def _note_copy(self, destination: str, written: torch.Tensor, read: torch.Tensor) -> None:
        source = self.sources.get(_storage_key(read))
        if source is None:
            self.impure[destination] = "the loader transforms the checkpoint tensor before copying"
            return
        read = read.expand(written.shape)
        self.copies.append(
            Copy(
                source=source,
                destination=destination,
                source_offset=read.storage_offset(),
                destination_offset=written.storage_offset(),
                sizes=tuple(written.shape),
                source_strides=tuple(read.stride()),
                destination_strides=tuple(written.stride()),
            )
        )


def record_layout(
    model: torch.nn.Module,
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    checkpoint_shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> EngineLayout:
    """Run `load_weights` over meta checkpoint tensors and write down what it copies where.

    model: the engine's module, on the meta device.
    checkpoint_shapes: checkpoint name → global shape, as `load_weights` expects them.
    dtype: the dtype in which the engine receives its weights.

    Raises LayoutError when a parameter of the engine is written by no checkpoint tensor.
    """
    parameters = dict(model.named_parameters())
    not_meta = [name for name, p in parameters.items() if not p.is_meta]
    if not_meta:
        raise LayoutError(
            f"model: expected every parameter on the meta device; {not_meta[0]!r} is not. "
            "Build the model under torch.device('meta')."
        )
    checkpoint = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in checkpoint_shapes.items()
    }
    recorder = _CopyRecorder(
        sources={_storage_key(t): name for name, t in checkpoint.items()},
        destinations={_storage_key(p): name for name, p in parameters.items()},
    )
    feeding: list[str] = []  # the checkpoint tensor the loader asked for last
    fed_by: dict[str, set[str]] = {}  # impure destination → tensors being loaded at the time

    def feed() -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint.items():
            feeding[:] = [name]
            known = set(recorder.impure)
            yield name, tensor
            for destination in set(recorder.impure) - known:
                fed_by.setdefault(destination, set()).add(name)

    with recorder, torch.no_grad():
        load_weights(feed())

    replaced = [
        name
        for name, p in model.named_parameters()
        if recorder.destinations.get(_storage_key(p)) != name
    ]
    for name in replaced:
        recorder.impure[name] = "the loader replaces the parameter's storage"
    fallback: dict[str, str] = {}
    for destination, reason in recorder.impure.items():
        for source in fed_by.get(destination, set()):
            fallback[source] = f"{destination}: {reason}"
    for copy in recorder.copies:
        try:
            copy.block(tuple(checkpoint_shapes[copy.source]))
        except NotABlock as error:
            fallback.setdefault(copy.source, f"{copy.destination}: {error}")
    layout = EngineLayout(
        destinations={name: TensorSpec.of(p) for name, p in parameters.items()},
        copies=_last_writes([c for c in recorder.copies if c.source not in fallback]),
        constants=recorder.constants,
        fallback=fallback,
    )
    written = {c.destination for c in layout.copies} | {c[0] for c in layout.constants}
    written |= set(recorder.impure) | {c.destination for c in recorder.copies}
    missing = sorted(set(parameters) - written)
    if missing:
        raise LayoutError(
            f"the engine parameter {missing[0]!r} (and {len(missing) - 1} more) is written by no "
            f"checkpoint tensor; the checkpoint names start with "
            f"{list(checkpoint_shapes)[:3]}. Is this the model the engine was built for?"
        )
    return layout


def _last_writes(copies: list[Copy]) -> list[Copy]:
    """Drop a copy that a later one repeats onto the very same destination region."""
    last = {
        (c.destination, c.destination_offset, c.sizes, c.destination_strides): c for c in copies
    }
    return list(last.values())


def identity_layout(parameters: Mapping[str, torch.Tensor]) -> EngineLayout:
    """The layout of an engine that keeps each checkpoint tensor whole under its own name."""
    copies = []
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        copies.append(
            Copy(name, name, 0, 0, shape, contiguous_strides(shape), tuple(tensor.stride()))
        )
    return EngineLayout({name: TensorSpec.of(t) for name, t in parameters.items()}, copies)
