"""How much of the time trainer and engine work, on a rank each, with overlap and without.

The demo's task (6 prompts x 8 responses), one trainer rank and one engine rank of one thread each.
`in turn`: the engine waits for every update, the trainer for every batch (`trainer.staleness` 0).
`one_step_off` and `async` (staleness 2) overlap. `busy` is the mean of the shares of the step in
which trainer and engine work; `ratio_to_best_peer` compares updates per second with `in turn`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean, median

from benchmarks._bench import OURS, ROOT, Bench
from benchmarks.end_to_end import run_grpo

CONFIG = ROOT / "examples/overlap/config.yaml"
MODEL = ROOT / ".cache/demo/smollm2-135m-instruct"
STEPS, WARM_UP = 6, 2
MODES = {
    "in turn": {"trainer.mode": "one_step_off", "trainer.staleness": 0},
    f"{OURS} one_step_off": {"trainer.mode": "one_step_off", "trainer.staleness": 1},
    f"{OURS} async": {"trainer.mode": "async", "trainer.staleness": 2},
}


def run(bench: Bench) -> None:
    if bench.quick or not MODEL.exists():
        print("# overlap: needs the demo: `python examples/demo/prepare.py`", flush=True)
        return
    common = {
        "data.train_batch_size": 6,
        "data.val_files": "null",
        "trainer.total_training_steps": WARM_UP + STEPS,
        "trainer.rollout_freq": -1,
    }
    in_turn = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in MODES.items():
            place = Path(folder) / name.replace(" ", "_")
            steps = run_grpo(place, common | mode, CONFIG, threads=1)[WARM_UP:]
            times = sorted(step["timing_s/step"] for step in steps)
            in_turn = in_turn or median(times)
            trainer = 1 - fmean(step["trainer/idle_ratio"] for step in steps)
            engine = 1 - fmean(step["rollouter/idle_ratio"] for step in steps)
            bench.add(
                "overlap",
                "step",
                name,
                "6x8 responses, 1 + 1 ranks",
                dtype="float32" if bench.isa in ("avx2", "portable") else "auto",
                ms_p50=median(times) * 1e3,
                ratio_to_best_peer=in_turn / median(times) if name.startswith(OURS) else None,
                note=f"  trainer works {trainer:.0%}, engine {engine:.0%}",
                trainer_busy=trainer,
                engine_busy=engine,
                busy=(trainer + engine) / 2,
            )
