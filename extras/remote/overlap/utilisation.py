"""How much of the time trainer ranks and engines are idle; names as verl's fully_async_policy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hybridengine.remote.overlap.queue import Finished


class Utilisation:
    """Seconds of the trainer ranks, as this rank measures them, and of the engines, as they report.

    A trainer rank is idle while it waits for rollouts, or for engines to take weights. An engine is
    idle while it waits for work; its seconds are counted in the step that takes their rollouts.

    Attributes:
        num_dropped: prompts of this step whose rollouts were too old.
    """

    def __init__(self) -> None:
        self._started, self._waited = time.perf_counter(), 0.0
        self._engines = Counter[str]()
        self._queue_size, self.num_dropped = 0, 0
        self._total = Counter[str]()  # of the run

    def begin(self, is_first: bool) -> None:
        """Begin a batch; is_first: the first of its step."""
        if is_first:
            self._started, self._waited, self._queue_size = time.perf_counter(), 0.0, -1
            self._engines, self.num_dropped = Counter(), 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def ready(self, num_prompts: int) -> None:
        """Note how many prompts' rollouts are finished as a step asks for them first."""
        if self._queue_size < 0:
            self._queue_size = num_prompts

    def add(self, result: Finished) -> None:
        self._engines.update(result.seconds)

    def end(self) -> dict[str, float]:
        """Return the metrics of a step."""
        seconds = time.perf_counter() - self._started
        self._total.update(self._engines)
        self._total.update({"trainer": seconds, "waited": self._waited})
        self._total["dropped"] += self.num_dropped
        return {
            "trainer/idle_ratio": self._waited / seconds,
            "rollouter/idle_ratio": _idle_ratio(self._engines),
            "fully_async/queue_size": self._queue_size,
            "fully_async/count/dropped_stale_samples": self.num_dropped,
            **{f"timing_s/rollouter/{name}": x for name, x in sorted(self._engines.items())},
        }

    def summary(self) -> dict[str, float]:
        """Return entries of summary.json: of all steps of this process."""
        total = self._total
        engines = Counter({n: x for n, x in total.items() if n not in _OTHERS})
        return {
            "trainer_idle_ratio": round(total["waited"] / max(total["trainer"], 1e-9), 4),
            "rollouter_idle_ratio": round(_idle_ratio(engines), 4),
            "dropped_stale_samples": int(total["dropped"]),
        }


_OTHERS = ("trainer", "waited", "dropped")


def _idle_ratio(seconds: Counter[str]) -> float:
    return seconds["idle"] / max(sum(seconds.values()), 1e-9)
