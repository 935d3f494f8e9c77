"""Run the demo's task in several modes and seeds; compare validation, time and idle shares.

    python examples/demo/prepare.py
    python examples/overlap/compare.py --seeds 1 2 3 --modes sync one_step_off

Both modes have two ranks: `sync` trains and generates on both, the others train on one and generate
on the other. Runs that are finished are not repeated. The table goes to <out>/compare.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev

CONFIG = Path(__file__).parent / "config.yaml"
SYNC = ("trainer.mode=sync", "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=0")
COLUMNS = (
    "validation",
    "spread of seeds",
    "seconds per step",
    "tokens/s per rank",
    "trainer idle",
    "engine idle",
    "staleness",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", default=["sync", "one_step_off"])
    parser.add_argument("--out", type=Path, default=Path("runs/overlap"))
    parser.add_argument("--metric", default="strict", help="validation result to compare")
    parser.add_argument("overrides", nargs="*", help="further key=value of every run")
    options = parser.parse_args()
    lines = [f"| mode | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for mode in options.modes:
        folders = [options.out / f"{mode}_seed_{seed}" for seed in options.seeds]
        for seed, folder in zip(options.seeds, folders, strict=True):
            run(mode, seed, folder, options.overrides)
        lines.append(f"| {mode} | {' | '.join(row(folders, options.metric))} |")
    (options.out / "compare.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def run(mode: str, seed: int, folder: Path, overrides: Sequence[str]) -> None:
    """Run one job, unless it has finished before."""
    if (folder / "summary.json").is_file():
        return
    settings = SYNC if mode == "sync" else (f"trainer.mode={mode}",)
    own = (f"seed={seed}", f"trainer.default_local_dir={folder}")
    job = [sys.executable, "-m", "hybridengine", "grpo", str(CONFIG)]
    subprocess.run([*job, *settings, *own, *overrides], check=True)


def row(folders: Sequence[Path], metric: str) -> list[str]:
    """Return the columns of one mode from its runs, one for each seed."""
    ends = [json.loads((f / "summary.json").read_text())[f"val_{metric}_end"] for f in folders]
    runs = [[json.loads(line) for line in (f / "metrics.jsonl").open()] for f in folders]
    # Compilation and first calls are in the first two steps.
    steps = [r for rows in runs for r in [r for r in rows if "timing_s/step" in r][2:]]
    spread = f"{min(ends):.3f} to {max(ends):.3f}"
    if len(ends) > 1:
        spread += f", std {stdev(ends):.3f}"
    return [
        f"{fmean(ends):.3f}",
        spread,
        f"{median(s['timing_s/step'] for s in steps):.2f}",
        f"{median(s['perf/throughput'] for s in steps):.0f}",
        f"{fmean(idle_shares(s)[0] for s in steps):.0%}",
        f"{fmean(idle_shares(s)[1] for s in steps):.0%}",
        f"{fmean(s.get('fully_async/trajectory_staleness/mean', 0.0) for s in steps):.2f}",
    ]


def idle_shares(step: dict[str, float]) -> tuple[float, float]:
    """Return the idle shares (trainer, engine) of a step.

    In `sync` the trainer idles while its ranks generate, score and sync, the engine at all other
    times.
    """
    if "trainer/idle_ratio" in step:
        return step["trainer/idle_ratio"], step["rollouter/idle_ratio"]
    busy = sum(step.get(f"timing_s/{name}", 0.0) for name in ("gen", "reward", "update_weights"))
    share = busy / step["timing_s/step"]
    return share, 1 - share


if __name__ == "__main__":
    main()
