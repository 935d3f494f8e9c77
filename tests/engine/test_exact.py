"""rollout.exact: the log-probs of a vLLM engine and of the trained model are the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.run.config import load_config
from hybridengine.run.errors import ModelError
from hybridengine.train.choices import Machine, decide
from tests.architectures.catalogue import CATALOGUE
from tests.engine.exact_engines import compare_under_pressure, open_model
from tests.engine.exact_types import OTHERS, save_other
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it"),
]
# llama's operators are qwen2's without biases; qwen3 is compared in bfloat16, too.
KINDS = (
    "qwen2",
    "gemma",
    "mistral",
    *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("llama", "qwen3")),
)


def compare(rank: int, world_size: int, folder: Path, kind: str, dtype: str) -> None:
    from hybridengine.model import pack_rollouts, packed_log_probs

    # A cache of 20 blocks of 16 tokens: prefixes are shared, prompts come in chunks of at most 32
    # tokens beside decoding sequences, and running sequences are preempted.
    model, pairs, theirs, under_pressure = compare_under_pressure(
        save_tiny(kind, folder / kind), dtype, shared=40,
        kv_cache_memory_bytes=KV_BYTES[dtype], max_num_batched_tokens=32,
    )  # fmt: skip
    # The sliding window of mistral frees blocks: none is short, and no beginning is kept.
    assert kind == "mistral" or under_pressure
    order = 0
    for prompt, response in pairs[:6]:  # each by itself, recomputed
        with torch.no_grad():
            ours, _ = packed_log_probs(model, pack_rollouts([(prompt, response)]), 0.8)
        assert torch.equal(ours, theirs[order : order + len(response)])
        order += len(response)


# 20 blocks of 16 tokens: 2 layers, keys and values of 2 heads of 32.
KV_BYTES = {"float32": 20 * 16 * 2 * 2 * 2 * 32 * 4, "bfloat16": 20 * 16 * 2 * 2 * 2 * 32 * 2}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_the_same_bits(tmp_path: Path, kind: str) -> None:
    run_ranks(compare, 1, tmp_path, kind, "float32", timeout_s=200)


def test_log_probs_in_bfloat16(tmp_path: Path) -> None:
    run_ranks(compare, 1, tmp_path, "qwen3", "bfloat16", timeout_s=200)


def compare_truncated(rank: int, world_size: int, path: str, dtype: str) -> None:
    """The last two keep nearly all entries, and all: the trainer has no dense form of its own."""
    compare_under_pressure(
        path, dtype, shared=40, kv_cache_memory_bytes=KV_BYTES[dtype], max_num_batched_tokens=48,
        truncations=(
            {"top_p": 0.6},
            {"top_k": 5},
            {"min_p": 0.3},
            {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
            {"top_p": 0.99},
            {"min_p": 1e-30},
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2", "float32"),
        pytest.param("qwen2", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("gemma2", "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_log_probs_over_kept_entries(tmp_path: Path, kind: str, dtype: str) -> None:
    path = save_other(kind, tmp_path)[1] if kind in OTHERS else save_tiny(kind, tmp_path)
    run_ranks(compare_truncated, 1, path, dtype, timeout_s=200)


def compare_other(rank: int, world_size: int, folder: str, dtype: str, heads: int) -> None:
    size = KV_BYTES[dtype] * heads // 2
    compare_under_pressure(
        folder, dtype, shared=40, kv_cache_memory_bytes=size, max_num_batched_tokens=48
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("olmo3", "bfloat16"),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.exhaustive)
            for kind in OTHERS
            for dtype in ("float32", "bfloat16")
            if (kind, dtype) != ("olmo3", "bfloat16")
        ),
    ],
)
def test_log_probs_of_other_types(tmp_path: Path, kind: str, dtype: str) -> None:
    config, folder = save_other(kind, tmp_path)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    run_ranks(compare_other, 1, folder, dtype, heads, timeout_s=200)


def test_they_are_exact_by_default(tmp_path: Path) -> None:
    for kind in OTHERS:
        config, path = save_other(kind, tmp_path / kind)
        job = load_config(None, [f"model.path={path}", "data.train_files=rows.jsonl"])
        choices = decide(job, config, Machine(0, fast_bfloat16=False, has_vllm=True))
        assert choices.exact, choices.reasons["exact"]


def test_a_scale_of_logits_that_rounds_is_refused(tmp_path: Path) -> None:
    _, path = save_other("granite", tmp_path, logits_scaling=10.0)
    with pytest.raises(ModelError, match="scales its logits by no power of two"):
        open_model(path, "float32")


def test_a_model_with_other_operators_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"layers.0.mlp.act_fn .*has parameters of its own"):
        open_model(save_tiny(CATALOGUE["apertus"].config(), tmp_path), "float32")
