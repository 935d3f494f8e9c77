"""Batches of prompts in a seeded order that resumes exactly where it stopped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hybridengine.data.files import DataError

__all__ = ["PromptLoader"]


class PromptLoader:
    """Endless batches of `batch_size` prompts; each epoch is a permutation of its own.

    The order is a function of (seed, epoch) alone, so every rank sees the same batches. The last
    `len(dataset) % batch_size` prompts of an epoch's permutation wait for another epoch.
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
        self._batch = 0  # batches given since the start, over all epochs

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self._dataset) // self._batch_size

    @property
    def epoch(self) -> int:
        """Of the next batch, counted from 0."""
        return self._batch // len(self)

    def next_batch(self) -> list[Any]:
        start = self._batch % len(self) * self._batch_size
        order = self._order(self.epoch)[start : start + self._batch_size]
        self._batch += 1
        return [self._dataset[i] for i in order]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; DataError if the data or the seed changed since."""
        for key, now in self._identity().items():
            if state[key] != now:
                raise DataError(
                    f"cannot resume the data order: {key} was {state[key]} and is {now}"
                )
        self._batch = state["batch"]

    def _identity(self) -> dict[str, Any]:
        return {
            "prompts": len(self._dataset),
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
