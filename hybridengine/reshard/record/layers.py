"""Recording an engine's loader once per structurally equal layer instead of once per layer.

Two layers are taken for equal when everything that carries their number is: trained parameters,
checkpoint tensors and how these are cut, engine tensors. Only the first two and the last layer of
each kind are loaded while recording. If they give the same copies, and no copy crosses layers, the
layers between get theirs by renaming; else every layer is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from hybridengine.reshard.record.loader import engine_tensors, record_layout
from hybridengine.sharding.layout import (
    Checkpoint,
    EngineLayout,
    LayoutError,
    TensorSpec,
    split_layer,
)

__all__ = ["record_engine"]


def record_engine(
    model: torch.nn.Module,
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> EngineLayout:
    """The layout of the engine's `model`, its sources the trained parameters of `checkpoint`.

    As `record_layout(...).of_parameters(checkpoint)`, whose errors it raises, in the time that the
    different layers of the model take.
    """

    def record(loaded: set[int]) -> EngineLayout:
        here = (loaded | {None}).__contains__
        tensors = {n: s for n, s in checkpoint.tensors.items() if here(split_layer(n)[1])}
        copies = {name: checkpoint.copies[name] for name in tensors}
        part = replace(checkpoint, tensors=tensors, copies=copies)
        recorded = record_layout(
            model, load_weights, tensors, dtype, lambda name: here(split_layer(name)[1])
        )
        return recorded.of_parameters(part)

    kinds = _layer_kinds(model, checkpoint)
    every = {number for layers in kinds for number in layers}
    some = {number for layers in kinds for number in _samples(layers)}
    if some < every:
        with suppress(LayoutError):  # loading a part is our idea: the loader may not go along
            if layout := _with_all_layers(record(some), kinds):
                return layout.ordered()
    return record(every).ordered()


def _samples(layers: list[int]) -> list[int]:
    """Which layers of a kind stand for it: neighbours, for loaders that alternate, and the last."""
    return [*layers[:2], *layers[-1:]]


def _layer_kinds(model: torch.nn.Module, checkpoint: Checkpoint) -> list[list[int]]:
    """The numbers of all layers, equal ones together."""
    traits = {number: list(known) for number, known in checkpoint.layer_traits.items()}
    for name, tensor in engine_tensors(model).items():
        plain, number = split_layer(name)
        if number is not None:
            spec = TensorSpec.of(tensor)
            traits.setdefault(number, []).append((plain, spec.shape, spec.stride, spec.dtype))
    kinds: dict[frozenset, list[int]] = defaultdict(list)
    for number in sorted(traits):
        kinds[frozenset(traits[number])].append(number)
    return list(kinds.values())


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
