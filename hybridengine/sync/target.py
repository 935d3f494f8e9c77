"""The tensors of an engine that a sync writes: checked, recorded, and their constant regions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridengine.sync.checksums import bit_checksums
from hybridengine.sync.layout import EngineLayout, LayoutError, TensorSpec

if TYPE_CHECKING:
    from hybridengine.sync.weight_target import WeightTarget


class EngineState(NamedTuple):
    """What an engine held when a sync was complete.

    version: its weight version.
    updates_begun: see `WeightTarget.updates_begun`.
    checksums: of the bits of its tensors and of its adapters. Versions of tensors do not show what
      a loader writes through `.data`.
    """

    version: int | None
    updates_begun: int
    checksums: Mapping[str, int]

    @classmethod
    def of(
        cls, engine: WeightTarget, known: Mapping[str, int] = MappingProxyType({})
    ) -> EngineState:
        """Return the current state of an engine. known: checksums that are not read."""
        adapters = engine.adapter_weights()
        weights = engine.weights() | adapters
        names = (engine.layout.destinations | engine.layout.scales | adapters).keys()
        read = [name for name in names if name not in known]
        checksums = dict(zip(read, bit_checksums([weights[name] for name in read]), strict=True))
        return cls(engine.weight_version, engine.updates_begun, {**checksums, **known})

    @classmethod
    def after(
        cls, before: EngineState | None, engine: WeightTarget, growth: Mapping[str, int] | None
    ) -> EngineState:
        """Return the state of an engine after a sync.

        before: its state before the sync.
        growth: engine tensor → by how much a delta made its checksum grow; None after a dense sync.
        The tensors that a delta has written are not read: if anything else has written to them
        meanwhile, the next comparison shows it.
        """
        if before is None or growth is None:
            return cls.of(engine)
        weights = engine.weights()
        known = {
            name: _int64(before.checksums[name] + growth[name])
            for name in without_aliases(weights)
            if name in growth and weights[name].is_contiguous()
        }
        return cls.of(engine, known)

    @property
    def checksum(self) -> str:
        """One checksum of all tensors, 16 hexadecimal digits: equal for equal slices."""
        return combined_checksum(f"{name}: {x}" for name, x in sorted(self.checksums.items()))

    def is_kept_by(self, engine: WeightTarget) -> bool:
        """Return whether nothing has written to the engine's tensors, or discarded them, since."""
        if engine.discarded or self[:2] != (engine.weight_version, engine.updates_begun):
            return False
        return self.checksums == EngineState.of(engine).checksums


def combined_checksum(parts: Iterable[str]) -> str:
    """Return one checksum, 16 hexadecimal digits, of texts in their order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _int64(value: int) -> int:
    """Return the signed number of 64 bits that is equal modulo 2^64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def without_aliases(weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the tensors whose storage no other one uses, as tied weights do."""
    uses = Counter(tensor.untyped_storage().data_ptr() for tensor in weights.values())
    for name, tensor in weights.items():
        if uses[tensor.untyped_storage().data_ptr()] == 1:
            yield name


def engine_weights(
    engine: WeightTarget, device: torch.device, factors: Mapping[str, torch.Tensor | TensorSpec]
) -> dict[str, torch.Tensor]:
    """Return the engine's tensors by the names of its layout, and new memory for `factors`.

    device: the device of the trained parameters.
    factors: the factors of unmerged adapters, named as `adapter_factors` names them.
    Raises LayoutError where a tensor differs from its record.
    """
    weights = engine.weights()
    for name, spec in (engine.layout.destinations | engine.layout.scales).items():
        weight = weights.get(name)
        if weight is None or TensorSpec.of(weight) != spec:
            actual = "missing" if weight is None else str(TensorSpec.of(weight))
            raise LayoutError(
                f"engine tensor {name!r} was recorded as {spec} but is {actual}. The engine "
                "changed it after loading, so it cannot be written in place."
            )
        if weight.device.type != device.type:
            raise LayoutError(
                f"engine tensor {name!r} is on {weight.device}, the trained parameters are on "
                f"{device}: build the engine without weight offload (cpu_offload_gb)"
            )
    new = {n: torch.empty(t.shape, dtype=t.dtype, device=device) for n, t in factors.items()}
    return weights | new


def write_constants(layout: EngineLayout, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill the constant regions; copies, which may overwrite them, come later."""
    for name, offset, sizes, strides, value in layout.constants:
        weight = weights[name]
        weight.as_strided(sizes, strides, weight.storage_offset() + offset).fill_(value)
