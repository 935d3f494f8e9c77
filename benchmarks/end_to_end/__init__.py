"""Full GRPO steps against TRL's GRPOTrainer: tokens per second, peak memory, time per phase.

Same model (SmolLM2-135M), prompts, reward, batch, hyper-parameters and engine (vLLM, eager, plain
linears on a CPU), one rank, each in its own process. The lengths of prompts and answers vary
widely. Both train in bfloat16 where the CPU multiplies it faster than float32, else in float32.
Ours computes float32 logits in the engine, TRL's in the model's dtype. First both compute loss,
advantages and gradient of the same rollouts in float32, and the differences are printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._bench import OURS, ROOT, Bench
from benchmarks.end_to_end.data import MODEL, has_demo_model, job_of, write

STEPS = 2  # after one warm-up step
PROMPTS, N, MAX_PROMPT, MAX_RESPONSE, MICRO_BATCH = 4, 8, 384, 64, 8
PHASES = ("gen", "old_log_prob", "update_actor", "update_weights")


def run(bench: Bench) -> None:
    if not has_demo_model(bench, "end_to_end"):
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "train.parquet", PROMPTS * (STEPS + 1))
        job = {
            **job_of(folder / "train.parquet", PROMPTS, N, MICRO_BATCH, MAX_PROMPT, MAX_RESPONSE),
            "model": str(MODEL),
        }
        same = run_program(
            f"{__name__}.trl_trainer",
            folder / "same",
            job | {"steps": 1, "rollouts": True, "bf16": False},
        )
        for name, difference in run_program(f"{__name__}.ours", folder / "same", same).items():
            print(f"# same rollouts, float32: {name} differs from TRL's by {difference:.1e}")
        trl = run_program(f"{__name__}.trl_trainer", folder / "trl", job | {"steps": STEPS + 1})
        ours = _train(folder / "ours", job)
    rates = {}
    for impl, result in (("trl", trl), (OURS, ours)):
        seconds = [p["step"] for p in result["phases"][1:]]
        rates[impl] = sum(result["tokens"][1:]) / sum(seconds)
        for phase in ("step", *PHASES):
            times = sorted(p.get(phase, 0.0) * 1e3 for p in result["phases"][1:])
            totals = {}
            if phase == "step":
                totals["peak_mib"] = result["peak_rss_gib"] * 1024
                totals["ratio_to_best_peer"] = rates[impl] / rates["trl"] if impl == OURS else None
            bench.add(
                "end_to_end",
                phase,
                impl,
                f"{PROMPTS}x{N} responses",
                dtype="float32→bf16" if job["bf16"] else "float32",
                ms_p20=times[0],
                ms_p50=median(times),
                ms_p80=times[-1],
                **totals,
            )
        print(f"# {impl}: {rates[impl]:.0f} tokens/s, {result['peak_rss_gib']:.2f} GiB", flush=True)
    for number, equal in enumerate(ours["equal_rewards"][1:], 1):
        mine, theirs = (x["tokens"][number] / x["phases"][number]["step"] for x in (ours, trl))
        bench.add(
            "end_to_end",
            f"step {number}",
            OURS,
            f"{PROMPTS}x{N} responses",
            f", {equal:.0%} of its groups of equal rewards",
            dtype="float32→bf16" if job["bf16"] else "float32",
            ms_p50=ours["phases"][number]["step"] * 1e3,
            ratio_to_best_peer=mine / theirs,
        )
    memory = ours["peak_rss_gib"] / trl["peak_rss_gib"]
    print(f"# {rates[OURS] / rates['trl']:.2f}x TRL's tokens/s in {memory:.0%} of its memory")


def run_program(module: str, folder: Path, job: dict, threads: int = 0) -> dict:
    """Run a module of the benchmarks in its own process; return the result it wrote.

    threads: as of `run_grpo`.
    """
    folder.mkdir(exist_ok=True)
    name = module.rpartition(".")[2]
    job |= {"out": str(folder), "result": str(folder / f"{name}.json")}
    (folder / "job.json").write_text(json.dumps(job))
    _program(
        [sys.executable, "-m", module, str(folder / "job.json")], folder / f"{name}.log", threads
    )
    return json.loads(Path(job["result"]).read_text())


def _train(folder: Path, job: dict) -> dict:
    """Run `hybridengine grpo`; return times, tokens and peak memory of its steps."""
    settings = {
        "model.path": job["model"],
        "data.train_files": job["train"],
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": MAX_PROMPT,
        "data.max_response_length": MAX_RESPONSE,
        "data.shuffle": False,
        # what TRL pads its micro-batches to at most
        "actor.ppo_max_token_len_per_gpu": MICRO_BATCH * job["max_model_len"],
        "actor.optim.lr": job["lr"],
        "rollout.n": N,
        "rollout.enforce_eager": True,
        "rollout.kv_cache_gib": job["kv_cache_bytes"] / 2**30,
        "reward.custom_reward_function.path": str(ROOT / "benchmarks/end_to_end/data.py"),
        "trainer.total_training_steps": STEPS + 1,
    }
    steps = run_grpo(folder, settings)
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "phases": [{p: s.get(f"timing_s/{p}", 0.0) for p in ("step", *PHASES)} for s in steps],
        "tokens": [s["perf/total_num_tokens"] for s in steps],
        "equal_rewards": [s["frac_reward_zero_std"] for s in steps],  # no advantage, no gradient
        "peak_rss_gib": summary["peak_rss_gib"],
    }


def run_grpo(
    folder: Path, settings: Mapping[str, Any], config: Path | None = None, threads: int = 0
) -> list[dict[str, float]]:
    """Run `hybridengine grpo` in `folder` and return the metrics of its steps.

    threads: of every rank; 0: as many as there are CPUs.
    """
    folder.mkdir()
    if config is None:
        config = folder / "config.yaml"
        config.write_text("")
    pairs = [f"{key}={value}" for key, value in settings.items()]
    pairs += [f"trainer.default_local_dir={folder}", "trainer.logger=[jsonl]"]
    cli = [sys.executable, "-m", "hybridengine", "grpo", str(config), *pairs]
    _program(cli, folder / "log", threads)
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "timing_s/step" in row]


def _program(command: list[str], log: Path, threads: int = 0) -> None:
    threads = threads or len(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, timeout=900
        )
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}:\n{tail}")
