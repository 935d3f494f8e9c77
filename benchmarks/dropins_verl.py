"""verl's actor update on the CPU without and with `hybridengine.integrations.verl.patch()`.

    .cache/dropins/verl/venv/bin/python -m benchmarks.dropins_verl [--json FILE]

Both in one process for each kind of head, from the same weights and on the same batches: losses,
gradient norms and metrics of every step must agree. Time and peak memory of a step are shown,
memory over that of the process before the first model; ours runs last. The environment is made by
`python -m tools.dropins verl`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks import _verl_engine as engine  # first: it makes the CPU verl's platform
from benchmarks._bench import OURS, ROOT, cpu_name, status_kib, versions
from hybridengine.integrations import verl as ours
from tests.tiny_models import SIZES

RESULTS = ROOT / "benchmarks/results/dropins_verl.json"
PROMPT, RESPONSE, BATCH = 24, 104, 16
MICRO_BATCH_TOKENS = 1024
RELATIVE = 1e-4  # of losses and gradient norms after several optimizer steps, float32
SKIPPED = ("perf/", "mfu")
HEADS = ("logits", "fused")
# Not balancing: verl averages clip fractions over micro-batches, so another partition changes them.
GROUPS = ("log_probs", "fused_head", "advantages", "padding", "losses", "policy_losses")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--head", choices=HEADS, help="default: each in a process of its own")
    options = parser.parse_args()
    if options.head:
        rows = _compared(options.head, options.steps, options.vocab)
        options.json.write_text(json.dumps(rows))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for head in HEADS:
            part = Path(folder, "rows.json")
            arguments = ["--head", head, "--json", str(part), "--steps", str(options.steps)]
            command = [sys.executable, "-m", "benchmarks.dropins_verl", *arguments]
            subprocess.run([*command, "--vocab", str(options.vocab)], check=True, cwd=ROOT)
            rows += json.loads(part.read_text())
    for row in rows:
        print(
            f"{row['head']:10} {row['impl']:12} {row['ms_p50']:7.0f} ms per step, "
            f"peak {row['peak_mib']:6.0f} MiB"
        )
    worst = max(_difference(*rows[i : i + 2]) for i in (0, 2))
    print(f"largest relative difference of a loss, gradient norm or metric: {worst:.1e}")
    result = {"versions": versions(), "device": cpu_name(), "largest_relative_difference": worst}
    options.json.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return worst > RELATIVE


def _compared(head: str, steps: int, vocab: int) -> list[dict[str, Any]]:
    """Return the rows of verl and ours. verl never puts its fused forward back."""
    engine.start_process_group()
    before = status_kib("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, vocab)
        batches = [random_batch(step, vocab) for step in range(steps)]
        theirs = _run(folder, batches, head == "fused", before)
        with ours.patched(*GROUPS):
            results = _run(folder, batches, head == "fused", before)
    return [{"impl": "verl", "head": head, **theirs}, {"impl": OURS, "head": head, **results}]


def save_model(folder: str, vocab: int) -> None:
    """Write a Qwen2, embeddings tied: verl's fused head fails on a head sharded by itself."""
    torch.manual_seed(0)
    sizes = SIZES | dict(vocab_size=vocab, intermediate_size=256, max_position_embeddings=32768)
    config = Qwen2Config(**sizes, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def random_batch(seed: int, vocab: int) -> dict[str, torch.Tensor]:
    """Random left-padded prompts and right-padded responses, groups of 4, GRPO advantages."""
    from verl.trainer.ppo import core_algos

    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, PROMPT + 1, (BATCH, 1), generator=generator)
    responses = torch.randint(8, RESPONSE + 1, (BATCH, 1), generator=generator)
    position = torch.arange(PROMPT + RESPONSE)
    mask = ((position >= PROMPT - prompts) & (position < PROMPT + responses)).long()
    ids = torch.randint(1, vocab, mask.shape, generator=generator) * mask
    response_mask = mask[:, PROMPT:].float()
    rewards = torch.zeros(BATCH, RESPONSE)
    rewards[:, 0] = torch.rand(BATCH, generator=generator)
    groups = np.array([f"prompt {i // 4}" for i in range(BATCH)], dtype=object)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, response_mask, groups)
    old = -math.log(vocab) + 0.1 * torch.randn(BATCH, RESPONSE, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": response_mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "advantages": advantages,
        "old_log_probs": old,
        "ref_log_prob": old + 0.05,
    }


def _run(
    folder: str, batches: list[dict[str, torch.Tensor]], fused: bool, before_kib: int
) -> dict[str, Any]:
    """Return the metrics of every step, and the time and peak memory (over `before_kib`) of one."""
    worker = engine.training_worker(folder, MICRO_BATCH_TOKENS, BATCH, use_fused_kernels=fused)
    results, times, peaks = [], [], []
    for batch in batches:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
        start = time.perf_counter()
        metrics = engine.update(worker, batch)
        times.append(1000 * (time.perf_counter() - start))
        peaks.append((status_kib("VmHWM") - before_kib) / 1024)
        results.append(_numbers(metrics))
    return {
        "ms_p50": statistics.median(times[1:]),
        "peak_mib": statistics.median(peaks[1:]),
        "steps": results,
    }


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that do not depend on time and memory, averaged over micro-batches."""
    numbers = {}
    for key, value in metrics.items():
        if not key.startswith(SKIPPED):
            values = [float(v.aggregate() if hasattr(v, "aggregate") else v) for v in _flat(value)]
            numbers[key] = sum(values) / len(values)
    return numbers


def _flat(value: Any) -> list[Any]:
    return [one for v in value for one in _flat(v)] if isinstance(value, list) else [value]


def _difference(theirs: dict[str, Any], results: dict[str, Any]) -> float:
    """Return the largest difference of a metric, relative to it or, below 1e-3, to 1e-3."""
    worst = 0.0
    for step, (expected, own) in enumerate(zip(theirs["steps"], results["steps"], strict=True)):
        if expected.keys() != own.keys():
            raise SystemExit(f"step {step}: metrics {sorted(own)}; verl's are {sorted(expected)}")
        for key, value in expected.items():
            worst = max(worst, abs(own[key] - value) / max(abs(value), 1e-3))
    return worst


if __name__ == "__main__":
    sys.exit(main())
