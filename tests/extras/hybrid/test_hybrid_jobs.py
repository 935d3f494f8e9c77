"""GRPO of hybrid models with vLLM, whose log-probs are the trainer's after every sync."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.extras.hybrid.hybrid_models import hybrid_models
from tests.extras.remote.overlapped import run_overlapped
from tests.extras.remote.vllm_server import START_S, serving
from tests.ranks import run_ranks
from tests.sync.quantized_kernel import register_kernel
from tests.train.in_process import lines_of, run_with_vllm, small_job

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


@pytest.mark.exhaustive  # test_hybrid_exact.py has a job, test_hybrid_vllm.py this engine
@pytest.mark.parametrize("tp_size", [1, 2])
def test_steps_on_the_ranks_of_the_engine(tmp_path: Path, tp_size: int) -> None:
    job = hybrid_job(tmp_path, "qwen3_next", tensor_model_parallel_size=tp_size)
    job += [f"trainer.n_gpus_per_node={tp_size}"]
    run_ranks(run_with_vllm, tp_size, tmp_path, job, timeout_s=500)
    found = differences(lines_of(tmp_path / "run" / "metrics.jsonl"))
    assert len(found) == 3 and max(found) < 0.01  # bfloat16 on both sides


FP8 = {"quantization": "fp8", "enforce_eager": "true"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rounding"), [({}, 1e-3), (FP8, 8e-3)], ids=["bfloat16", "fp8"]
)
def test_an_engine_on_another_rank(tmp_path: Path, settings, rounding: float) -> None:
    """In bfloat16 weights that are a step old would differ by 2e-3 and more."""
    job = hybrid_job(tmp_path, "qwen3_5_text", n_gpus_per_node=1, **settings)
    job += ["trainer.mode=async", "trainer.staleness=0"]
    if settings:
        job[job.index("reshard.delta=on")] = "reshard.delta=auto"
    [run] = run_overlapped(tmp_path, [job], 2, before=register_kernel if settings else None)
    assert not run.refused
    found = differences(run.rows)
    assert len(found) == 3 and max(found) < rounding


@pytest.mark.exhaustive
@pytest.mark.timeout(START_S + 300)
def test_a_server(tmp_path: Path) -> None:
    """Its states are float32, as the option says; the convolutions packed in its own process."""
    options = dict(dtype="bfloat16", mamba_ssm_cache_dtype="float32", kv_cache_memory_bytes=1 << 26)
    job = hybrid_job(tmp_path, "qwen3_next")
    with serving(str(tmp_path / "hybrid"), 1, tmp_path, **options) as server:
        job += [f"rollout.servers=[{server.url}]", "rollout.max_num_seqs=8"]
        job += ["rollout.name=auto", "rollout.dtype=auto"]
        pairs = dict(override.split("=", 1) for override in job)
        [run] = run_overlapped(tmp_path, [[f"{k}={v}" for k, v in pairs.items()]], 2)
    assert not run.refused
    found = differences(run.rows)
    assert len(found) == 3 and max(found) < 0.01
