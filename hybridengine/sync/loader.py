"""Record which strided copies of trained parameters make up an engine's weights.

The engine's own `load_weights` runs once over meta tensors under a `CopyRecorder`; so does the
conversion that names and cuts the checkpoint's tensors from the trained parameters. The two compose
into copies from parameters to engine tensors. That is exact for fused, replicated, padded and tied
weights of every architecture the engine loads, without a table of names. What is not a pure copy is
listed in `EngineLayout.fallback` with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from hybridengine.sync.blocks import NotABlock
from hybridengine.sync.layout import (
    CheckpointLayout,
    Copy,
    EngineLayout,
    LayoutError,
    Shape,
    TensorSpec,
    compose,
    merge,
)
from hybridengine.sync.recorder import CopyRecorder, StorageContents

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def record_checkpoint(
    parameters: Mapping[str, Shape],
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> CheckpointLayout:
    """Run `convert`, parameters → checkpoint tensors, over meta tensors and record what it cuts.

    Raises LayoutError for a checkpoint tensor that is computed rather than copied.
    """
    unknowns = {name: torch.empty(shape, device="meta") for name, shape in parameters.items()}
    with CopyRecorder(unknowns) as recorder, torch.no_grad():
        tensors = dict(convert(dict(unknowns)))
    copies: dict[str, list[Copy]] = {}
    for name, tensor in tensors.items():
        contents = recorder.contents_of(tensor, name)
        if contents.computed or contents.constants:
            raise LayoutError(
                f"checkpoint tensor {name!r} is no copy of trained parameters "
                f"{sorted(contents.sources)}: {contents.computed or 'partly constant'}"
            )
        copies[name] = contents.copies
    return CheckpointLayout(
        dict(parameters), {name: tuple(t.shape) for name, t in tensors.items()}, copies
    )


def record_layout(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    checkpoint_shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    expected: Callable[[str], bool] = lambda name: True,
) -> EngineLayout:
    """Run `load_weights` over meta checkpoint tensors and record what it copies where.

    model: the engine's module; on the meta device it takes no memory.
    checkpoint_shapes: checkpoint tensor → full shape, as `load_weights` expects them.
    dtype: the dtype of the tensors passed to it.
    expected: which of the engine's parameters they must write.

    The sources of the returned layout are checkpoint tensors; see `compose_with_checkpoint`.

    Raises LayoutError when a parameter of the engine is written by no checkpoint tensor, and for
    every error of the loader.
    """
    checkpoint = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in checkpoint_shapes.items()
    }
    destinations = engine_tensors(model)
    specs = {name: TensorSpec.of(t) for name, t in destinations.items()}
    storages = {name: t.untyped_storage() for name, t in destinations.items()}
    recorder = CopyRecorder(checkpoint, destinations)
    with recorder, torch.no_grad():
        _load(load_weights, checkpoint)

    layout = EngineLayout({})
    _note_new_storages(layout, model, recorder, storages)
    missing: list[str] = []
    for name, storage in storages.items():
        contents = recorder.written_to(storage)
        if name in layout.by_loader:
            layout.destinations[name] = specs[name]
        elif contents is not None:
            layout.destinations[name] = specs[name]
            layout.fallback |= _note_contents(layout, name, contents, checkpoint_shapes)
        elif isinstance(destinations[name], torch.nn.Parameter) and expected(name):
            missing.append(name)  # a buffer need not be loaded
    if missing:
        raise LayoutError(
            f"the engine parameter {missing[0]!r} (and {len(missing) - 1} more) is written by no "
            f"checkpoint tensor; the checkpoint names start with "
            f"{list(checkpoint_shapes)[:3]}. Is this the model the engine was built for?"
        )
    # The loader writes everything else that is made of a fallback tensor, too.
    layout.by_loader |= {c.destination for c in layout.copies if c.source in layout.fallback}
    layout.copies = [c for c in layout.copies if c.source not in layout.fallback]
    return layout


def _load(load_weights: LoadWeights, checkpoint: Mapping[str, torch.Tensor]) -> None:
    """Run the engine's loader; turn its errors, many of them without a message, into LayoutErrors.

    The message names the tensor that was loaded last.
    """
    last: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint.items():
            last[:] = [name]
            yield name, tensor

    try:
        load_weights(weights())
    except LayoutError:
        raise
    except Exception as error:
        at = f"{last[0]!r} of shape {tuple(checkpoint[last[0]].shape)}" if last else "none"
        text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:300]
        raise LayoutError(
            f"the engine's loader does not accept the trained model's tensors (the last that it "
            f"took is {at}; {text}). Were both built from the same model?"
        ) from error


def _note_new_storages(
    layout: EngineLayout,
    model: torch.nn.Module,
    recorder: CopyRecorder,
    storages: Mapping[str, torch.UntypedStorage],
) -> None:
    """Add to `layout` the tensors that the loader has created, or whose storage it has replaced.

    storages: engine tensor → its storage before loading.
    """
    known = {storage._cdata for storage in storages.values()}
    for name, tensor in engine_tensors(model).items():
        storage = tensor.untyped_storage()._cdata
        if name in storages:
            if storage == storages[name]._cdata:
                continue
            how = "replaces the storage of"
        elif storage in known:
            continue
        else:
            how = "creates"
        sources = recorder.contents_of(tensor, name).sources
        layout.fallback |= {source: f"{name}: the loader {how} it" for source in sources}
        layout.by_loader.add(name)


def _note_contents(
    layout: EngineLayout, name: str, contents: StorageContents, shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """Add the copies into one engine tensor to `layout`.

    Returns source → reason where it is no pure copy. shapes: of the sources.
    """
    reason = contents.computed or _why_no_blocks(contents.copies, shapes)
    if reason is None:
        layout.constants += [(name, *region, value) for region, value in contents.constants]
        last = {(c.destination, c.written): c for c in contents.copies}  # overwritten in full
        layout.copies += last.values()
        return {}
    if not contents.sources:
        raise LayoutError(f"engine tensor {name!r}: {reason}, from no checkpoint tensor")
    layout.by_loader.add(name)
    return {source: f"{name}: {reason}" for source in contents.sources}


def engine_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each storage once (tied weights are written once)."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        first.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
    return dict(first.values())


def _why_no_blocks(copies: Iterable[Copy], shapes: Mapping[str, Shape]) -> str | None:
    """Return why a copy does not step through its source by dimensions; None if all do."""
    for copy in copies:
        try:
            copy.block(tuple(shapes[copy.source]))
        except NotABlock as error:
            return f"reordered: {error}"
    return None


def compose_with_checkpoint(layout: EngineLayout, checkpoint: CheckpointLayout) -> EngineLayout:
    """Replace the sources of `layout`, checkpoint tensors, by the parameters they are cut from.

    A copy that does not compose makes its parameters fallbacks. So are all other checkpoint tensors
    of a fallback parameter: a parameter is either copied or gathered.
    """
    composed: dict[str, list[Copy]] = {name: [] for name in checkpoint.tensors}
    fallback = dict(layout.fallback)  # checkpoint tensor → reason
    for copy in layout.copies:
        try:
            parts = compose(copy, checkpoint.copies[copy.source])
            for part in parts:
                part.block(checkpoint.parameters[part.source])
            composed[copy.source] += parts
        except NotABlock as error:
            fallback[copy.source] = f"{copy.destination}: reordered: {error}"
    gathered: dict[str, str] = {}  # parameter → reason
    added = fallback
    while added:
        gathered |= {c.source: why for name, why in added.items() for c in checkpoint.copies[name]}
        fallback |= added
        added = {
            name: gathered[c.source]
            for name, copies in checkpoint.copies.items()
            for c in copies
            if c.source in gathered and name not in fallback
        }
    by_loader = {c.destination for c in layout.copies if c.source in fallback}
    kept = [c for name, copies in composed.items() if name not in fallback for c in copies]
    shapes = {name: spec.shape for name, spec in layout.destinations.items()}
    return replace(
        layout,
        copies=merge(kept, checkpoint.parameters, shapes),
        fallback=gathered,
        by_loader=layout.by_loader | by_loader,
    )


def record_layout_by_layer(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    checkpoint: CheckpointLayout,
    dtype: torch.dtype,
) -> EngineLayout:
    """Return the layout of the engine's `model`; its sources are trained parameters.

    The result, and the errors, are those of `record_layout` followed by `compose_with_checkpoint`.

    Two layers are in one class when everything with their number in its name is equal: trained
    parameters, checkpoint tensors and how these are cut, engine tensors. Only the first two and the
    last layer of each class are loaded while recording. If they give the same copies, and no copy
    crosses layers, the layout of the layers between follows by renaming; else every layer is
    recorded.
    """

    def record(numbers: set[int]) -> EngineLayout:
        def loaded(name: str) -> bool:
            number = split_layer(name)[1]
            return number is None or number in numbers

        tensors = {name: shape for name, shape in checkpoint.tensors.items() if loaded(name)}
        copies = {name: checkpoint.copies[name] for name in tensors}
        recorded = record_layout(model, load_weights, tensors, dtype, loaded)
        return compose_with_checkpoint(
            recorded, replace(checkpoint, tensors=tensors, copies=copies)
        )

    classes = layer_classes(model, checkpoint)
    every = {number for layers in classes for number in layers}
    samples = {number for layers in classes for number in sampled_layers(layers)}
    if samples < every:
        with suppress(LayoutError):  # the loader may refuse a part of a checkpoint
            if layout := _with_all_layers(record(samples), classes):
                return layout.ordered()
    return record(every).ordered()


def sampled_layers(layers: list[int]) -> list[int]:
    """Return the layers of a class to record: two neighbours (loaders may alternate), the last."""
    return [*layers[:2], *layers[-1:]]


def layer_classes(model: torch.nn.Module, checkpoint: CheckpointLayout) -> list[list[int]]:
    """Return the numbers of all layers, grouped by class."""
    traits: dict[int | None, list[tuple]] = defaultdict(list)  # without the number
    for name, shape in checkpoint.parameters.items():
        pattern, number = split_layer(name)
        traits[number].append((pattern, "parameter", shape))
    for name, shape in checkpoint.tensors.items():
        pattern, number = split_layer(name)
        trait: list = [pattern, shape]
        for c in checkpoint.copies[name]:
            source, source_number = split_layer(c.source)
            trait.append(source if source_number == number else c.source)
            trait += (*c.read, c.destination_strides)
        traits[number].append(tuple(trait))
    for name, tensor in engine_tensors(model).items():
        pattern, number = split_layer(name)
        traits[number].append((pattern, TensorSpec.of(tensor)))
    classes: dict[frozenset, list[int]] = defaultdict(list)
    for number in sorted(n for n in traits if n is not None):
        classes[frozenset(traits[number])].append(number)
    return list(classes.values())


def _with_all_layers(layout: EngineLayout, classes: list[list[int]]) -> EngineLayout | None:
    """Return `layout` with the layers that were not recorded; None where they may differ."""
    if any(split_layer(c.source)[1] != split_layer(c.destination)[1] for c in layout.copies):
        return None
    for source, reason in layout.fallback.items():
        if split_layer(source)[1] != split_layer(reason.split(": ")[0])[1]:
            return None
    parts = [layout]
    for first, *others in classes:
        for number in others:
            part = _renumbered(layout, first, number)
            if number not in sampled_layers([first, *others]):
                parts.append(part)
            elif part != _renumbered(layout, number, number):
                return None
    return EngineLayout(
        {n: spec for part in parts for n, spec in part.destinations.items()},
        [c for part in parts for c in part.copies],
        [c for part in parts for c in part.constants],
        {n: why for part in parts for n, why in part.fallback.items()},
        {n for part in parts for n in part.by_loader},
    )


def _renumbered(layout: EngineLayout, number: int, new_number: int) -> EngineLayout:
    """Return the part of `layout` that is layer `number`, renamed to layer `new_number`."""

    def belongs(name: str) -> bool:
        return split_layer(name)[1] == number

    def renamed(name: str) -> str:
        return split_layer(name)[0].replace("*", str(new_number), 1)

    def renamed_reason(reason: str) -> str:
        tensor, _, text = reason.partition(": ")
        return f"{renamed(tensor)}: {text}"

    return EngineLayout(
        {renamed(n): spec for n, spec in layout.destinations.items() if belongs(n)},
        [
            replace(c, source=renamed(c.source), destination=renamed(c.destination))
            for c in layout.copies
            if belongs(c.destination)
        ],
        [(renamed(name), *rest) for name, *rest in layout.constants if belongs(name)],  # type: ignore[misc]
        {renamed(n): renamed_reason(why) for n, why in layout.fallback.items() if belongs(n)},
        {renamed(n) for n in layout.by_loader if belongs(n)},
    ).ordered()


def split_layer(name: str) -> tuple[str, int | None]:
    """Return (`name` with "*" for its layer number, that number): its first numeric part."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            parts[i] = "*"
            return ".".join(parts), int(part)
    return name, None
