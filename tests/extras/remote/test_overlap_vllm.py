"""An engine of vLLM over two engine ranks, which take the same actions, beside one trainer rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras.remote.overlapped import run_overlapped
from tests.sync.quantized_kernel import register_kernel
from tests.train.in_process import small_job

pytest.importorskip("vllm")
pytestmark = pytest.mark.multirank


FP8 = {"rollout.quantization": "fp8", "rollout.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("weights", "rounding"),
    [({}, 1e-3), pytest.param(FP8, 8e-3, marks=pytest.mark.exhaustive)],
    ids=["float32", "fp8"],
)
def test_a_tensor_parallel_engine_beside_a_trainer_rank(
    tmp_path: Path, weights, rounding: float
) -> None:
    settings = weights | {
        "rollout.name": "vllm",
        "rollout.enforce_eager": "true",
        "rollout.kv_cache_gib": 0.05,
        "rollout.max_num_seqs": 16,
        "rollout.n_gpus_per_node": 2,
        "rollout.tensor_model_parallel_size": 2,
        "trainer.mode": "one_step_off",
        "trainer.total_training_steps": 3,
    }
    job = [*small_job(tmp_path), *(f"{key}={value}" for key, value in settings.items())]
    pairs = dict(o.split("=", 1) for o in job)
    job = [f"{k}={v}" for k, v in pairs.items()]
    before = register_kernel if weights else None
    [run] = run_overlapped(tmp_path, [job], num_ranks=3, before=before)
    assert not run.refused
    versions = [{r["weight_version"] for r in run.rollouts[f"step_{k}"]} for k in (1, 2, 3)]
    assert versions == [{0}, {0}, {1}]
    # Engine and trainer have the same weights in the first step; then the engine's are older.
    diffs = [row["training/rollout_probs_diff_mean"] for row in run.rows if "actor/pg_loss" in row]
    assert diffs[0] < rounding < min(diffs[1:])
