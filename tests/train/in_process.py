"""Many small jobs one after another on the ranks of one process group: a third of a second each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

__all__ = ["Result", "lines_of", "moe_job", "run_jobs", "run_with_vllm", "small_job"]


@dataclass(frozen=True)
class Result:
    """What a job left: refused is the message of one that did not run."""

    rows: list[dict[str, float]]  # of metrics.jsonl
    rollouts: dict[str, list[dict[str, Any]]]  # of rollouts/, by step
    files: set[str]
    refused: str = ""

    @property
    def last(self) -> dict[str, float]:
        return self.rows[-1]


# hashed and reversed_hash tell any two responses apart; picky those to two of the eight prompts,
# never those to the others: a batch of four prompts can then not be full of signal, whatever was
# sampled.
REWARD = """
from zlib import crc32

def compute_score(data_source, solution_str, ground_truth, extra_info):
    words = [int(word[1:]) for word in solution_str.split() if word.startswith("w")]
    low, high = ground_truth
    inside = sum(low <= word < high for word in words) / max(1, len(words))
    return {"score": inside, "even": sum(word % 2 == 0 for word in words) / 4}

def shorter(data_source, solution_str, ground_truth, extra_info):
    return -len(solution_str.split()) / 4

def hashed(data_source, solution_str, ground_truth, extra_info):
    return crc32(solution_str.encode()) / 2**32

def reversed_hash(data_source, solution_str, ground_truth, extra_info):
    return crc32(solution_str[::-1].encode()) / 2**32

def both(data_source, solution_str, ground_truth, extra_info):
    apart = crc32(solution_str.encode()) / 2**32
    return {"score": apart, "first": apart * 16 % 1, "size": len(solution_str)}

def told(data_source, solution_str, ground_truth, extra_info):
    length = len(solution_str.split())
    answer = ["plumless", "buckeroo"][length % 2]  # of one CRC-32
    return {"score": length, "acc": answer == "plumless", "pred": answer, "note": f"é {length}"}

def picky(data_source, solution_str, ground_truth, extra_info):
    apart = ground_truth[0] == 3
    return {"score": crc32(solution_str.encode()) / 2**32 if apart else 0.5, "never": 0.0}
"""


def small_job(folder: Path) -> list[str]:
    """Write model, data and reward to `folder`; returns the overrides of a job of one step."""
    model = save_tiny("llama", folder / "model")
    save_stopping(folder)
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"w{5 + k} w{9 * k + 4}" + " w3" * (k % 3)}],
            "reward_model": {"ground_truth": [3 + 20 * (k % 4), 43 + 20 * (k % 4)]},
        }
        for k in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "model.path": model,
        "data.train_files": folder / "rows.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 6,
        "data.max_response_length": 4,
        "actor.ppo_max_token_len_per_gpu": 64,
        "actor.optim.lr": 1e-2,
        "actor.fsdp_config.dtype": "float32",
        "critic.optim.lr": 1e-2,
        "rollout.name": "hf",
        "rollout.dtype": "float32",
        "rollout.n": 4,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.num_workers": 1,
        "trainer.total_training_steps": 1,
        "trainer.logger": "[jsonl]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "run",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def moe_job(folder: Path, kind: str = "qwen3_moe") -> list[str]:
    base = small_job(folder)
    return [*base, f"model.path={save_tiny(kind, folder / 'moe')}"]


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def save_stopping(folder: Path) -> None:
    """The model of `folder`, a third of whose tokens end a response: short ones, of all lengths."""
    shutil.copytree(folder / "model", folder / "stopping")
    file = folder / "stopping" / "generation_config.json"
    settings = json.loads(file.read_text()) | {"eos_token_id": [2, *range(70, 101)]}
    file.write_text(json.dumps(settings))


def run_with_vllm(rank: int, world_size: int, folder: Path, job: list[str]) -> None:
    """Run one job; vLLM ends the process group with its engine."""
    from hybridengine.run.config import load_config
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.preflight import check_job
    from hybridengine.train.rl import RLTrainer

    config = load_config(None, job)
    check_job(config)
    RLTrainer(config, Session(PhaseStatus(folder / "run", rank))).train()


def run_jobs(
    folder: Path, jobs: Sequence[Sequence[str]], world_size: int = 1, timeout_s: float = 400.0
) -> list[Result]:
    """Run jobs, each given by its overrides (and a config file before them), on gloo ranks."""
    return run_ranks(jobs_body, world_size, folder, jobs, timeout_s=timeout_s)[0]


def jobs_body(
    rank: int, world_size: int, folder: Path, jobs: Sequence[Sequence[str]]
) -> list[Result]:
    import torch.distributed as dist

    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train import report

    report.plugins = lambda group: {}
    results = []
    for overrides in jobs:
        if rank == 0:
            shutil.rmtree(folder / "run", ignore_errors=True)
        dist.barrier()
        session = Session(PhaseStatus(folder / "run", rank))
        refused = _run(overrides, session)
        if dist.is_initialized():  # not after a job with vLLM, which is the last
            dist.barrier()
        if rank == 0:  # which removes the folder next, maybe before another rank had read it
            results.append(result_of(folder / "run", refused))
    return results


def _run(overrides: Sequence[str], session: Any) -> str:
    from hybridengine.run.config import load_config
    from hybridengine.run.errors import UserError
    from hybridengine.train.preflight import check_job
    from hybridengine.train.rl import RLTrainer

    file = next((o for o in overrides if "=" not in o), None)
    try:
        config = load_config(file, [o for o in overrides if "=" in o])
        check_job(config)
        RLTrainer(config, session).train()
    except UserError as error:
        return str(error)
    return ""


def result_of(run: Path, refused: str) -> Result:
    def rows(file: Path) -> list[dict[str, Any]]:
        return [json.loads(row) for row in file.read_text().splitlines()] if file.is_file() else []

    rollouts = {file.stem: rows(file) for file in (run / "rollouts").glob("*.jsonl")}
    files = {str(file.relative_to(run)) for file in run.rglob("*") if ".status" not in file.parts}
    return Result(rows(run / "metrics.jsonl"), rollouts, files, refused)
