"""GRPO by us and by TRL on the same job: scores, KL and time of every step.

`python -m benchmarks._learning JOB.json` runs ours, `benchmarks.end_to_end.trl_trainer` TRL's. Both
take the same prompts in the same order in float32, with vLLM in the same process; their random
numbers differ. The KL term is k3's estimate against the initial weights, averaged over tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._bench import OURS
from benchmarks.end_to_end import run_program

PROGRAMS = {OURS: __name__, "trl": "benchmarks.end_to_end.trl_trainer"}


def train(impl: str, folder: Path, job: dict[str, Any], threads: int = 0) -> dict[str, list[float]]:
    """Run `job` and return `scores`, `kl` and `seconds` (since the first began), one a step.

    job, besides what `end_to_end.data.job_of` has:
        model: folder of the model.
        steps: the most steps.
        seconds: the step that is running then is the last one.
        kl_coef: coefficient of the KL term; 0 for none.
        seed, warmup_steps, beta2, chat_template: as in a config.
    """
    result = run_program(PROGRAMS[impl], folder, job | {"bf16": False}, threads)
    if "phases" in result:  # TRL's
        ends, now = [], 0.0
        for phases in result["phases"]:
            now += phases["step"]
            ends.append(now)
        result["seconds"] = ends
    return {key: result[key] for key in ("scores", "kl", "seconds")}


def settings_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return `job` as settings of ours."""
    settings: dict[str, Any] = {
        "model.path": job["model"],
        "data.train_files": job["train"],
        "data.train_batch_size": job["responses"] // job["n"],
        "data.max_prompt_length": job["max_model_len"] - job["max_response_length"],
        "data.max_response_length": job["max_response_length"],
        "data.shuffle": False,
        "actor.ppo_max_token_len_per_gpu": job["micro_batch"] * job["max_model_len"],
        "actor.fsdp_config.dtype": "float32",
        "actor.optim.lr": job["lr"],
        "actor.optim.lr_warmup_steps": job.get("warmup_steps", 0),
        "actor.optim.betas": [0.9, job.get("beta2", 0.999)],
        "actor.optim.weight_decay": 0.0,
        "rollout.n": job["n"],
        "rollout.enforce_eager": True,
        "rollout.kv_cache_gib": job["kv_cache_bytes"] / 2**30,
        "reward.custom_reward_function.path": job["reward"],
        "trainer.total_training_steps": job["steps"],
        "trainer.default_local_dir": job["out"] + "/run",
        "trainer.logger": ["jsonl"],
        "trainer.rollout_freq": -1,
        "seed": job.get("seed", 1),
    }
    if job.get("kl_coef"):
        settings |= {"actor.use_kl_loss": True, "actor.kl_loss_coef": job["kl_coef"]}
    if "chat_template" in job:
        settings["data.chat_template"] = job["chat_template"]
    return settings


def main() -> None:
    from hybridengine import Trainer

    job = json.loads(Path(sys.argv[1]).read_text())
    result: dict[str, list[float]] = {"scores": [], "kl": [], "seconds": []}
    with Trainer(None, overrides=settings_of(job)) as trainer:
        start = time.perf_counter()
        for step in trainer:
            metrics = step.update(step.collect())
            result["seconds"].append(time.perf_counter() - start)
            result["scores"].append(metrics["critic/score/mean"])
            if job.get("kl_coef"):
                result["kl"].append(metrics["actor/kl_loss"])
            if result["seconds"][-1] > job.get("seconds", float("inf")):
                break
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
