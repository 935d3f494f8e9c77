"""What a reward makes of held-out problems, at the start and at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hybridengine.tracking import accuracy_interval, gain_interval
from hybridengine.trainer.rollouts import Rollout
from hybridengine.trainer.validation_metrics import source_metrics

__all__ = ["HeldOut"]

_CORE = "val-core/"


class HeldOut:
    """The score and each further result of the reward, per problem: first and last validation.

    A checkpoint keeps both, so that a resumed run compares with the start of the whole run.
    """

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self._core: dict[str, list[float]] = {}  # first and last value of each val-core metric

    def add(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Means over the problems, by metric name: val/<result>, and per data source as verl."""
        by_problem: dict[int, list[Rollout]] = {}
        for r in rollouts:
            by_problem.setdefault(r.sample.index, []).append(r)
        self._last = {
            name: [fmean(r.results[name] for r in group) for group in by_problem.values()]
            for name in rollouts[0].results
        }
        self._first = self._first or self._last
        per_source = source_metrics(
            [
                (
                    group[0].sample.data_source,
                    {
                        "reward" if name == "score" else name: [r.results[name] for r in group]
                        for name in rollouts[0].results
                    },
                    _preds(group),
                )
                for group in by_problem.values()
            ]
        )
        for name, value in per_source.items():
            if name.startswith(_CORE):
                first, *_ = self._core.get(name, [value])
                self._core[name] = [first, value]
        return {f"val/{name}": fmean(values) for name, values in self._last.items()} | per_source

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "core": self._core}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._last, self._core = state["first"], state["last"], state["core"]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, start in self._first.items():
            end = self._last[name]
            found[f"val_{name}_start"], found[f"val_{name}_end"] = fmean(start), fmean(end)
            found[f"val_{name}_gain_ci95"] = list(gain_interval(start, end)[1:])
            if set(start) | set(end) <= {0.0, 1.0}:
                for when, values in (("start", start), ("end", end)):
                    interval = accuracy_interval(fmean(values), len(values))
                    found[f"val_{name}_{when}_ci95"] = list(interval)
            found["val_problems"] = len(start)
        if self._core:
            found["val_core_start_end"] = {
                name.removeprefix(_CORE): pair for name, pair in self._core.items()
            }
        return found

    def lines(self) -> list[str]:
        """One a result, for the screen."""
        found = []
        for name, start in self._first.items():
            gain, low, high = gain_interval(start, self._last[name])
            verdict = "" if low > 0 else "  (not larger than the sampling error)"
            found.append(
                f"held-out {name}: {fmean(start):.3f} → {fmean(self._last[name]):.3f}, "
                f"gain {gain:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}] "
                f"over {len(start)} problems{verdict}"
            )
        return found


def _preds(group: Sequence[Rollout]) -> list[float] | None:
    preds = [r.pred for r in group if r.pred is not None]
    return preds if len(preds) == len(group) else None
