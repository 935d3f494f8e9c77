"""Rotary embeddings by the longest sequence: the trained model's are those of the engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.rotary_configs import DYNAMIC, LIMIT, LONG_ROPE, MSCALE, ORIGINAL, tiny
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.in_process import run_jobs, small_job

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def differences(rank: int, world_size: int) -> dict[tuple[str, int], float]:
    """Rotate by the embeddings of both; return the largest difference of a type and length."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as long_rope

    from hybridengine.model.rotary import fix_rotary_length

    cases = {"phi3": LONG_ROPE, "llama": DYNAMIC, "phimoe": LONG_ROPE | MSCALE}
    found = {}
    for kind, rope in cases.items():
        for length in (ORIGINAL, ORIGINAL + 1, LIMIT):
            model: Any = AutoModelForCausalLM.from_config(tiny(kind, rope))
            fix_rotary_length(model, length)
            run = SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))
            with (
                set_current_vllm_config(VllmConfig()),
                patch.object(long_rope, "get_current_vllm_config", lambda run=run: run),
                patch.object(rotary_embedding, "_ROPE_DICT", {}),
            ):
                theirs = rotary_embedding.get_rope(32, LIMIT, True, rope, torch.float32)
            positions, query = torch.arange(length), torch.randn(length, 32)
            rotate = getattr(theirs, "forward_native", theirs)
            expected, _ = rotate(positions, query.clone(), query.clone())
            cos, sin = model.model.rotary_emb(torch.zeros(1), positions[None])
            first, second = query.chunk(2, -1)
            ours = query * cos[0] + torch.cat([-second, first], -1) * sin[0]
            found[kind, length] = (ours - expected).abs().max().item()
    return found


def rotated_heads(rank: int, world_size: int) -> list[float]:
    """Differences between all heads in one dimension, and by vLLM's operator for CPUs, in two."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from hybridengine.engine.vllm.post_load import writable_weights

    with set_current_vllm_config(VllmConfig()), writable_weights():
        layer = RotaryEmbedding(32, 32, 64, 1e4, True, torch.float32)
        rotate = layer.forward_cpu
    positions, query, key = torch.arange(9), torch.randn(9, 4, 32), torch.randn(9, 2, 32)
    expected = layer.forward_native(positions, query.flatten(1), key.flatten(1))
    ours = rotate(positions, query.clone(), key.clone())
    alone, none = rotate(positions, query.clone().flatten(1))
    assert none is None and [x.shape for x in ours] == [query.shape, key.shape]
    pairs = zip([*ours, alone], [*expected, expected[0]], strict=True)
    return [(x.flatten(1) - y).abs().max().item() for x, y in pairs]


def test_heads_of_a_dimension_of_their_own_are_all_rotated() -> None:
    assert max(run_ranks(rotated_heads, 1)[0]) < 1e-6  # of vLLM's own: above 1


def test_the_angles_are_those_of_vllm() -> None:
    (found,) = run_ranks(differences, 1)
    for (kind, length), difference in found.items():
        if kind == "phimoe" and length > ORIGINAL:
            assert difference > 0.1, "transformers has corrected phimoe: drop `check_rotary`"
        else:
            assert difference < 1e-4, (kind, length, "angles in float32")


@pytest.mark.parametrize(
    ("engine", "length"),
    [
        ("vllm", 40),
        ("hf", 40),
        pytest.param("vllm", ORIGINAL - 6, marks=pytest.mark.exhaustive),
        pytest.param("hf", ORIGINAL - 6, marks=pytest.mark.exhaustive),
    ],
)
def test_a_job_across_the_original_length(tmp_path: Path, engine: str, length: int) -> None:
    """Sequences beyond the original length and below it, several in a micro-batch."""
    path = save_tiny(tiny("phi3", LONG_ROPE), tmp_path / "phi3")
    job = [*small_job(tmp_path), f"model.path={path}", f"data.max_response_length={length}"]
    job += [f"rollout.name={engine}", "rollout.kv_cache_gib=0.01", "rollout.enforce_eager=true"]
    job += ["trainer.total_training_steps=2", "actor.ppo_max_token_len_per_gpu=256"]
    (result,) = run_jobs(tmp_path, [job])
    assert result.refused == "" and len(result.rows) == 2
    for row in result.rows:
        assert row["actor/grad_norm"] > 0 and row["response_length/max"] == length
        assert row["training/rollout_probs_diff_max"] < 1e-6, "float32 on both sides"
