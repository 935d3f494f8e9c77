"""Checksums of tensors, equal in every process, and what an engine held after a sync."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from hybridengine.kernels import bit_checksum
from hybridengine.sync.weight_target import WeightTarget

# Elements that `value_checksum` converts at a time, which take a few MiB. The same on all devices:
# the sum depends on it, and those that are compared may be of a CPU and of a GPU.
_CHUNK = 1 << 18


def bit_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return `bit_checksum` of each tensor.

    It detects writes to a frozen parameter, which version counters do not: optimizers and
    checkpoint loaders bypass those.
    """
    return torch.stack([bit_checksum(t) for t in tensors]).tolist() if tensors else []


def value_checksum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a checksum (int64 scalar on the same device) of `values`, any strides, as `dtype`.

    It depends on the order of the elements, not on their strides. All NaNs count as one: their
    payload has no meaning, and casts do not keep it.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 0
    for part in chunks(values):
        part = part.to(dtype).contiguous()
        if part.is_floating_point():
            if part.itemsize == 1:
                part = part.half()  # exact; float8 has few operations
            part = part.masked_fill(part.isnan(), float("nan"))
        total += bit_checksum(part) * (2 * start + 1)
        start += part.numel()
    return total


def chunks(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of at most 2^18 elements, in an order that depends on the shape alone."""
    if values.numel() <= _CHUNK:
        yield values
        return
    dim = next(d for d, size in enumerate(values.shape) if size > 1)
    for part in values.split(max(1, values.shape[dim] * _CHUNK // values.numel()), dim):
        yield from chunks(part)


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
