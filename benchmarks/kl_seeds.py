"""How much the KL against the initial weights varies over seeds, ours and TRL's.

A random Llama of 0.2M parameters learns to answer each of four prompts with words of its own
quarter of the vocabulary: 24 steps of 16 x 8 responses, KL coefficient 0.02. `curves` are the KL of
every step, as the trainer reports it, and `scores` the mean scores of the last step, of every seed.
Both estimate the KL by k3 from the sampled tokens; ours bounds a token's estimate by 10, as verl.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, variance

from benchmarks._bench import OURS, Bench
from benchmarks._learning import train
from benchmarks.end_to_end.data import job_of
from tests.tiny_models import save_tiny
from tests.train.toy import REWARD

SEEDS, STEPS, PROMPTS, N = 8, 24, 16, 8


def run(bench: Bench) -> None:
    if bench.quick or not all(map(importlib.util.find_spec, ("vllm", "trl"))):
        print("# kl_seeds: needs vLLM and TRL, and minutes", flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = toy_job(folder)
        runs = [(impl, seed) for seed in range(1, SEEDS + 1) for impl in ("trl", OURS)]
        with ThreadPoolExecutor(2) as pool:  # two runs of one thread at a time
            results = list(
                pool.map(
                    lambda r: train(r[0], folder / f"{r[0]}{r[1]}", job | {"seed": r[1]}, 1), runs
                )
            )
    for impl in ("trl", OURS):
        own = [result for (name, _), result in zip(runs, results, strict=True) if name == impl]
        last = [result["kl"][-1] for result in own]
        scores = [result["scores"][-1] for result in own]
        summary = f"KL {fmean(last):.3f}, variance {variance(last):.2e}"
        bench.add(
            "kl_seeds",
            "kl",
            impl,
            f"{SEEDS} seeds, {STEPS} steps",
            dtype="float32",
            note=f"  {summary}, score {fmean(scores):.3f}",
            scores=scores,
            curves=[result["kl"] for result in own],
        )


def toy_job(folder: Path) -> dict:
    """Write model, prompts and reward to `folder`; return the job."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = save_tiny("llama", folder / "model")
    quarters = [[3, 27], [27, 51], [51, 76], [76, 101]]
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"w{10 * (k + 1)} w{5 + k}"}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(quarter)},
        }
        for k, quarter in enumerate(quarters)
    ]
    pq.write_table(pa.Table.from_pylist(rows * (PROMPTS // 4 * STEPS)), folder / "train.parquet")
    reward = REWARD.replace("= ground_truth", "= __import__('json').loads(ground_truth)")
    (folder / "reward.py").write_text(reward)
    return {
        **job_of(folder / "train.parquet", PROMPTS, N, PROMPTS * N, 8, 4),
        "model": str(model),
        "reward": str(folder / "reward.py"),
        "kv_cache_bytes": 2**26,
        "lr": 2e-3,
        "steps": STEPS,
        "kl_coef": 0.02,
    }
