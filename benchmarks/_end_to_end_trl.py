"""TRL's GRPOTrainer on the same model, data, reward and engine as ours; writes its figures as JSON.

Run as a program of its own by `benchmarks.end_to_end`, so that its peak memory is its own.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from hybridengine.rollout.vllm.engine import prepare_environment

    prepare_environment()
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from benchmarks._end_to_end_data import reward
    from hybridengine.rollout.vllm.weights import WeightsInPlace

    rows = datasets.load_dataset("parquet", data_files=job["train"], split="train")
    rows = rows.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]})
    tokenizer = AutoTokenizer.from_pretrained(job["model"])

    def score(completions: list, ground_truth: list[str], **_: Any) -> list[float]:
        return [reward(c[0]["content"], t) for c, t in zip(completions, ground_truth, strict=True)]

    config = GRPOConfig(
        output_dir=job["out"],
        use_cpu=True,
        bf16="rollouts" not in job,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["responses"] // job["micro_batch"],
        num_generations=job["n"],
        max_completion_length=job["max_response_length"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=job["max_model_len"],
        vllm_importance_sampling_correction="rollouts" not in job,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    vllm_generation.LLM = functools.partial(
        vllm_generation.LLM, enforce_eager=True, kv_cache_memory_bytes=job["kv_cache_bytes"]
    )
    steps: list[dict[str, float]] = []
    # vLLM on a CPU packs its linears away, and TRL's load_weights would then write nothing:
    # it gets the plain linears that ours runs on.
    with WeightsInPlace():
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"),
            reward_funcs=score,
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[_clock(TrainerCallback)(steps)],
        )
    _time(steps, trainer.vllm_generation, "generate", "gen")
    _time(steps, trainer.vllm_generation, "sync_weights", "update_weights")
    _time(steps, trainer, "_get_per_token_logps_and_entropies", "old_log_prob", only_frozen=True)
    _time(steps, trainer, "compute_loss", "forward")
    _time(steps, trainer.accelerator, "backward", "backward")
    batches = _keep(trainer, "_generate_and_score_completions")
    rewards = _keep(trainer, "_calculate_rewards")
    losses = _keep(trainer, "compute_loss")
    norms = _keep(trainer.accelerator, "clip_grad_norm_")
    trainer.train()
    for step in steps:
        step["update_actor"] = step.pop("forward") + step.pop("backward")
    tokens = [int(b["prompt_mask"].sum() + b["completion_mask"].sum()) for b in batches]
    result = {
        "phases": steps,
        "tokens": tokens,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if "rollouts" in job:
        result |= _rollouts(batches[0]) | {
            "model": job["model"],
            "n": job["n"],
            "rewards": rewards[0][:, 0].tolist(),
            "loss": float(sum(loss.detach() for loss in losses)),
            "grad_norm": float(norms[0]),
        }
    Path(job["result"]).write_text(json.dumps(result))


def _clock(base: type) -> type:
    class Clock(base):
        def __init__(self, steps: list[dict[str, float]]) -> None:
            self.steps = steps

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()
            self.steps.append(defaultdict(float))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps[-1]["step"] = time.perf_counter() - self.start

    return Clock


def _keep(owner: Any, method: str) -> list[Any]:
    """Everything that `method` returns from now on."""
    call, results = getattr(owner, method), []

    def kept(*args: Any, **kwargs: Any) -> Any:
        results.append(call(*args, **kwargs))
        return results[-1]

    setattr(owner, method, kept)
    return results


def _rollouts(batch: dict[str, Any]) -> dict[str, Any]:
    """What TRL generated, and the advantages it made of the rewards."""
    rows = zip(
        *(batch[f"{part}_{what}"] for part in ("prompt", "completion") for what in ("ids", "mask")),
        strict=True,
    )
    pairs = [
        (prompt[seen.bool()].tolist(), completion[kept.bool()].tolist())
        for prompt, seen, completion, kept in rows
    ]
    return {
        "pairs": pairs,
        "advantages": batch["advantages"].tolist(),
    }


def _time(
    steps: list[dict[str, float]], owner: Any, method: str, name: str, only_frozen: bool = False
) -> None:
    """Add to the running step, under `name`, the time that `method` takes."""
    import torch

    call: Callable = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        if not (only_frozen and torch.is_grad_enabled()):
            steps[-1][name] += time.perf_counter() - start
        return result

    setattr(owner, method, timed)


if __name__ == "__main__":
    main()
