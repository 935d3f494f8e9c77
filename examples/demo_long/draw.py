"""Draw `make demo-long`: the share of held-out sums answered right, through SFT and then GRPO.

    python examples/demo_long/draw.py                                 # runs/demo_long/curve.png
    python examples/demo_long/draw.py docs/demo_long.json --out docs/demo_long.png

A folder of runs (before/, seed_1/{sft,grpo}/, seed_2/…) is first gathered in its scores.json, which
is all that the drawing needs. Every seed is a thin line, the mean of the seeds a thick one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

BLUE, ORANGE, INK, GRID = "#2563eb", "#d9480f", "#1f2933", "#e4e7eb"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scores", type=Path, nargs="?", default=Path("runs/demo_long"))
    parser.add_argument("--out", type=Path, help="the picture; curve.png in the folder of runs")
    arguments = parser.parse_args()
    source, out = arguments.scores, arguments.out or Path("runs/demo_long/curve.png")
    if source.is_dir():
        out = arguments.out or source / "curve.png"
        scores = gather(source)
        (source / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    else:
        scores = json.loads(source.read_text())
    draw(scores, out)
    for seed, run in scores["seeds"].items():
        after = run["strict"]
        print(
            f"seed {seed}: held out {scores['before']:.3f} before, {after[0]:.3f} after SFT, "
            f"{after[-1]:.3f} after GRPO; {run['minutes']:.0f} minutes"
        )
    print(f"curve: {out}")


def gather(runs: Path) -> dict[str, Any]:
    """What the runs logged: {"before", "problems", "seeds": {seed: its curves and minutes}}."""
    seeds = {}
    for folder in sorted(runs.glob("seed_*")):
        if not (folder / "grpo" / "summary.json").exists():
            continue  # not finished
        sft, grpo = (_rows(folder / half) for half in ("sft", "grpo"))
        ends = [
            json.loads((folder / half / "summary.json").read_text()) for half in ("sft", "grpo")
        ]
        scored = [row for row in grpo if "val/strict" in row]
        seeds[folder.name.removeprefix("seed_")] = {
            "sft_loss": [round(row["train/loss"], 4) for row in sft if "train/loss" in row],
            "steps": [row["step"] for row in scored],
            "strict": [round(row["val/strict"], 4) for row in scored],
            "reward": [round(r["critic/score/mean"], 4) for r in grpo if "critic/score/mean" in r],
            "minutes": round(sum(end["seconds"] for end in ends) / 60, 1),
        }
    [before] = [row["val/strict"] for row in _rows(runs / "before") if row["step"] == 0]
    return {"before": round(before, 4), "problems": ends[1]["val_problems"], "seeds": seeds}


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(scores: dict[str, Any], out: Path) -> None:
    """Two panels over the steps of both halves: held-out score, and what each half trains on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    held_out, training = figure.subplots(1, 2, width_ratios=(3, 2))
    runs = list(scores["seeds"].values())
    switch = len(runs[0]["sft_loss"])  # GRPO starts here
    of = f"{len(runs)} seeds and their mean" if len(runs) > 1 else "one seed"
    _held_out(held_out, [[scores["before"], *run["strict"]] for run in runs], runs[0], switch)
    _frame(held_out, f"Right answers on {scores['problems']} held-out sums, {of}", switch)
    _training(training, runs, switch)
    _frame(training, "What each half trains on", switch)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _held_out(axes: Any, curves: list[list[float]], run: dict[str, Any], switch: int) -> None:
    steps = [0, *(switch + step for step in run["steps"])]
    for curve in curves:
        axes.plot(steps, curve, "o-", color=BLUE, alpha=0.35, linewidth=1, markersize=3)
    average = [mean(values) for values in zip(*curves, strict=True)]
    axes.plot(steps, average, "o-", color=BLUE, linewidth=2.4, markersize=5)
    for at in (0, 1, -1):
        axes.annotate(
            f"{average[at]:.2f}",
            (steps[at], max(curve[at] for curve in curves)),
            (0, 10) if at else (6, -14),
            textcoords="offset points",
            ha="center" if at else "left",
            color=INK,
            fontweight="bold",
        )
    axes.set_ylim(0, 1)


def _training(axes: Any, runs: list[dict[str, Any]], switch: int) -> None:
    right = axes.twinx()
    for run in runs:
        axes.plot(range(1, switch + 1), run["sft_loss"], color=ORANGE, alpha=0.6, linewidth=1.2)
        steps = range(switch + 1, switch + 1 + len(run["reward"]))
        right.plot(steps, run["reward"], color=BLUE, alpha=0.6, linewidth=1.2)
    axes.set_ylabel("SFT: loss, nats per token", color=ORANGE)
    right.set_ylabel("GRPO: mean reward", color=BLUE)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])  # room for the words
    right.set_ylim(0, 1)
    right.spines[["top", "left"]].set_visible(False)


def _frame(axes: Any, title: str, switch: int) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.axvspan(0, switch, color=ORANGE, alpha=0.08, linewidth=0)
    for x, label in ((switch / 2, "SFT"), (switch + 1, "GRPO →")):
        axes.text(
            x,
            0.96,
            label,
            transform=axes.get_xaxis_transform(),
            color=INK,
            va="top",
            ha="center" if label == "SFT" else "left",
        )
    axes.set_xlabel("optimizer step")
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
