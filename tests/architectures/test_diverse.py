"""A few architectures that differ most, of those that `make test-architectures` tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures.sweep import Outcome, sweep_body
from tests.architectures.table import is_exact, render
from tests.ranks import run_ranks

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

ROUTER_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
FALLBACK = {"mamba2": {f"backbone.layers.{i}.mixer.A_log" for i in range(5)}}
DIVERSE = ["qwen3_moe", "deepseek_v2", "glm4_moe", "gpt2", "phi", "mamba2", "qwen2_vl"]


def test_diverse_architectures_equal_vllms_own_loader(tmp_path: Path) -> None:
    """Fused experts, MLA, transposed Conv1D, a bias only the loader makes, computed A, vision.

    A router's bias in float32 (glm4_moe).
    """
    ranks = run_ranks(sweep_body, 2, 2, str(tmp_path), DIVERSE, timeout_s=400)
    for outcomes in zip(*ranks, strict=True):
        assert is_exact(outcomes), outcomes
        name = outcomes[0].architecture
        expected = {"phi": {"lm_head.bias"}} | FALLBACK
        for o in outcomes:
            assert set(o.fallback) == expected.get(name, set())
            assert o.received == o.lower_bound and o.delta
            assert name != "glm4_moe" or ROUTER_BIAS in o.unrounded


def test_the_table_shows_errors_and_unequal_tensors() -> None:
    right = Outcome("llama", "Llama", "", "", 15)
    slow = Outcome(
        "mamba", "Mamba", "", "", 9, fallback={"l.0.A_log": "l.0.A: exp", "l.1.A_log": "l.1.A: exp"}
    )
    wrong = Outcome("phi", "Phi", "", "", 9, unequal=["layers.3.bias"])
    error = "ValidationError: 1 validation error for ModelConfig\n  Value error, no | [type=x]"
    stopped = Outcome("bamba", "Bamba", "vLLM config", error)
    plain = Outcome("gpt2", "GPT2", "", "", 7)
    names = (right, slow, wrong, stopped, plain)
    results = {tp: {o.architecture: [o] for o in names} for tp in (1, 2)}
    results[2]["llama"] = [right, Outcome("llama", "Llama", "", "", 15, ["x.1.y"])]
    table = render(results)
    assert "\nExact at every TP size by the plan alone: gpt2 (7).\n" in table
    assert "| llama | Llama | exact (15) | **wrong** | TP 2: unequal: x.*.y |" in table
    assert "| exact + fallback (9) | exact + fallback (9) | `l.*.A_log`: exp |" in table
    assert "| phi | Phi | **wrong** | **wrong** | unequal: layers.*.bias |" in table
    assert "| bamba | Bamba | no | no | vLLM config: no \\|; on CPUs: vLLM, which has no" in table
    assert "Of 5 architectures 2 are exact at TP 1, 2" in table
