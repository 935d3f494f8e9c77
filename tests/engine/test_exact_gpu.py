"""rollout.exact with the Triton operators: on a GPU, and in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridengine.engine.vllm.environment import vllm_available
from tests.engine.exact_bits import KINDS, LARGE, compare, save_model
from tests.kernels.interpreter import run_interpreted
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not vllm_available(), reason="the rollout engine; `make setup` installs it"
)


def check(result: dict[str, Any]) -> None:
    assert result["tokens"] and result["cached"], result
    assert not any(result["differing"].values()), result


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "runner"),
    [
        *((kind, "bfloat16", "second") for kind in KINDS),
        ("llama", "float32", "second"),
        ("llama", "bfloat16", "first"),
    ],
)
def test_log_probs_on_the_gpu(tmp_path: Path, kind: str, dtype: str, runner: str) -> None:
    """With each of vLLM's model runners, of which the second one is its default."""
    path = save_model(kind, tmp_path / kind, LARGE)
    env = {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "second"))}
    [result] = run_ranks(
        compare, 1, path, dtype, "cuda", LARGE, device="cuda", env=env, timeout_s=110
    )
    check(result)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_log_probs_in_the_interpreter(kind: str) -> None:
    run_interpreted("../rollout/interpreted_rollouts.py", "-k", kind)
