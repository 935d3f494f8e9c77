"""Compare an engine's tensors with the trained weights, bit for bit, and say how they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridengine.kernels import block_quantize
from hybridengine.model import adapter_shards, parameter_shards
from hybridengine.sync.copies import Copy, Region
from hybridengine.sync.layout import EngineLayout
from hybridengine.sync.shards import full_tensor


@dataclass(frozen=True)
class WeightFault:
    """A part of an engine tensor that is not the trained weight; cause: a clause, in words."""

    parameter: str
    tensor: str
    cause: str

    @property
    def point(self) -> str:
        """The operator that multiplies with it, or adds it."""
        return self.parameter.removesuffix(".weight").removesuffix(".bias")


class TrainedWeights:
    """The full weights of a model, its adapters merged. Collective where it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._shards, self._adapters = parameter_shards(model), adapter_shards(model)

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def base(self, name: str) -> Tensor:
        return full_tensor(self._shards[name])

    def merged(self, name: str) -> Tensor:
        adapter = self._adapters.get(name)
        return self.base(name) if adapter is None else adapter.merge_full(self._shards[name])

    def is_adapted(self, name: str) -> bool:
        return name in self._adapters


def find_weight_faults(
    weights: TrainedWeights, layout: EngineLayout, tensors: Mapping[str, Tensor]
) -> Iterator[WeightFault]:
    """Yield the parameters that differ in the engine, in the order of its tensors.

    tensors: of the engine, by the names of `layout.destinations`. One that is empty, because the
    engine keeps it in another form, is not compared.
    """
    by_tensor: dict[str, list[Copy]] = {}
    for copy in layout.copies:
        by_tensor.setdefault(copy.destination, []).append(copy)
    for name, copies in by_tensor.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.numel() == 0:
            continue
        if name in layout.quantized:
            yield from _quantized_faults(weights, layout, tensors, name, copies)
            continue
        regions = [
            (_region(tensor, c.written), _region(weights.merged(c.source), c.read).to(tensor))
            for c in copies
        ]
        for copy, (got, want) in zip(copies, regions, strict=True):
            if torch.equal(got, want):
                continue
            others = [c.source for c, (_, w) in zip(copies, regions, strict=True) if _same(got, w)]
            cause = f"it is {others[0]}" if others else _cause(weights, copy, got, want)
            yield WeightFault(copy.source, name, cause)


def tied_head_faults(
    weights: TrainedWeights, tensors: Mapping[str, Tensor]
) -> Iterator[WeightFault]:
    """Yield the head of an engine that keeps a copy of an embedding that it is tied to."""
    embedding = "model.embed_tokens.weight"
    head = tensors.get("lm_head.weight")
    if head is None or embedding not in weights or "lm_head.weight" in weights:
        return
    want = weights.merged(embedding)
    if not torch.equal(head[: len(want)], want.to(head)):
        yield WeightFault(
            "lm_head.weight",
            "lm_head.weight",
            "the trained model's head is its embedding, and the engine's was not updated with it",
        )


def _quantized_faults(
    weights: TrainedWeights,
    layout: EngineLayout,
    tensors: Mapping[str, Tensor],
    name: str,
    copies: list[Copy],
) -> Iterator[WeightFault]:
    """Of an FP8 tensor, which is quantized from the values of all its parameters."""
    how, tensor = layout.quantized[name], tensors[name]
    values = torch.zeros(tensor.shape, dtype=how.dtype, device=tensor.device)
    for copy in copies:
        full = weights.merged(copy.source)
        _region(values, copy.written).copy_(_region(full, copy.read))
    wanted, scales = block_quantize(values)
    is_scaled = torch.equal(tensors[how.scale], scales)
    if not torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)):
        state = "as well as their scales" if not is_scaled else "while their scales are"
        yield WeightFault(
            copies[0].source, name, f"its FP8 values are not the trained ones, {state}"
        )
    elif not is_scaled:
        yield WeightFault(
            copies[0].source, how.scale, "its FP8 values are the trained ones, the scales are older"
        )


def _region(tensor: Tensor, region: Region) -> Tensor:
    offset, sizes, strides = region
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _cause(weights: TrainedWeights, copy: Copy, got: Tensor, want: Tensor) -> str:
    if weights.is_adapted(copy.source):
        base = _region(weights.base(copy.source), copy.read).to(got)
        if torch.equal(got, base):
            return "it is the base weight: the adapter (LoRA) was not delivered"
    if got.ndim != 2:
        size = float((got.double() - want.double()).abs().max())
        return f"its values differ by up to {size:.2g}: they are of other weights"
    differ = got != want
    for dim, word in ((0, "rows"), (1, "columns")):
        lines = differ.any(1 - dim).nonzero().flatten()
        first, last = int(lines[0]), int(lines[-1])
        line = got.select(dim, first).unsqueeze(dim)
        found = (want == line).all(1 - dim).nonzero().flatten()
        if len(found):
            return (
                f"its {word} {first} to {last} are the trained weight's from {word[:-1]} "
                f"{int(found[0])} on: the slice of another tensor-parallel rank"
            )
    rows = differ.any(1).nonzero().flatten()
    size = float((got.double() - want.double()).abs().max())
    part = f"rows {int(rows[0])} to {int(rows[-1])} of {got.shape[0]}"
    return f"{part} differ by up to {size:.2g}: they are of other (older) weights"
