"""The demo's training reward against time, ours and TRL's, one after the other for as long.

SmolLM2-135M on the demo's short sums from its initial weights: 6 prompts x 8 responses a step, the
demo's learning rate, float32, one rank with all threads. Loading is not counted. `scores` and
`seconds` are those of every step; `ratio_to_best_peer` compares updates per second. `score_at_end`
is the mean over the last fifth of the time that both have.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from benchmarks._bench import OURS, ROOT, Bench
from benchmarks._learning import train
from benchmarks.end_to_end.data import job_of

MODEL, TRAIN = ROOT / ".cache/demo/smollm2-135m-instruct", ROOT / ".cache/demo/sums/train.parquet"
SECONDS = 150.0
PROMPTS, N, MAX_PROMPT, MAX_RESPONSE = 6, 8, 24, 8


def run(bench: Bench) -> None:
    if bench.quick or not MODEL.exists():
        print("# reward_curve: needs the demo: `python examples/demo/prepare.py`", flush=True)
        return
    job = {
        **job_of(TRAIN, PROMPTS, N, PROMPTS * N, MAX_PROMPT, MAX_RESPONSE),
        "model": str(MODEL),
        "reward": str(ROOT / "examples/demo/reward.py"),
        "chat_template": str(ROOT / "examples/demo/chat_template.jinja"),
        "lr": 2e-5,
        "warmup_steps": 3,
        "beta2": 0.95,
        "steps": 1000,
        "seconds": SECONDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        results = {impl: train(impl, Path(folder) / impl, job) for impl in ("trl", OURS)}
    ends = {impl: result["seconds"] for impl, result in results.items()}
    common = min(seconds[-1] for seconds in ends.values())
    step_s = {}
    for impl, result in results.items():
        times = [end - start for start, end in pairwise([0.0, *ends[impl]])]
        step_s[impl] = median(times[1:] or times)  # the first step warms up
        last = [
            score
            for score, end in zip(result["scores"], ends[impl], strict=True)
            if 0.8 * common < end <= common
        ]
        score = fmean(last or result["scores"][-1:])
        bench.add(
            "reward_curve",
            "step",
            impl,
            f"{PROMPTS}x{N} responses",
            dtype="float32",
            ms_p50=step_s[impl] * 1e3,
            ratio_to_best_peer=step_s["trl"] / step_s[impl] if impl == OURS else None,
            note=f"  {len(last)} steps up to {common:.0f} s: score {score:.3f}",
            score_at_end=score,
            scores=result["scores"],
            seconds=ends[impl],
        )
