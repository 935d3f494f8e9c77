"""GRPO of hybrid models with vLLM, whose log-probs are the trainer's after every sync."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.extras.hybrid.hybrid_models import hybrid_models
from tests.extras.moe.test_router_replay_jobs import run_with_vllm
from tests.ranks import run_ranks
from tests.train.in_process import lines_of, small_job

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

SIZES = dict(linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=512)


def hybrid_job(folder: Path, kind: str, **settings: Any) -> list[str]:
    """Three steps on policy; settings: of the group rollout."""
    base = small_job(folder)
    shutil.copytree(folder / "model", folder / "hybrid")  # for its tokenizer
    hybrid_models(kind, **SIZES)[1].save_pretrained(folder / "hybrid")
    keys = {
        "model.path": folder / "hybrid",
        "trainer.total_training_steps": 3,
        "actor.ppo_max_token_len_per_gpu": 128,
        "reshard.delta": "on",
        "actor.optim.lr": 1e-3,
    }
    rollout = {"name": "vllm", "dtype": "bfloat16", "kv_cache_gib": 0.05, "max_num_seqs": 16}
    keys |= {f"rollout.{key}": value for key, value in (rollout | settings).items()}
    given = dict(override.split("=", 1) for override in base)
    return [f"{key}={value}" for key, value in (given | keys).items()]


def differences(rows: list[dict[str, float]]) -> list[float]:
    return [row["training/rollout_probs_diff_mean"] for row in rows if "actor/pg_loss" in row]


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_steps_on_the_ranks_of_the_engine(tmp_path: Path, tp_size: int) -> None:
    job = hybrid_job(tmp_path, "qwen3_next", tensor_model_parallel_size=tp_size)
    job += [f"trainer.n_gpus_per_node={tp_size}"]
    run_ranks(run_with_vllm, tp_size, tmp_path, job, timeout_s=500)
    found = differences(lines_of(tmp_path / "run" / "metrics.jsonl"))
    assert len(found) == 3 and max(found) < 0.01  # bfloat16 on both sides
