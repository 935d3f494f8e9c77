"""The learning curves of a run as one PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.tracking.atomic import atomic_file

__all__ = ["plot_learning_curves"]

_INK, _GRID = "#1f2933", "#e4e7eb"
_COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#7048e8")
_BARS = ("#2563eb", "#74a9f7", "#2b8a3e", "#8ccf9b", "#d9480f", "#f5a56e", "#7048e8", "#b9a3f3")
_NOT_A_PHASE = {"timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"}
_HEALTHY, _PROBLEM = 0.005, 0.01  # rollout_probs_diff_mean, by verl's rule of thumb


def plot_learning_curves(
    history: Sequence[Mapping[str, float]], path: str | Path, *, title: str = ""
) -> None:
    """Draw reward, validation, response length, entropy, log-prob difference and time per step.

    history: the rows of `MetricsLogger.history`, each with "step"; what a run did not log is left
        out of its panel. The file is written whole or not at all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    panels = figure.subplots(2, 3).flat
    _reward(next(panels), history)
    _validation(next(panels), history)
    _lines(next(panels), history, "Response length", {"response_length/mean": "mean, tokens"})
    _lines(next(panels), history, "Entropy", {"actor/entropy": "mean over tokens, nats"})
    _difference(next(panels), history)
    _timing(next(panels), history)
    with atomic_file(Path(path)) as temporary:
        figure.savefig(temporary)


def _series(history: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[name]) for row in history if math.isfinite(row.get(name, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa5b1")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="best")


def _lines(
    axes: Any, history: Sequence[Mapping[str, float]], title: str, names: Mapping[str, str]
) -> None:
    for (name, label), colour in zip(names.items(), _COLOURS, strict=False):
        axes.plot(*_series(history, name), color=colour, linewidth=1.8, label=label)
    _frame(axes, title)
    axes.set_ylim(bottom=0)
    _legend(axes)


def _reward(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    steps, values = _series(history, "critic/score/mean")
    axes.plot(steps, values, color=_COLOURS[0], linewidth=1, alpha=0.35, label="every step")
    window = max(1, len(values) // 8)
    smooth = [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]
    axes.plot(steps, smooth, color=_COLOURS[0], linewidth=2.2, label=f"mean of last {window}")
    _frame(axes, "Training reward")
    _legend(axes)


def _validation(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    names = sorted({n for row in history for n in row if n.startswith("val/")})
    for name, colour in zip(names, _COLOURS, strict=False):
        steps, values = _series(history, name)
        label = f"{name[4:]}  {values[0]:.3f} → {values[-1]:.3f}" if values else name[4:]
        axes.plot(steps, values, "o-", color=colour, linewidth=1.8, markersize=4, label=label)
    _frame(axes, "Validation, held-out prompts")
    if names:
        axes.set_ylim(0, max(1.05, axes.get_ylim()[1]))
    else:
        axes.text(0.5, 0.5, "no validation", transform=axes.transAxes, ha="center", color=_INK)
    _legend(axes)


def _difference(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    steps, values = _series(history, "training/rollout_probs_diff_mean")
    axes.plot(steps, values, color=_COLOURS[0], linewidth=1.8, label="mean |Δ probability|")
    axes.axhline(_HEALTHY, color=_COLOURS[2], linestyle="--", linewidth=1, label="healthy below")
    axes.axhline(_PROBLEM, color=_COLOURS[1], linestyle="--", linewidth=1, label="problem above")
    _frame(axes, "Rollout against trainer")
    axes.set_ylim(0, 1.15 * max(_PROBLEM, *values) if values else None)
    _legend(axes)


def _timing(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    """Seconds per step, one bar a step, stacked by phase in the order of their size."""
    rows = [row for row in history if "timing_s/step" in row]
    totals: dict[str, float] = {}
    for name in {n for row in rows for n in row if n.startswith("timing_s/")} - _NOT_A_PHASE:
        totals[name] = sum(row.get(name, 0.0) for row in rows)
    whole = sum(totals.values())
    shown = sorted((n for n in totals if totals[n] > 0.01 * whole), key=totals.__getitem__)
    steps = [row["step"] for row in rows]
    bottom = [0.0] * len(rows)
    for name, colour in zip(reversed(shown), _BARS, strict=False):
        heights = [row.get(name, 0.0) for row in rows]
        label = f"{name.removeprefix('timing_s/')}  {totals[name] / len(rows):.1f} s"
        axes.bar(steps, heights, 0.85, bottom, color=colour, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    _frame(axes, "Seconds per step")
    if shown:
        axes.set_ylim(0, 1.45 * max(bottom))  # room for the legend
        axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
