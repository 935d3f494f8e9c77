"""Draw the plot of the claims in docs/figures.md: one panel for each kind of claim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools.claims_page import OURS, by_impl, load, sync_ratios, variance_ratio

BLUE, GREY, ORANGE = "#2563eb", "#868e96", "#d9480f"


def draw(path: Path) -> None:
    """Draw the panels whose results exist."""
    figure = Figure(figsize=(14, 7.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    for panel, axes in zip(PANELS, panels, strict=True):
        panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
        if not axes.lines and not axes.patches:  # not measured yet
            axes.clear()
            axes.set_axis_off()
    figure.savefig(path)


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=11)


def reductions(axes: Axes) -> None:
    """What is saved, in percent, with the field's figure as a mark."""
    title(axes, "Saved, in percent")
    bars: dict[str, tuple[float, float]] = {}  # name → saved here, in the field
    if sync := load("reshard_cpu.json")["rows"]:
        volume = sync_ratios(sync, lambda row: row["gb_per_s"] * row["ms_p50"])
        time = sync_ratios(sync, lambda row: row["ms_p50"])
        bars["switch: volume, N=4 TP 2"] = 1 - volume["N=4 tp=2"], 0.6
        bars["switch: time"] = 1 - time["N=4 tp=2"], 0.6
    if switch := by_impl(load("switch_memory_cpu.json")["rows"]):
        bars["switch: memory"] = (
            1 - switch[OURS]["peak_mib"] / switch["gather_all"]["peak_mib"],
            0.4,
        )
    if memory := by_impl(load("memory_cpu_avx2.json")["rows"]):
        default = memory[OURS]
        states = {name: states_mib(row) for name, row in memory.items()}
        bars["offload, by count"] = default["optimizer_mib"] / states[OURS], 0.5
        saved = {name: 1 - row["peak_mib"] / default["peak_mib"] for name, row in memory.items()}
        bars["gradient checkpointing"] = saved["gradient checkpointing"], 0.3
        bars["LoRA: states"] = 1 - states["LoRA rank 16"] / states[OURS], 0.5
        bars["LoRA: peak"] = saved["LoRA rank 16"], 0.5
    if seeds := load("kl_seeds_cpu_avx2.json")["rows"]:
        ratio, *_ = variance_ratio(seeds, lambda curve: curve[-1])
        bars["KL variance over seeds"] = 1 - ratio, 0.37
    names = list(bars)[::-1]
    axes.barh(names, [100 * bars[name][0] for name in names], 0.6, color=BLUE, label="here")
    axes.plot([100 * bars[n][1] for n in names], names, "|", ms=16, mew=3, c=ORANGE, label="field")
    axes.set_xlim(min([0.0, *(100 * here for here, _ in bars.values())]), 100)
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.06))


def states_mib(row: Mapping[str, Any]) -> float:
    return sum(row[f"{name}_mib"] for name in ("weights", "gradients", "optimizer"))


def speeds(axes: Axes) -> None:
    """How many times faster, with the field's figure as a mark."""
    title(axes, "Times faster")
    bars: dict[str, tuple[float, float]] = {}
    if steps := by_impl([r for r in load("end_to_end_cpu.json")["rows"] if r["pass"] == "step"]):
        bars["updates/s: TRL, ragged"] = steps[OURS]["ratio_to_best_peer"], 2.3
    if curve := by_impl(load("reward_curve_cpu_avx2.json")["rows"]):
        bars["updates/s: TRL, short"] = curve[OURS]["ratio_to_best_peer"], 2.3
    for row in load("plain_generate_cpu_avx2.json")["rows"]:
        if row["impl"] == OURS:
            name = f"generate, {row['shape'].split()[-1]}"
            bars[name] = row["ratio_to_best_peer"], 3.0
    names = list(bars)[::-1]
    drawn = axes.barh(names, [bars[name][0] for name in names], 0.6, color=BLUE)
    axes.bar_label(drawn, fmt="%.1f×", padding=2)
    axes.plot([bars[name][1] for name in names], names, "|", ms=22, mew=3, c=ORANGE)
    axes.axvline(1, color=GREY, lw=1, ls=":")
    axes.set_xlim(0, 1.12 * max([3.0, *(here for here, _ in bars.values())]))


def utilisation(axes: Axes) -> None:
    title(axes, "Share of time at work, %")
    rows = load("overlap_cpu_avx2.json")["rows"]
    for offset, (key, colour) in enumerate((("trainer_busy", BLUE), ("engine_busy", GREY))):
        positions = [i + 0.35 * (offset - 0.5) for i in range(len(rows))]
        label = key.removesuffix("_busy")
        bars = axes.bar(positions, [100 * r[key] for r in rows], 0.33, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f%%", padding=2)
    axes.set_xticks(range(len(rows)), [row["impl"].removeprefix(f"{OURS} ") for row in rows])
    axes.set_ylim(0, 115)
    axes.legend(frameon=False, ncols=2, loc="upper left")


def padding(axes: Axes) -> None:
    title(axes, "Packed, in percent of padded")
    rows = load("padding_cpu_avx2.json")["rows"]
    kinds = {
        "tokens": (lambda row: 1 / row["token_ratio"], GREY),
        "time": (lambda row: 1 / row["ratio_to_best_peer"], BLUE),
        "memory": (lambda row: row["peak_mib"] / rows[0]["peak_mib"], ORANGE),
    }
    for offset, (label, (value, colour)) in enumerate(kinds.items()):
        positions = [i + 0.27 * (offset - 1) for i in range(len(rows))]
        bars = axes.bar(positions, [100 * value(r) for r in rows], 0.25, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_xticks(range(len(rows)), [row["shape"].split(",")[0] for row in rows])
    axes.set_ylim(0, 130)
    axes.legend(frameon=False, ncols=3, loc="upper center", fontsize=9, columnspacing=1)


def kl_of_seeds(axes: Axes) -> None:
    title(axes, "KL, one line a seed")
    for row in load("kl_seeds_cpu_avx2.json")["rows"]:
        colour = BLUE if row["impl"] == OURS else GREY
        for number, curve in enumerate(row["curves"]):
            label = row["impl"] if not number else None
            axes.plot(range(1, len(curve) + 1), curve, color=colour, lw=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.set_ylim(0, 6)
    axes.legend(frameon=False)


def reward(axes: Axes) -> None:
    title(axes, "Training score against time")
    for row in load("reward_curve_cpu_avx2.json")["rows"]:
        colour = BLUE if row["impl"] == OURS else GREY
        axes.plot(row["seconds"], row["scores"], "o-", ms=3, color=colour, label=row["impl"])
    axes.set_xlabel("seconds since the first step began")
    axes.legend(frameon=False)


PANELS = (reductions, speeds, utilisation, padding, kl_of_seeds, reward)
