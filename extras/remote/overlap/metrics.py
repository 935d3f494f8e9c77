"""How old the weights of a batch are, and how long trainers and engines wait; names as verl's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hybridengine.engine.response import Response
from hybridengine.remote.overlap.queue import Finished
from hybridengine.train.rollouts import Rollouts

__all__ = ["staleness_metrics"]


def staleness_metrics(version: int, rollouts: Rollouts) -> dict[str, float]:
    """Return how many updates the tokens of `rollouts` are older than `version`. Collective.

    mean: of the responses, each the mean of its sampled tokens. max: of the oldest token. partial:
    responses whose tokens are of several versions.
    """
    means = rollouts.gather_numbers([version - _mean_version(r.response) for r in rollouts.own])
    newest = rollouts.gather_numbers([max(v for v, _ in r.response.versions) for r in rollouts.own])
    oldest = rollouts.outcomes.versions
    spans = newest - oldest
    num_partial = int((spans > 0).sum())
    return {
        "fully_async/trajectory_staleness/mean": float(means.mean()),
        "fully_async/trajectory_staleness/max": float(version - oldest.min()),
        "fully_async/partial/total_partial_num": num_partial,
        "fully_async/partial/partial_ratio": num_partial / len(spans),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def _mean_version(response: Response) -> float:
    runs = response.versions
    return sum(version * count for version, count in runs) / sum(count for _, count in runs)


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
