"""Run TRL's GRPOTrainer on the same model, data, reward and engine as ours; write JSON results.

`benchmarks.end_to_end` runs this in its own process, so that the peak memory is that of TRL alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    from hybridengine.engine.vllm.environment import prepare_environment

    prepare_environment()
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer
    from trl.generation import vllm_generation

    from hybridengine.engine.vllm.post_load import writable_weights
    from hybridengine.integrations import trl

    rows = datasets.load_dataset("parquet", data_files=job["train"], split="train")
    rows = rows.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]})
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    if "chat_template" in job:
        tokenizer.chat_template = Path(job["chat_template"]).read_text()
    reward = runpy.run_path(job["reward"])["compute_score"]

    def score(completions: list, ground_truth: list, **_: Any) -> list[float | None]:
        scores = [
            reward("", completion[0]["content"], truth, {})
            for completion, truth in zip(completions, ground_truth, strict=True)
        ]
        return [s["score"] if isinstance(s, dict) else s for s in scores]

    llm = functools.partial(
        vllm_generation.LLM, enforce_eager=True, kv_cache_memory_bytes=job["kv_cache_bytes"]
    )
    vars(vllm_generation)["LLM"] = llm
    if job.get("adapter"):
        trl.patch()
    steps: list[dict[str, float]] = []
    # vLLM on a CPU packs the weights of its linears, and TRL's load_weights would have no effect.
    # Use plain linears, as ours does.
    with contextlib.nullcontext() if job.get("adapter") else writable_weights():
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"),
            reward_funcs=score,
            args=_config(job),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock(TrainerCallback)(steps, job.get("seconds"))],
        )
    time_method(steps, trainer.vllm_generation, "generate", "gen")
    time_method(steps, trainer.vllm_generation, "sync_weights", "update_weights")
    time_method(
        steps, trainer, "_get_per_token_logps_and_entropies", "old_log_prob", no_grad_only=True
    )
    time_method(steps, trainer, "compute_loss", "forward")
    time_method(steps, trainer.accelerator, "backward", "backward")
    batches = _record(trainer, "_generate_and_score_completions")
    rewards = _record(trainer, "_calculate_rewards")
    losses = _record(trainer, "compute_loss")
    norms = _record(trainer.accelerator, "clip_grad_norm_")
    torch.manual_seed(job.get("seed", 0))  # vLLM, which samples by it, has set its own
    trainer.train()
    for step in steps:
        step["update_actor"] = step.pop("forward") + step.pop("backward")
    tokens = [int(b["prompt_mask"].sum() + b["completion_mask"].sum()) for b in batches]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    result = {
        "phases": steps,
        "tokens": tokens,
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "scores": [log["reward"] for log in logs],
        "kl": [log["kl"] for log in logs if "kl" in log],
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


def _config(job: dict[str, Any]) -> Any:
    """The settings of `benchmarks.end_to_end` as a GRPOConfig."""
    from trl import GRPOConfig

    return GRPOConfig(
        **common_arguments(job),
        bf16=job["bf16"],
        gradient_accumulation_steps=job["responses"] // job["micro_batch"],
        num_generations=job["n"],
        beta=job.get("kl_coef", 0.0),
        max_completion_length=job["max_response_length"],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=job["max_model_len"],
        vllm_importance_sampling_correction="rollouts" not in job,
    )


def common_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that all of TRL's trainers take."""
    return {
        "output_dir": job["out"],
        "use_cpu": True,
        "per_device_train_batch_size": job["micro_batch"],
        "max_steps": job["steps"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": job.get("warmup_steps", 0),
        "adam_beta2": job.get("beta2", 0.999),
        "seed": job.get("seed", 42),
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "shuffle_dataset": False,
        "disable_tqdm": True,
    }


def clock(base: type) -> type:
    class Clock(base):
        """Append the time of every step to `steps`; end the training after `seconds`."""

        def __init__(self, steps: list[dict[str, float]], seconds: float | None = None) -> None:
            self.steps, self.seconds = steps, seconds

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()
            self.steps.append(defaultdict(float))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps[-1]["step"] = time.perf_counter() - self.start
            if self.seconds is not None and sum(s["step"] for s in self.steps) > self.seconds:
                control.should_training_stop = True

    return Clock


def _record(owner: Any, method: str) -> list[Any]:
    """Wrap `method`; return the list to which its results are appended."""
    call, results = getattr(owner, method), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        results.append(call(*args, **kwargs))
        return results[-1]

    setattr(owner, method, recorded)
    return results


def _rollouts(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the rollouts of TRL and the advantages it computed."""
    rows = zip(
        *(batch[f"{part}_{kind}"] for part in ("prompt", "completion") for kind in ("ids", "mask")),
        strict=True,
    )
    pairs = [
        (prompt[prompt_mask.bool()].tolist(), completion[completion_mask.bool()].tolist())
        for prompt, prompt_mask, completion, completion_mask in rows
    ]
    return {"pairs": pairs, "advantages": batch["advantages"].tolist()}


def time_method(
    steps: list[dict[str, float]], owner: Any, method: str, name: str, no_grad_only: bool = False
) -> None:
    """Wrap `method`; add its time to the current step under `name`."""
    import torch

    call: Callable = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        if not (no_grad_only and torch.is_grad_enabled()):
            steps[-1][name] += time.perf_counter() - start
        return result

    setattr(owner, method, timed)


if __name__ == "__main__":
    main()
