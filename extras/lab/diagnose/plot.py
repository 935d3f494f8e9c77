"""Runs compared in one picture; runs that differ only in the seed are one line with a band.

Validations have a mark where they were measured, and those of a single run the 95% interval of the
mean over the problems, from its rollout files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybridengine.lab.curves import decorate_axes, main_metrics
from hybridengine.lab.diagnose.runs import LoggedRun
from hybridengine.run.errors import ConfigError
from hybridengine.run.storage import atomic_file

__all__ = ["Curve", "curve_of", "plot_runs", "same_settings", "val_interval"]


@dataclass(frozen=True)
class Curve:
    """A metric at the steps that all runs of a group have logged: mean and standard deviation."""

    steps: list[int]
    means: list[float]
    deviations: list[float]


def same_settings(runs: Sequence[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Group the runs whose settings differ only in the seed, by a label for each group."""
    groups: list[list[LoggedRun]] = []
    for run in runs:
        group = next((g for g in groups if g[0].settings == run.settings), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    names = [group[0].name for group in groups]
    return {
        _label(group, names.count(name) == 1): group
        for name, group in zip(names, groups, strict=True)
    }


def _label(group: Sequence[LoggedRun], has_own_name: bool) -> str:
    if has_own_name:
        return group[0].name + (f", {len(group)} seeds" if len(group) > 1 else "")
    return ", ".join(str(run.folder) for run in group)


def curve_of(runs: Sequence[LoggedRun], metric: str) -> Curve:
    """Return the mean of a metric over runs, and its standard deviation (0 for one run)."""
    series = [run.series(metric) for run in runs]
    steps = sorted(set(series[0]).intersection(*series[1:]))
    values = [[values[step] for values in series] for step in steps]
    spreads = [stdev(x) if len(x) > 1 else 0.0 for x in values]
    return Curve(steps, [fmean(x) for x in values], spreads)


def _draw(ax: Any, group: Sequence[LoggedRun], metric: str, color: str) -> None:
    curve = curve_of(group, metric)
    if not curve.steps:
        return
    label, is_validation = f"{curve.means[0]:.3g} → {curve.means[-1]:.3g}", metric.startswith("val")
    style = {"color": color, "linewidth": 1.8, "marker": "o" if is_validation else ""}
    bounds = [val_interval(group[0], metric, step) for step in curve.steps] if is_validation else []
    if len(group) == 1 and any(bounds):
        ax.errorbar(
            curve.steps, curve.means, bounds, capsize=3, label=f"{label}, 95% interval", **style
        )
        return
    ax.plot(curve.steps, curve.means, label=label, **style)
    ends = [
        [m + sign * d for m, d in zip(curve.means, curve.deviations, strict=True)]
        for sign in (-1, 1)
    ]
    ax.fill_between(curve.steps, *ends, color=color, alpha=0.18, linewidth=0)


def val_interval(run: LoggedRun, metric: str, step: int) -> float:
    """Return half the 95% interval of `val/<result>` over the problems; 0 where it is not known.

    By the normal approximation, from the rollouts of the validation.
    """
    folder, name = run.rollouts, metric.removeprefix("val/")
    file = folder / f"val_{step}.jsonl"
    if not metric.startswith("val/") or not file.is_file():
        return 0.0
    problems, column = dict[int, list[float]](), "reward" if name == "score" else name
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if isinstance(row.get(column), int | float):
            problems.setdefault(row["index"], []).append(row[column])
    means = [fmean(values) for values in problems.values()]
    return 1.96 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def plot_runs(runs: Sequence[LoggedRun], metrics: Sequence[str], path: Path) -> dict[str, int]:
    """Draw one panel per metric, one line per group of runs; return the size of each group.

    metrics: their names; none: the main ones of the first run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    logged = {name for run in runs for row in run.rows for name in row}
    if unknown := [name for name in metrics if name not in logged]:
        similar = sorted(name for name in logged if unknown[0].rsplit("/", 1)[-1] in name)
        known = ", ".join((similar or sorted(logged))[:12])
        raise ConfigError(f"no run has logged {unknown[0]}; among the metrics are {known}")
    groups, metrics = same_settings(runs), metrics or main_metrics(logged)
    columns = min(3, len(metrics))
    num_rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(1 + 4.5 * columns, 3.6 * num_rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, columns, squeeze=False).flat
    for ax, metric in zip(axes, metrics, strict=False):
        for k, group in enumerate(groups.values()):
            _draw(ax, group, metric, f"C{k}")
        decorate_axes(ax, metric)
    for unused in figure.axes[len(metrics) :]:
        unused.remove()
    if len(groups) == 1:
        figure.suptitle(*groups, fontsize=13, fontweight="bold")
    else:
        lines = [Line2D([], [], color=f"C{k}", linewidth=1.8) for k in range(len(groups))]
        figure.legend(lines, [*groups], loc="outside lower center", frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary)
    return {label: len(group) for label, group in groups.items()}
