"""Recording an engine's loader once per structurally equal layer instead of once per layer.

Two layers are taken for equal when everything that carries their number is: trained parameters,
checkpoint tensors and how these are cut, engine tensors. Only the first two and the last layer of
each kind are loaded while recording. If they give the same copies, and no copy crosses layers, the
layers between get theirs by renaming; else every layer is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
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
    return layout.ordered()


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
    parts = [layout]
    for first, *others in kinds:
        for number in others:
            part = layout.layer(first, number)
            if number not in _samples([first, *others]):
                parts.append(part)
            elif part != layout.layer(number, number):
                return None
    return EngineLayout(
        {n: spec for part in parts for n, spec in part.destinations.items()},
        [c for part in parts for c in part.copies],
        [c for part in parts for c in part.constants],
        {n: why for part in parts for n, why in part.fallback.items()},
        {n for part in parts for n in part.by_loader},
    )
