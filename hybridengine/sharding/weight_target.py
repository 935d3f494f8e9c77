"""One rank's weights of an engine, as the reshard writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import torch

from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.layout import EngineLayout, LayoutError

__all__ = ["StaleWeightsError", "WeightTarget"]


class StaleWeightsError(RuntimeError):
    """The engine's weights are not a whole, committed version."""


class WeightTarget(ABC):
    """One rank's weights of an engine, which the reshard writes in place.

    tp_rank: place in the tensor-parallel group. layout: how the weights derive from the checkpoint.
    weight_version: the last committed version, None before the first sync. unused: trained
    parameters that the engine need not read (stored buffers). differences: where its configuration
    differs from the trained model's, a sentence for error messages.
    """

    tp_rank: int
    layout: EngineLayout
    unused: Set[str] = frozenset()
    differences: str = ""
    weight_version: int | None = None
    _updating: int | None = None

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """The live weight tensors, by the names of `layout.destinations`."""

    @abstractmethod
    def load_whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole checkpoint tensors through the engine's own loader (reshard fallback)."""

    def load_adapters(self, adapters: Iterable[tuple[str, Adapter]], version: int) -> None:
        """Use whole adapters, by parameter name, beside the weights from `version` on."""
        raise LayoutError(
            f"{type(self).__name__} holds no adapters beside its weights; merge them "
            "(reshard.lora=merged)"
        )

    def check_ready(self) -> None:  # noqa: B027, most always are
        """Raise LayoutError while the weights cannot be written: requests run, the engine sleeps.

        The resharder calls it before every sync.
        """

    def _take_memory(self) -> None:  # noqa: B027, most never give it away
        """Make sure the weights are in memory."""

    @abstractmethod
    def _forget_cached_prefixes(self) -> None:
        """Drop everything computed from older weights. Raises ReshardError if some remains."""

    def refuse_if_torn(self) -> None:
        """Raise StaleWeightsError after a sync that failed half-way, until the next whole one."""
        if self._updating is not None:
            raise StaleWeightsError(
                f"the sync to weight version {self._updating} did not finish, so the engine's "
                f"weights are a mixture (last whole version: {self.weight_version}). "
                "Run a whole sync() first."
            )

    @contextmanager
    def weight_update(self, version: int) -> Iterator[None]:
        """While it is open, and after it failed, the engine refuses to generate."""
        self._updating = version
        self._take_memory()
        yield
        self._forget_cached_prefixes()
        self.weight_version = version
        self._updating = None
