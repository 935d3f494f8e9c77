"""How far rollouts are from exact, by what engine and trainer do not share: one row per cause.

Each engine is that of a job, compared with the trained model by `hybridengine parity`: the first
operator that is not equal bit for bit, its largest relative difference, and over all sampled tokens
the KL per token (k3), the largest ratio of the trained model's probability to the engine's, and the
correction that holds at this size. Random weights of SmolLM2-135M's shapes with 8 layers, whose
head is scaled so that a token has about 3 nats.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks._bench import OURS, Bench
from benchmarks._models import smollm2_135m
from tests.ranks import run_ranks
from tests.sync.quantized_kernel import register_kernel
from tests.tiny_models import save_tiny

LAYERS, PROMPTS, HEAD_SCALE = 8, 16, 12.0
CASES = {  # cause: settings of the job
    "operators of vLLM, float32": ["rollout.exact=off", "actor.fsdp_config.dtype=float32"],
    "operators of vLLM, bfloat16": ["rollout.exact=off", "actor.fsdp_config.dtype=bfloat16"],
    "bfloat16 engine of a float32 trainer": [
        "rollout.exact=off",
        "actor.fsdp_config.dtype=float32",
        "rollout.dtype=bfloat16",
    ],
    "FP8 weights, bfloat16": [
        "rollout.exact=off",
        "actor.fsdp_config.dtype=bfloat16",
        "rollout.quantization=fp8",
    ],
}


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = save_model(folder, quick=bench.quick)
        for cause, settings in list(CASES.items())[: 1 if bench.quick else None]:
            [found] = run_ranks(measure, 1, folder, path, settings, timeout_s=1800.0)
            dtype = "bfloat16" if "bfloat16" in cause else "float32"  # of the engine
            bench.add("inexact", "generate", OURS, cause, f"  {found}", dtype=dtype, **found)


def save_model(folder: Path, quick: bool) -> str:
    """Write a model of random weights and the prompts; a tiny one for a quick run."""
    path = save_tiny("llama", folder / "model")
    if not quick:
        torch.manual_seed(0)
        config = smollm2_135m()
        config.num_hidden_layers, config.tie_word_embeddings = LAYERS, False
        model = AutoModelForCausalLM.from_config(config)
        model.lm_head.weight.data *= HEAD_SCALE
        model.save_pretrained(path)
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"w{5 + k} w{9 + k} w{k + 3}"}],
            "reward_model": {"ground_truth": "0"},
        }
        for k in range(PROMPTS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure(
    rank: int, world_size: int, folder: Path, path: str, settings: list[str]
) -> dict[str, Any]:
    from hybridengine.lab.evaluate import load_evaluation
    from hybridengine.lab.parity.job import compare_job

    torch.compiler.set_stance("force_eager")  # vLLM compiles its quantization
    register_kernel()
    given = [
        f"data.train_files={folder / 'rows.jsonl'}",
        "data.max_prompt_length=32",
        "data.max_response_length=32",
        "rollout.kv_cache_gib=0.1",
        "rollout.name=vllm",
    ]
    report = compare_job(load_evaluation(Path(path), [*given, *settings]))
    point, difference = report.first_inexact or ("none", 0.0)
    return {
        "first_inexact": point,
        "difference": difference,
        "engine_kl": report.kl,
        "largest_ratio": report.largest_ratio,
        "probability_difference": report.probability_difference,
        "num_tokens": report.num_tokens,
        "correction": report.correction,
    }
