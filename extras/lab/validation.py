"""Statistics of validations: metrics per data source, start, end and gain with intervals.

Metrics have verl's names: `val-core/<source>/<variable>/mean@N`, `best@N/mean` and `maj@N/mean` of
the variable that counts ("acc" if the reward gives it, else "reward"), N responses to a problem;
everything else is `val-aux/…`. As in verl (`process_validation_metrics`), best@n, worst@n and maj@n
stand for n draws with replacement from the N responses. Here best and worst are the exact
expectations of that, not estimates from 1,000 draws; votes are counted over "pred", an answer that
the reward may return.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from statistics import NormalDist, fmean, pstdev, stdev
from typing import Any

import numpy as np

from hybridengine.train.metrics import Problem

_CORE = "val-core/"
_DRAWS = 1000  # of n responses, for a majority vote
_Z95 = NormalDist().inv_cdf(0.975)  # two-sided 95%


class ValidationHistory:
    """Results per problem of the first and the last validation.

    A checkpoint keeps both, so that a resumed run compares with the start of the whole run. After
    one validation alone there is nothing to compare, and no start and gain.
    """

    def __init__(self) -> None:
        self._count = 0  # of validations
        self._first: dict[str, list[float]] = {}
        self._last: dict[str, list[float]] = {}
        self._core: dict[str, list[float]] = {}  # [first, last] value of each val-core metric

    def add(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Add a validation; return its metrics per data source."""
        self._last = {
            name: [fmean(results[name]) for _, results, _ in problems] for name in problems[0][1]
        }
        self._first, self._count = self._first or self._last, self._count + 1
        per_source = source_metrics(problems)
        for name, value in per_source.items():
            if name.startswith(_CORE):
                first, *_ = self._core.get(name, [value])
                self._core[name] = [first, value]
        return per_source

    def state_dict(self) -> dict[str, Any]:
        counted = {"first": self._first, "last": self._last, "core": self._core}
        return {**counted, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._last, self._core = state["first"], state["last"], state["core"]
        self._count = state.get("count", 2)  # of older checkpoints

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: start, end and gain with 95% intervals."""
        summary: dict[str, Any] = {}
        for name, start in self._first.items():
            ends = {"start": start, "end": self._last[name]}
            if self._count > 1:
                interval = gain_interval(start, ends["end"])[1:]
                summary[f"val_{name}_gain_ci95"] = list(interval)
            else:
                del ends["start"]
            summary |= {f"val_{name}_{when}": fmean(values) for when, values in ends.items()}
            if {x for values in ends.values() for x in values} <= {0.0, 1.0}:
                for when, values in ends.items():
                    interval = accuracy_interval(fmean(values), len(values))
                    summary[f"val_{name}_{when}_ci95"] = list(interval)
            summary["val_problems"] = len(start)
        if self._core and self._count > 1:
            summary["val_core_start_end"] = {
                name.removeprefix(_CORE): pair for name, pair in self._core.items()
            }
        return summary

    def lines(self) -> list[str]:
        """Return one line per result for the console."""
        lines = []
        for name, start in self._first.items():
            if self._count == 1:
                lines.append(
                    f"validation {name}: {fmean(start):.3f} over {len(start)} problems, measured "
                    "once; trainer.val_before_train=true measures the start, too"
                )
                continue
            gain, low, high = gain_interval(start, self._last[name])
            verdict = "" if low > 0 else "  (not larger than the sampling error)"
            lines.append(
                f"validation {name}: {fmean(start):.3f} → {fmean(self._last[name]):.3f}, "
                f"gain {gain:+.3f}, 95% interval [{low:+.3f}, {high:+.3f}] "
                f"over {len(start)} problems{verdict}"
            )
        return lines


def source_metrics(problems: Sequence[Problem]) -> dict[str, float]:
    """Compute the metrics of each data source, means over its problems."""
    by_source: dict[str, list[Problem]] = {}
    for problem in problems:
        by_source.setdefault(problem[0], []).append(problem)
    metrics: dict[str, float] = {}
    for source, group in by_source.items():
        names = group[0][1]
        core = "acc" if "acc" in names else "reward"
        for name in names:
            per_problem = [_problem_metrics(results[name], preds) for _, results, preds in group]
            largest_n = max(len(results[name]) for _, results, _ in group)
            for kind in per_problem[0]:
                mean = fmean(metric[kind] for metric in per_problem if kind in metric)
                variable = "reward" if name == "score" else name
                section = _section(kind, largest_n, variable == core)
                metrics[f"{section}/{source}/{variable}/{kind}"] = mean
    return metrics


def _section(kind: str, largest_n: int, is_core: bool) -> str:
    """kind: such as best@4/mean."""
    head, _, n = kind.partition("/")[0].partition("@")
    core = is_core and head in ("mean", "best", "maj") and int(n) == largest_n
    return "val-core" if core else "val-aux"


def _problem_metrics(values: Sequence[float], preds: Sequence[float] | None) -> dict[str, float]:
    largest_n = len(values)
    metrics = {f"mean@{largest_n}": fmean(values)}
    if largest_n > 1:
        metrics[f"std@{largest_n}"] = pstdev(values)
    powers = {1 << k for k in range(largest_n.bit_length())}
    for n in sorted({*powers, largest_n} - {1}):
        metrics[f"best@{n}/mean"] = expected_best(values, n)
        metrics[f"worst@{n}/mean"] = -expected_best([-value for value in values], n)
        if preds is not None:
            metrics[f"maj@{n}/mean"] = expected_majority(values, preds, n)
    return metrics


def expected_best(values: Sequence[float], n: int) -> float:
    """Compute the expected maximum of n draws with replacement from `values`."""
    cdf = np.linspace(0, 1, len(values) + 1) ** n
    return float(np.sort(np.asarray(values, np.float64)) @ np.diff(cdf))


def expected_majority(values: Sequence[float], preds: Sequence[float], n: int) -> float:
    """Estimate the expected value of the majority answer among n drawn responses.

    values[i]: the score of response i; preds[i]: the answer it gives. On a tie the answer drawn
    first counts.
    """
    _, answers = np.unique(np.asarray(preds, np.float64), return_inverse=True)
    seed = zlib.crc32(f"{len(values)} {n}".encode())
    drawn = np.random.default_rng(seed).integers(len(values), size=(_DRAWS, n))
    votes = answers[drawn]
    same = votes[:, :, None] == votes[:, None, :]
    winner = same.sum(2).argmax(1)  # the first of the most frequent
    return float(np.asarray(values, np.float64)[drawn[np.arange(_DRAWS), winner]].mean())


def accuracy_interval(accuracy: float, n: int) -> tuple[float, float]:
    """Return the 95% interval of an accuracy measured on `n` problems (Wilson 1927)."""
    spread = _Z95**2 / n
    centre = (accuracy + spread / 2) / (1 + spread)
    half = _Z95 / (1 + spread) * math.sqrt(accuracy * (1 - accuracy) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def gain_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return (gain, low, high): the mean of `after - before` and its 95% interval.

    Problems are paired, so only changes contribute to the variance (normal approximation).
    """
    gains = [b - a for a, b in zip(before, after, strict=True)]
    mean, n = fmean(gains), len(gains)
    half = _Z95 * (stdev(gains) if n > 1 else 0.0) / math.sqrt(n)
    return mean, mean - half, mean + half
