"""Jobs of fixed seeds whose results a change of structure must leave as they are, byte for byte.

python -m tools.fixed_jobs FOLDER [NAME]...      # run the jobs, all or those named
python -m tools.fixed_jobs --compare BEFORE AFTER

Compared are the metrics without times and the rollout files. A tiny model, CPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import save_tiny
from tests.train.toy import toy_job

HF: dict[str, object] = {"rollout.name": "hf"}
VLLM: dict[str, object] = {"rollout.name": "vllm", "rollout.kv_cache_gib": 0.01}
TIMES = ("timing_s/", "perf/", "reshard/ms")
JOBS: dict[str, dict[str, object]] = {
    "grpo": VLLM,
    "one_rank": VLLM | {"trainer.n_gpus_per_node": 1},
    "tensor_parallel": VLLM | {"rollout.tensor_model_parallel_size": 2, "rollout.exact": "on"},
    "hf": HF | {"actor.ppo_mini_batch_size": 8, "actor.ppo_epochs": 2},
    "ppo": HF
    | {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
    },
    "distillation": HF | {"algorithm.distill.teacher_path": "TEACHER"},
    "clip_cov": HF | {"actor.policy_loss.loss_mode": "clip_cov", "actor.entropy_coeff": 0.01},
    "sampling_replay": VLLM | {"rollout.top_k": 20, "rollout.top_p": 0.8},
    "bypass_mode": HF
    | {
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.rollout_correction.loss_type": "reinforce",
    },
    "shared_prefix": HF | {"actor.shared_prefix": "on", "actor.use_kl_loss": True},
    "lora": VLLM | {"model.lora_rank": 4, "actor.ppo_max_token_len_per_gpu": 128},
}


def run_job(name: str, folder: Path) -> None:
    """Run three steps of the job; its files are in `folder`/`name`."""
    place = folder / name
    place.mkdir(parents=True)
    settings = dict(JOBS[name])
    for key, value in settings.items():
        if value == "TEACHER":
            settings[key] = save_tiny("llama", place / "teacher")
    steps = {"trainer.total_training_steps": 3, "trainer.logger": "[jsonl]"}
    done = subprocess.run(
        toy_job(place, **settings, **steps), text=True, capture_output=True, timeout=600
    )
    if done.returncode:
        sys.exit(f"{name}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def results(place: Path) -> dict[str, object]:
    """Return what the job at `place` has measured, without times, and its rollout files."""
    rows = [json.loads(x) for x in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]
    files = sorted((place / "run" / "rollouts").glob("*.jsonl"))
    return {"metrics": metrics} | {file.name: file.read_text() for file in files}


def main() -> None:
    """Run the jobs, or compare two folders of them; exit with 1 where results differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    if not given.compare:
        for name in given.names or JOBS:
            run_job(name, given.folder)
            print(f"{name}: {len(results(given.folder / name))} results", flush=True)
        return
    [other] = map(Path, given.names)
    names = [name for name in JOBS if (other / name).exists()]
    unequal = [name for name in names if results(given.folder / name) != results(other / name)]
    print(f"{len(names) - len(unequal)} of {len(names)} jobs have equal results")
    if unequal or not names:
        sys.exit(f"unequal: {', '.join(unequal)}")


if __name__ == "__main__":
    main()
