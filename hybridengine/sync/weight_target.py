"""One rank's engine weights as a sync writes them, the checksums of their bits, a sync's errors."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from hybridengine.kernels import bit_checksum
from hybridengine.run.failures import CollectiveError, CollectiveGuard
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.layout import EngineLayout, LayoutError, TensorSpec


class ReshardError(RuntimeError):
    """A sync did not complete."""


class RankFailedError(ReshardError, CollectiveError):
    """Another rank was killed, failed or stalled during a sync; the message names it."""


class PlanOutdatedError(LayoutError):
    """The trained parameters differ from those the reshard was planned for: plan it again."""


@contextmanager
def operation(guard: CollectiveGuard, name: str, advice: str = "") -> Iterator[None]:
    """As `guard.operation`; RankFailedError where a collective fails because of another rank."""
    try:
        with guard.operation(name):
            yield
    except RankFailedError:
        raise
    except CollectiveError as error:
        raise RankFailedError(f"{error} {advice}".rstrip()) from error


class StaleWeightsError(RuntimeError):
    """The engine's weights are missing or partially updated."""


@dataclass
class WeightState:
    """The state of an engine's weights.

    version: the version of the last complete update; None before the first.
    discarded: whether the weights were freed without a copy since.
    updates_begun: number of updates so far, those that failed included.
    updating_to: version of the update that has begun and not completed, None after a complete one.
    """

    version: int | None = None
    discarded: bool = False
    updates_begun: int = 0
    updating_to: int | None = None


def _of_state(field: str) -> Any:
    """Return a property that reads and writes a field of `state`."""
    return property(
        lambda target: getattr(target.state, field),
        lambda target, value: setattr(target.state, field, value),
    )


class HasTarget(Protocol):
    """An engine; `target` is its weights in this process, None if they are in other processes."""

    @property
    def target(self) -> WeightTarget | None: ...


class WeightTarget(ABC):
    """One rank's engine weights, which a reshard writes in place.

    tp_rank: rank in the tensor-parallel group.
    layout: how the weights derive from trained parameters.
    optional_parameters: trained parameters that the engine need not read (persistent buffers).
    config_differences: configuration keys whose values differ from the trained model's → the values
      in words.
    model_config: the config of the engine's model as JSON values, which trainers in other processes
      compare with theirs; {} if it is not known.
    weight_version, discarded, updates_begun: fields of `state`, which all targets of one engine
      share.
    discards_weights: whether the weights are discarded between any two updates, so that every
      update has to write all of them.
    """

    tp_rank: int
    layout: EngineLayout
    optional_parameters: Set[str] = frozenset()
    config_differences: Mapping[str, str] = MappingProxyType({})
    model_config: Mapping[str, Any] = MappingProxyType({})
    discards_weights: bool = False
    weight_version: int | None = _of_state("version")
    discarded: bool = _of_state("discarded")
    updates_begun: int = _of_state("updates_begun")

    @cached_property
    def state(self) -> WeightState:
        return WeightState()

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """Return the engine's weight tensors by the names of `layout.destinations`."""

    def adapter_weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the adapters that the engine applies on top of its weights."""
        return {}

    @abstractmethod
    def load_full(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full parameters through the engine's own loader (fallback of the reshard)."""

    def load_adapters(self, adapters: Iterable[tuple[str, Adapter]], version: int) -> None:
        """Apply full adapters, by parameter name, on top of the weights from `version` on."""
        raise LayoutError(
            f"{type(self).__name__} applies no adapters on top of its weights; merge them "
            "(reshard.lora=merged)"
        )

    def check_ready(self) -> None:  # noqa: B027, optional
        """Raise LayoutError while the weights cannot be written (running requests, sleep).

        The resharder calls it before every sync.
        """

    def check_complete(self) -> None:
        """Raise StaleWeightsError while the weights are discarded or partially updated."""
        if self.state.updating_to is not None:
            raise StaleWeightsError(
                f"the engine's weights are partially updated: the sync to weight version "
                f"{self.state.updating_to} did not finish (last complete version: "
                f"{self.weight_version}). Run a complete sync() first."
            )
        if self.discarded:
            raise StaleWeightsError(
                "the engine's weights were discarded as it went to sleep. Run sync() before "
                "generate()."
            )

    @contextmanager
    def weight_update(
        self, version: int, run_on_all_ranks: Callable[[Callable[[], None]], object]
    ) -> Iterator[None]:
        """Mark the weights as partially updated until they are complete on all ranks.

        run_on_all_ranks: called after the body with the last step of the update. Runs it, and
        raises on every rank if it, or anything before it, has failed on any rank.
        """
        state = self.state
        state.updating_to = version
        state.updates_begun += 1
        self._prepare_update()
        yield
        run_on_all_ranks(self.finish_update)
        state.version, state.discarded, state.updating_to = version, False, None

    def _prepare_update(self) -> None:  # noqa: B027, optional
        """Bring the weights back into memory."""

    @abstractmethod
    def finish_update(self) -> None:
        """Recompute or drop everything derived from older weights, caches included.

        Raises ReshardError if some of it remains.
        """


def target_of(engine: WeightTarget | HasTarget) -> WeightTarget:
    """Return the weights of an engine. Raises TypeError for one without any in this process."""
    target = engine if isinstance(engine, WeightTarget) else getattr(engine, "target", None)
    if not isinstance(target, WeightTarget):
        raise TypeError(
            f"engine: a {type(engine).__name__} holds no weights in this process; expected a "
            "WeightTarget, or an engine of hybridengine.engine that runs here"
        )
    return target


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


def bit_checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return `bit_checksum` of each tensor.

    It detects writes to a frozen parameter, which version counters do not: optimizers and
    checkpoint loaders bypass those.
    """
    return torch.stack([bit_checksum(t) for t in tensors]).tolist() if tensors else []


def combined_checksum(parts: Iterable[str]) -> str:
    """Return one checksum, 16 hexadecimal digits, of texts in their order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


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

    @property
    def checksum(self) -> str:
        """One checksum of all tensors, 16 hexadecimal digits: equal for equal slices."""
        return combined_checksum(f"{name}: {x}" for name, x in sorted(self.checksums.items()))

    def is_kept_by(self, engine: WeightTarget) -> bool:
        """Return whether nothing has written to the engine's tensors, or discarded them, since."""
        if engine.discarded or self[:2] != (engine.weight_version, engine.updates_begun):
            return False
        return self.checksums == EngineState.of(engine).checksums
