"""Pictures of metrics: the learning curves of a run, and runs compared.

Runs that differ only in the seed are one line with a band. Validations have a mark where they were
measured, and those of a single run the 95% interval of the mean over the problems, from its rollout
files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hybridengine.lab.diagnose.findings import LoggedRun
from hybridengine.run.errors import ConfigError
from hybridengine.run.storage import atomic_file

History = Sequence[Mapping[str, float]]

_PHASES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "wait_for_critic",
    "update_weights",
)
_CRITIC_PHASES = ("values", "update_critic")  # beside the others if the critic has its own ranks
_HEALTHY, _PROBLEM = 0.005, 0.01  # rollout_probs_diff_mean, by verl's rule of thumb
_VALIDATION = "val/"  # all metrics with this prefix
_PROBS_DIFF = "training/rollout_probs_diff_mean"
_SMOOTHED = ("critic/score/mean", "train/loss")

_RL_PANELS = {
    "Training reward": "critic/score/mean",
    "Validation, held-out prompts": _VALIDATION,
    "Response length, tokens": "response_length/mean",
    "Entropy, mean over tokens, nats": "actor/entropy",
    "Engine against trainer, mean |Δ probability|": _PROBS_DIFF,
}
_OVERLAP_PANELS = {  # of runs whose engines generate during training: several metrics in a panel
    "Staleness of rollouts, updates": (
        "fully_async/trajectory_staleness/mean",
        "fully_async/trajectory_staleness/max",
    ),
    "Prompts: ready when a step begins, dropped": (
        "fully_async/queue_size",
        "fully_async/count/dropped_stale_samples",
    ),
    "Idle share of ranks": ("trainer/idle_ratio", "rollouter/idle_ratio"),
}
_CRITIC_PANELS = {  # of runs whose critic has ranks of its own
    "Idle share of policy's, critic's ranks": ("actor/idle_ratio", "critic/idle_ratio")
}
_SFT_PANELS = {
    "Training loss, nats per token": "train/loss",
    "Validation loss, nats per token": _VALIDATION,
    "Gradient norm": "train/grad_norm",
    "Learning rate": "train/lr",
    "Tokens per second and rank": "perf/throughput",
}


def draw_curves(history: History, folder: Path, title: str) -> None:
    """Draw the main metrics of an RL or an SFT run, and the time per step, to curves.png.

    history: the rows of `MetricsLogger.history`, each with "step"; a metric that the run did not
    log is left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    logged = {name for row in history for name in row}
    panels = _SFT_PANELS if "train/loss" in logged else _RL_PANELS
    names: dict[str, tuple[str, ...]] = {panel: (metric,) for panel, metric in panels.items()}
    if "trainer/idle_ratio" in logged:
        names |= _OVERLAP_PANELS
    if "critic/idle_ratio" in logged:
        names |= _CRITIC_PANELS
    num_rows = math.ceil((len(names) + 1) / 3)
    figure = Figure(figsize=(13, 3.5 * num_rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    validation = sorted(name for name in logged if name.startswith(_VALIDATION))
    axes = iter(figure.subplots(num_rows, 3).flat)
    for title, metrics in names.items():
        ax = next(axes)
        for name in validation if metrics == (_VALIDATION,) else metrics:
            _plot_metric(ax, history, name)
        if metrics == (_PROBS_DIFF,):
            ax.axhline(_HEALTHY, color="C2", linestyle="--", label="healthy below")
            ax.axhline(_PROBLEM, color="C3", linestyle="--", label="problem above")
        decorate_axes(ax, title)
    _plot_times(next(axes), history)
    for unused in axes:
        unused.remove()
    with atomic_file(folder / "curves.png") as temporary:
        figure.savefig(temporary)


def _plot_metric(ax: Any, history: History, name: str) -> None:
    rows = [row for row in history if math.isfinite(row.get(name, math.nan))]
    steps, values = [row["step"] for row in rows], [row[name] for row in rows]
    label = name.removeprefix("fully_async/")
    label += f"  {_short(values[0])} → {_short(values[-1])}" if values else ""
    ax.plot(steps, values, "o-", markersize=3, alpha=0.35 if name in _SMOOTHED else 1, label=label)
    if name in _SMOOTHED:
        window = max(1, len(values) // 8)
        parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
        means = [sum(part) / len(part) for part in parts]
        ax.plot(steps, means, color="C0", linewidth=2, label=f"mean of last {window}")


def _short(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def _plot_times(ax: Any, history: History) -> None:
    """Draw seconds per step: one bar per step, stacked by phase."""
    rows = [row for row in history if "timing_s/step" in row]
    bottom = [0.0] * len(rows)
    apart = any("critic/idle_ratio" in row for row in rows)
    for phase in _PHASES:
        if apart and phase in _CRITIC_PHASES:
            continue
        heights = [row.get(f"timing_s/{phase}", 0.0) for row in rows]
        if any(heights):
            mean = sum(heights) / len(rows)
            label = f"{phase}  {mean:.1f} s"
            ax.bar([row["step"] for row in rows], heights, 0.85, bottom, label=label)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    decorate_axes(ax, "Seconds per step")


def main_metrics(logged: Collection[str]) -> list[str]:
    """Return the metrics that the curves of a run show, of those that it has logged."""
    panels = _SFT_PANELS if "train/loss" in logged else _RL_PANELS
    validation = sorted(name for name in logged if name.startswith(_VALIDATION))
    names = [n for m in panels.values() for n in (validation if m == _VALIDATION else [m])]
    return [name for name in (*names, "timing_s/step") if name in logged]


def decorate_axes(ax: Any, title: str) -> None:
    """Give a panel its title, grid, axes and legend."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel("step")
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.get_major_locator().set_params(integer=True)
    bottom, top = min(0.0, ax.get_ylim()[0]), ax.get_ylim()[1]
    labels = len(ax.get_legend_handles_labels()[0])
    ax.set_ylim(bottom, top + labels * 0.09 * (top - bottom))  # room for the legend
    if labels:
        ax.legend(frameon=False, fontsize=9, loc="upper left", labelspacing=0.25)


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
