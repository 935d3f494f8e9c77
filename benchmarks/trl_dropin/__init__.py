"""TRL's GRPOTrainer and SFTTrainer without and with `hybridengine.integrations.trl.patch()`.

The demo's model (SmolLM2-135M) in float32, one rank, each run in its own process: losses and
gradient norms of every step, time per phase, peak memory. GRPO generates with colocated vLLM, so
that its weight sync is timed, too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._bench import OURS, Bench
from benchmarks.end_to_end import PHASES, run_program
from benchmarks.end_to_end.data import MODEL, has_demo_model, job_of, write

STEPS, PROMPTS, N, MICRO_BATCH = 3, 2, 2, 4  # the first step is a warm-up
MAX_PROMPT, MAX_RESPONSE = 384, 64


def run(bench: Bench) -> None:
    if not has_demo_model(bench, "trl_dropin"):
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "train.parquet", 8 * STEPS)
        job = {
            **job_of(folder / "train.parquet", PROMPTS, N, MICRO_BATCH, MAX_PROMPT, MAX_RESPONSE),
            "model": str(MODEL),
            "bf16": False,
            "steps": STEPS,
        }
        for trainer, program, shape in (
            ("grpo", "end_to_end.trl_trainer", f"{PROMPTS}x{N} responses"),
            ("sft", "trl_dropin.sft", f"{MICRO_BATCH} conversations"),
        ):
            results = {
                impl: run_program(
                    f"benchmarks.{program}",
                    folder / f"{trainer}_{impl}",
                    job | {"adapter": impl == OURS},
                )
                for impl in ("trl", OURS)
            }
            _report(bench, trainer, shape, results)


def _report(bench: Bench, trainer: str, shape: str, results: dict[str, dict[str, Any]]) -> None:
    theirs, ours = results["trl"], results[OURS]
    for what in ("losses", "grad_norms"):
        pairs = zip(ours[what], theirs[what], strict=True)
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
        print(f"# {trainer}: {what} of {len(ours[what])} steps differ by at most {worst:.1e}")
    for phase in ("step", *PHASES):
        for impl, result in results.items():
            times = sorted(p.get(phase, 0.0) * 1e3 for p in result["phases"][1:])
            if not any(times):
                continue
            totals = {}
            if phase == "step":
                totals["peak_mib"] = result["peak_rss_gib"] * 1024
            if impl == OURS:
                baseline = median(p[phase] * 1e3 for p in theirs["phases"][1:])
                totals["ratio_to_best_peer"] = baseline / median(times)
            bench.add(
                f"trl_{trainer}",
                phase,
                impl,
                shape,
                dtype="float32",
                ms_p20=times[0],
                ms_p50=median(times),
                ms_p80=times[-1],
                **totals,
            )
