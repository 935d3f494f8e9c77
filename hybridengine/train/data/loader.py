"""Batches of samples in a seeded order, with exact resume."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

from hybridengine.run.errors import DataError

T = TypeVar("T")


class Subset(Sequence[T], Generic[T]):
    """Some samples of a dataset, read from it at every access: no sample is kept in memory."""

    def __init__(self, dataset: Sequence[T], indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Subset[T]: ...
    def __getitem__(self, index: int | slice) -> T | Subset[T]:
        if isinstance(index, slice):
            return Subset(self.dataset, self.indices[index])
        return self.dataset[self.indices[index]]

    def take(self, positions: Sequence[int]) -> Subset[T]:
        """Select samples by their positions in this subset."""
        return Subset(self.dataset, [self.indices[i] for i in positions])

    def __add__(self, other: Subset[T]) -> Subset[T]:
        """Append another subset of the same dataset."""
        if other.dataset is not self.dataset:
            raise ValueError("subsets of two datasets cannot be joined; expected one dataset")
        return Subset(self.dataset, self.indices + other.indices)


class PromptLoader:
    """Yields endless batches of `batch_size` samples; every epoch has its own permutation.

    The order is a function of (seed, epoch) alone, so every rank sees the same batches and a resume
    needs only the number of batches. Each epoch drops the last `len(dataset) % batch_size` samples
    of its permutation.

    Attributes:
        in_flight: batches that were returned and not trained on; a resume returns them again.
    """

    def __init__(
        self, dataset: Sequence[Any], batch_size: int, *, seed: int, shuffle: bool = True
    ) -> None:
        if len(dataset) < batch_size:
            raise DataError(
                f"data.train_batch_size is {batch_size} but there are only {len(dataset)} training "
                "prompts; lower it or give more data"
            )
        self._dataset, self._batch_size = dataset, batch_size
        self._seed, self._shuffle = seed, shuffle
        self._batch = 0  # batches returned so far, over all epochs
        self.in_flight = 0

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._dataset) // self._batch_size

    @property
    def num_batches(self) -> int:
        """Batches returned so far, over all epochs."""
        return self._batch

    @property
    def epoch(self) -> int:
        """Epoch of the next batch to train on, from 0."""
        return (self._batch - self.in_flight) // len(self)

    def next_batch(self) -> Subset[Any]:
        """Return the next `batch_size` samples, not yet read."""
        start = self._batch % len(self) * self._batch_size
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._batch // len(self)}").shuffle(order)
        self._batch += 1
        return Subset(self._dataset, order[start : start + self._batch_size])

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch - self.in_flight, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `state`; DataError if the data or the seed have changed since.

        The state of an older version has no hash of the files' contents, which is not compared.
        """
        for key, now in self._identity().items():
            if (was := state.get(key, now)) == now:
                continue
            change = f"{key} was {was} and is {now}"
            if key == "content":
                change = "the rows of data.train_files have changed; restore the files"
            raise DataError(
                f"cannot resume the data order: {change}, or start anew with "
                "trainer.resume_mode=disable"
            )
        self._batch = state["batch"]

    def _identity(self) -> dict[str, Any]:
        return {
            "prompts": len(self._dataset),
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "content": getattr(self._dataset, "content", None),
        }
