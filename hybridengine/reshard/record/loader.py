"""What an engine's weights are made of: strided copies of trained parameters, recorded.

The engine's own `load_weights` runs once over meta tensors under a `CopyRecorder`; so does the
conversion that names and cuts the checkpoint's tensors from the trained parameters. The two chain
into copies from parameters to engine tensors. That is exact for fused, replicated, padded and tied
weights of every architecture the engine loads, with no table of names. What is not a pure copy is
listed in `EngineLayout.fallback` with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from hybridengine.reshard.record.recorder import Contents, CopyRecorder
from hybridengine.sharding.copies import Copy
from hybridengine.sharding.geometry import NotABlock
from hybridengine.sharding.layout import Checkpoint, EngineLayout, LayoutError, Shape, TensorSpec

__all__ = ["Copy", "engine_tensors", "record_checkpoint", "record_layout"]


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
