"""Skipped optimizer updates of a run: warnings, and an error where training does not advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hybridengine.model import SkippedUpdate
from hybridengine.run.errors import ModelError

MAX_FAILED_UPDATES = 10  # in a row; then the run fails

_REMEDY = "lower the learning rate, or check rewards and data"


class UpdateCounts(Protocol):
    """What is read of an optimizer after a step: see `model.Optimizer`."""

    @property
    def num_updates(self) -> int: ...
    @property
    def skipped_in_a_row(self) -> int: ...
    @property
    def failed_in_a_row(self) -> int: ...
    def pop_skipped(self) -> list[SkippedUpdate]: ...


class UpdateLog:
    """The skipped updates of a run, by optimizer; the same on all ranks.

    Attributes:
        metrics: of the newest step.
    """

    def __init__(self) -> None:
        self._first_skipped = dict[str, int]()  # the step since which all updates were skipped
        self._cause = dict[str, str]()  # of the newest one
        self._skipped: dict[str, list[SkippedUpdate]] = {}
        self.metrics = dict[str, float]()

    def take(self, step: int, optimizers: Mapping[str, UpdateCounts]) -> None:
        """Take the updates that were skipped in `step`."""
        self._skipped = {name: optimizer.pop_skipped() for name, optimizer in optimizers.items()}
        self.metrics = {f"{n}/skipped_updates": len(x) for n, x in self._skipped.items()}
        for name, skipped in self._skipped.items():
            if skipped and optimizers[name].skipped_in_a_row <= len(skipped):
                self._first_skipped[name] = step
            if skipped:
                self._cause[name] = _cause(name, skipped[-1])

    def report(
        self, step: int, optimizers: Mapping[str, UpdateCounts], print: Callable[[str], None]
    ) -> None:
        """Warn of the updates taken last; raise ModelError after too many failed ones in a row."""
        for name, skipped in self._skipped.items():
            for update in skipped:
                print(
                    f"warning: step {step}: {_cause(name, update)}; this update was skipped, and "
                    "the weights are unchanged"
                )
            if (in_a_row := optimizers[name].failed_in_a_row) >= MAX_FAILED_UPDATES:
                raise ModelError(
                    f"loss or gradient norm of {name} were not finite in {in_a_row} updates in a "
                    f"row, since step {self._first_skipped[name]}, all of which were skipped (in "
                    f"step {step} {self._cause[name]}); {_REMEDY}, and resume from the newest "
                    "checkpoint"
                )

    def failure(self, optimizers: Mapping[str, UpdateCounts]) -> str | None:
        """Return why a run that ends now has not trained to its last step; None if it has.

        It has where the last update or the one before it was made: a single one may be skipped at
        any time, such as by a loss scale that has just grown.
        """
        for name, optimizer in optimizers.items():
            count = optimizer.skipped_in_a_row
            if count > 1 or 0 < count == optimizer.num_updates:
                last = "the last update" if count == 1 else f"the last {count} updates"
                return (
                    f"{last} of {name}, since step {self._first_skipped[name]}, were all skipped "
                    f"({self._cause[name]}), and its weights are those before that step; {_REMEDY}"
                )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"first_skipped": self._first_skipped, "cause": self._cause}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first_skipped, self._cause = dict(state["first_skipped"]), dict(state["cause"])


def _cause(name: str, update: SkippedUpdate) -> str:
    """Describe what was not finite."""
    if math.isfinite(update.loss):
        return f"the gradient norm of {name} is {update.norm}"
    outputs = (
        f", as are {update.num_nonfinite} outputs of its model" if update.num_nonfinite else ""
    )
    return f"the loss of {name} is {update.loss}{outputs}"
