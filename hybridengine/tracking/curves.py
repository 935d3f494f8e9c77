"""The learning curves of a run as one PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridengine.storage import atomic_file

__all__ = ["plot_learning_curves"]

History = Sequence[Mapping[str, float]]

_PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
           "update_weights")  # fmt: skip
_HEALTHY, _PROBLEM = 0.005, 0.01  # rollout_probs_diff_mean, by verl's rule of thumb


_VALIDATION = ("val/…",)  # whatever the run validates on
_RL_PANELS = {
    "Training reward": ("critic/score/mean",),
    "Validation, held-out prompts": _VALIDATION,
    "Response length, tokens": ("response_length/mean",),
    "Entropy, mean over tokens, nats": ("actor/entropy",),
    "Rollout against trainer, mean |Δ probability|": ("training/rollout_probs_diff_mean",),
}
_SFT_PANELS = {
    "Training loss, nats per target": ("train/loss",),
    "Validation loss, nats per target": _VALIDATION,
    "Gradient norm": ("train/grad_norm",),
    "Learning rate": ("train/lr",),
    "Tokens per second and rank": ("perf/throughput",),
}


def plot_learning_curves(history: History, path: str | Path, *, title: str = "") -> None:
    """Draw what a person watches of an RL or an SFT run, and the time per step.

    history: the rows of `MetricsLogger.history`, each with "step"; what a run did not log is left
        out of its panel. The file is written whole or not at all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    validation = sorted({n for row in history for n in row if n.startswith("val/")})
    is_sft = any("train/loss" in row for row in history)
    panels = _SFT_PANELS if is_sft else _RL_PANELS
    axes = figure.subplots(2, 3).flat
    for ax, (name, metrics) in zip(axes, panels.items(), strict=False):
        for metric in validation if metrics == _VALIDATION else metrics:
            _line(ax, history, metric, smooth=metric in ("critic/score/mean", "train/loss"))
        if "probability" in name:
            ax.axhline(_HEALTHY, color="C2", linestyle="--", label="healthy below")
            ax.axhline(_PROBLEM, color="C3", linestyle="--", label="problem above")
        _frame(ax, name)
    _times(figure.axes[-1], history)
    with atomic_file(Path(path)) as temporary:
        figure.savefig(temporary)


def _series(history: History, name: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[name]) for row in history if math.isfinite(row.get(name, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def _line(ax: Any, history: History, name: str, smooth: bool) -> None:
    steps, values = _series(history, name)
    label = f"{name}  {_short(values[0])} → {_short(values[-1])}" if values else name
    ax.plot(steps, values, "o-", markersize=3, alpha=0.35 if smooth else 1, label=label)
    if smooth:
        window = max(1, len(values) // 8)
        parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
        means = [sum(part) / len(part) for part in parts]
        ax.plot(steps, means, color="C0", linewidth=2, label=f"mean of last {window}")


def _short(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def _times(ax: Any, history: History) -> None:
    """Seconds per step, one bar a step, stacked by phase."""
    rows = [row for row in history if "timing_s/step" in row]
    bottom = [0.0] * len(rows)
    for phase in _PHASES:
        heights = [row.get(f"timing_s/{phase}", 0.0) for row in rows]
        if any(heights):
            mean = sum(heights) / len(rows)
            label = f"{phase}  {mean:.1f} s"
            ax.bar([row["step"] for row in rows], heights, 0.85, bottom, label=label)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    _frame(ax, "Seconds per step")


def _frame(ax: Any, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel("step")
    ax.grid(alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.get_major_locator().set_params(integer=True)
    bottom, top = min(0.0, ax.get_ylim()[0]), ax.get_ylim()[1]
    named = len(ax.get_legend_handles_labels()[0])
    ax.set_ylim(bottom, top + named * 0.09 * (top - bottom))  # room for the legend over the curves
    if named:
        ax.legend(frameon=False, fontsize=9, loc="upper left", labelspacing=0.25)
