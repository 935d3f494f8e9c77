"""rollout.exact of Gated DeltaNet: the log-probs of engine and trained model are the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.exact_engines import compare_under_pressure
from tests.extras.hybrid.hybrid_models import hybrid_config, hybrid_models
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.exact_job import VLLM, train
from tests.train.in_process import lines_of, small_job

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

LAYERS = ["linear_attention", "linear_attention", "full_attention"]
# As in checkpoints: vLLM then passes three positions of each token. A head has 32 dimensions.
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
BLOCKS = 16  # of 16 KiB, which hold a state or the keys and values of a layer


def compare(rank: int, world_size: int, folder: str, dtype: str) -> None:
    # Prompts come in chunks of at most 48 tokens beside decoding sequences.
    *_, under_pressure = compare_under_pressure(
        folder, dtype, shared=70, kv_cache_memory_bytes=BLOCKS << 14, max_num_batched_tokens=48,
        mamba_ssm_cache_dtype="float32",
    )  # fmt: skip
    assert under_pressure


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LONG)])
def test_log_probs_are_the_same_bits(tmp_path: Path, dtype: str) -> None:
    changes = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "rope_parameters": ROPE}
    _, own = hybrid_models("qwen3_5_text", **changes)
    own.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    run_ranks(compare, 1, str(tmp_path), dtype, timeout_s=200)


@pytest.mark.parametrize(
    ("tp_size", "dtype", "prefix_caching", "lora_rank"),
    [
        (1, "bfloat16", False, 2),
        pytest.param(1, "float32", True, 0, marks=LONG),
        pytest.param(2, "float32", False, 2, marks=LONG),
        pytest.param(2, "bfloat16", True, 0, marks=LONG),
    ],
)
def test_jobs(
    tmp_path: Path, tp_size: int, dtype: str, prefix_caching: bool, lora_rank: int
) -> None:
    """Two steps with shared prompts and recomputed layers; with adapters as they are."""
    job = [
        *small_job(tmp_path),
        *VLLM,
        f"model.path={save_tiny(hybrid_config('qwen3_5_text'), tmp_path / 'hybrid')}",
        f"rollout.tensor_model_parallel_size={tp_size}",
        f"rollout.enable_prefix_caching={str(prefix_caching).lower()}",
        f"actor.fsdp_config.dtype={dtype}",
        f"trainer.n_gpus_per_node={tp_size}",
        "trainer.total_training_steps=2",
        "data.max_response_length=16",
        "actor.ppo_max_token_len_per_gpu=128",
        "model.enable_gradient_checkpointing=true",
        *([f"model.lora_rank={lora_rank}", "reshard.lora=adapters"] if lora_rank else []),
    ]
    for _, holds in run_ranks(train, tp_size, tmp_path, job, timeout_s=500):
        assert holds and all(holds)
    rows = [row for row in lines_of(tmp_path / "run" / "metrics.jsonl") if "actor/grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_probs_diff_max"] == 0.0
        assert row["rollout_corr/rollout_is_max"] == row["training/rollout_ratio_mean"] == 1.0
