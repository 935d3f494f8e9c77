"""The tensors of an engine that a sync writes: checked, recorded, and their constant regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridengine.sharding.checksums import bit_checksums
from hybridengine.sharding.layout import EngineLayout, LayoutError, TensorSpec

if TYPE_CHECKING:
    from hybridengine.sharding.weight_target import WeightTarget


class EngineState(NamedTuple):
    """What an engine held when a sync was complete.

    version: its weight version.
    updates_begun: as `WeightTarget.updates_begun`.
    checksums: of the bits of its tensors. Versions of tensors do not show what a loader writes
      through `.data`.
    """

    version: int | None
    updates_begun: int
    checksums: list[int]

    @classmethod
    def of(cls, engine: WeightTarget) -> EngineState:
        """Read the current state of an engine."""
        weights = engine.weights()
        names = (engine.layout.destinations | engine.layout.scales).keys()
        checksums = bit_checksums([weights[name] for name in names])
        return cls(engine.weight_version, engine.updates_begun, checksums)

    def is_kept_by(self, engine: WeightTarget) -> bool:
        """Return whether nothing has written to the engine's tensors, or discarded them, since."""
        if engine.discarded or self[:2] != (engine.weight_version, engine.updates_begun):
            return False
        return self.checksums == EngineState.of(engine).checksums


def engine_weights(
    engine: WeightTarget, device: torch.device, factors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the engine's tensors by the names of its layout, and new memory for `factors`.

    device: of the trained parameters. factors: of unmerged adapters, as `adapter_factors`. Raises
    LayoutError where a tensor differs from its record.
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
