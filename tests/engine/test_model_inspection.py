"""An engine looks at a model that vLLM does not know yet without starting a process for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.sync.vllm_engines import build_engine
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")


def body(rank: int, world_size: int, path: str) -> str:
    from vllm.model_executor.models import registry

    registry._SUBPROCESS_COMMAND = ["false"]
    engine, _ = build_engine(path, 1, torch.float32)
    return type(engine.model_runner.get_model()).__name__


def test_an_unknown_model_is_imported_here(tmp_path: Path) -> None:
    """vLLM keeps what it has found in its cache, which is empty."""
    cache = tmp_path / "cache"
    path = save_tiny("qwen2", tmp_path / "model")
    assert run_ranks(body, 1, path, env={"VLLM_CACHE_ROOT": str(cache)}) == ["Qwen2ForCausalLM"]
    assert [*(cache / "modelinfos").glob("*Qwen2ForCausalLM.json")]
