"""Recording an engine's loader once per structurally equal layer instead of once per layer.

Two layers are taken for equal when everything that carries their number is: trained parameters,
checkpoint tensors and how these are cut, engine tensors. Only the first two and the last layer of
each kind are loaded while recording. If they give the same copies, and no copy crosses layers, the
layers between get theirs by renaming; else every layer is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from hybridengine.reshard.layout import (
    Checkpoint,
    EngineLayout,
    LayoutError,
    TensorSpec,
    record_layout,
    split_layer,
    without_aliases,
)

__all__ = ["record_engine"]

_Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def record_engine(
    model: torch.nn.Module, load_weights: _Loader, checkpoint: Checkpoint, dtype: torch.dtype
) -> EngineLayout:
    """The layout of the engine's `model`, its sources the trained parameters of `checkpoint`.

    As `record_layout(...).of_parameters(checkpoint)`, whose errors it raises, in the time that the
    different layers of the model take.
    """
    kinds = _layer_kinds(model, checkpoint)
    loaded = {number for layers in kinds for number in _samples(layers)}
    layout = None
    if len(loaded) < sum(map(len, kinds)):
        try:
            layout = _record(model, load_weights, _only(checkpoint, loaded), dtype, loaded)
            layout = _with_all_layers(layout, kinds)
        except LayoutError:  # loading a part is our idea: the loader may not go along
            layout = None
    if layout is None:
        layout = _record(model, load_weights, checkpoint, dtype, None)
    return _ordered(layout, model, checkpoint)


def _record(
    model: torch.nn.Module,
    load_weights: _Loader,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    loaded: set[int] | None,
) -> EngineLayout:
    def expected(name: str) -> bool:
        return loaded is None or (k := split_layer(name)[1]) is None or k in loaded

    recorded = record_layout(model, load_weights, checkpoint.tensors, dtype, expected)
    return recorded.of_parameters(checkpoint)


def _samples(layers: list[int]) -> list[int]:
    """Which layers of a kind stand for it: neighbours, for loaders that alternate, and the last."""
    return [*layers[:2], *layers[-1:]]


def _layer_kinds(model: torch.nn.Module, checkpoint: Checkpoint) -> list[list[int]]:
    """The numbers of all layers, equal ones together."""
    traits = {number: list(known) for number, known in checkpoint.layer_traits.items()}
    for name, tensor in without_aliases(_tensors(model)).items():
        plain, number = split_layer(name)
        if number is not None:
            spec = TensorSpec.of(tensor)
            traits.setdefault(number, []).append((plain, spec.shape, spec.stride, spec.dtype))
    kinds: dict[frozenset, list[int]] = defaultdict(list)
    for number in sorted(traits):
        kinds[frozenset(traits[number])].append(number)
    return list(kinds.values())


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _only(checkpoint: Checkpoint, loaded: set[int]) -> Checkpoint:
    kept = [n for n in checkpoint.tensors if (k := split_layer(n)[1]) is None or k in loaded]
    return replace(
        checkpoint,
        tensors={n: checkpoint.tensors[n] for n in kept},
        copies={n: checkpoint.copies[n] for n in kept},
    )


def _with_all_layers(layout: EngineLayout, kinds: list[list[int]]) -> EngineLayout | None:
    """The layout with the layers that were not loaded; None where that is not certain."""
    if any(split_layer(c.source)[1] != split_layer(c.destination)[1] for c in layout.copies):
        return None
    for source, reason in layout.fallback.items():
        if split_layer(source)[1] != split_layer(reason.split(": ")[0])[1]:
            return None
    whole = replace(
        layout,
        destinations=dict(layout.destinations),
        copies=list(layout.copies),
        constants=list(layout.constants),
        fallback=dict(layout.fallback),
        by_loader=set(layout.by_loader),
    )
    for first, *others in kinds:
        part = _layer(layout, first)
        for number in others:
            made = _renamed(part, number)
            if number in _samples([first, *others]):
                if _canonical(made) != _canonical(_layer(layout, number)):
                    return None
                continue
            whole.destinations |= made.destinations
            whole.copies += made.copies
            whole.constants += made.constants
            whole.fallback |= made.fallback
            whole.by_loader |= made.by_loader
    return whole


def _layer(layout: EngineLayout, number: int) -> EngineLayout:
    """What of a layout belongs to one layer."""

    def here(name: str) -> bool:
        return split_layer(name)[1] == number

    return EngineLayout(
        {n: spec for n, spec in layout.destinations.items() if here(n)},
        [c for c in layout.copies if here(c.destination)],
        [c for c in layout.constants if here(c[0])],
        {n: why for n, why in layout.fallback.items() if here(n)},
        {n for n in layout.by_loader if here(n)},
    )


def _renamed(part: EngineLayout, number: int) -> EngineLayout:
    """One layer's part of a layout as that of another layer."""

    def to(name: str) -> str:
        return split_layer(name)[0].replace("*", str(number), 1)

    def reason(text: str) -> str:
        name, rest = text.split(": ", 1)
        return f"{to(name)}: {rest}"

    return EngineLayout(
        {to(n): spec for n, spec in part.destinations.items()},
        [replace(c, source=to(c.source), destination=to(c.destination)) for c in part.copies],
        [(to(n), *rest) for n, *rest in part.constants],  # type: ignore[misc]
        {to(n): reason(why) for n, why in part.fallback.items()},
        {to(n) for n in part.by_loader},
    )


def _canonical(layout: EngineLayout) -> tuple:
    return (
        layout.destinations,
        sorted(map(repr, layout.copies)),
        sorted(map(repr, layout.constants)),
        layout.fallback,
        layout.by_loader,
    )


def _ordered(layout: EngineLayout, model: torch.nn.Module, checkpoint: Checkpoint) -> EngineLayout:
    """The layout in the order of the model, however it was recorded."""

    def by(place: Mapping[str, int], name: str) -> int:
        return place.get(name, len(place))

    sources = {name: i for i, name in enumerate(checkpoint.parameters)}
    engine = {name: i for i, name in enumerate(_tensors(model))}
    return replace(
        layout,
        destinations=dict(sorted(layout.destinations.items(), key=lambda d: by(engine, d[0]))),
        copies=sorted(
            layout.copies,
            key=lambda c: (
                sources[c.source],
                by(engine, c.destination),
                c.source_offset,
                c.destination_offset,
                c.sizes,
            ),
        ),
        constants=sorted(layout.constants, key=lambda c: (by(engine, c[0]), c[1])),
        fallback=dict(sorted(layout.fallback.items(), key=lambda f: by(sources, f[0]))),
    )
