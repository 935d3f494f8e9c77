"""An exact engine and its trained model are equal at every point; the smallest fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.exact_engines import open_engine, open_model
from tests.engine.exact_types import save_other
from tests.extras.lab.parity.engines import PROMPTS, attribute
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

NORM = "model.layers.1.input_layernorm"


def reports(rank: int, world_size: int, path: str) -> dict[str, Any]:
    from hybridengine.lab.parity import attach
    from hybridengine.lab.parity.points import engine_model

    llm = open_engine(path, "float32", kv_cache_memory_bytes=64 << 20)
    parity, engine = attach(open_model(path, "float32"), llm), engine_model(llm)

    head = engine.logits_processor.forward

    def other_rounding(*args: Any) -> Any:
        return head(*args) * (1 + 2**-22)

    norm = engine.get_submodule(NORM)
    epsilon = norm.variance_epsilon * 1.5
    how = {"max_tokens": 6, "temperature": 0.8}
    results = {
        "all": parity.compare(PROMPTS, **how),
        "kept": parity.compare(PROMPTS, top_p=0.6, **how),
        "likeliest": parity.compare(PROMPTS, top_k=5, min_p=0.01, **how),
    }
    llm.reset_prefix_cache()
    with attribute(norm, "variance_epsilon", epsilon):
        results["norm"] = parity.compare(PROMPTS, **how)
    llm.reset_prefix_cache()
    with attribute(engine.logits_processor, "forward", other_rounding):
        results["head"] = parity.compare(PROMPTS, **how)
    return results


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_points_are_equal_bit_for_bit(tmp_path: Path, kind: str) -> None:
    path = save_tiny(kind, tmp_path / "model")
    found = run_ranks(reports, 1, path, timeout_s=200)[0]
    for name in ("all", "kept", "likeliest"):
        report = found[name]
        assert len(report.differences) >= 29 and not any(report.differences.values()), report
        assert report.finding is None and report.num_tokens == 12
        assert (report.log_prob_difference, report.kl, report.largest_ratio) == (0.0, 0.0, 1.0)
        assert report.correction == "none is needed: every operator is equal bit for bit"
    for name, point in {"norm": NORM, "head": "lm_head"}.items():
        finding = found[name].finding
        assert finding is not None and finding.point == point, found[name]
        assert 0 < finding.difference < 1e-5  # less than what rounding explains elsewhere


def of_transformers(rank: int, world_size: int, path: str, name: str) -> tuple[Any, Any]:
    """Compare a model that vLLM runs by transformers' code; then with another norm `name`."""
    from hybridengine.lab.parity import attach
    from hybridengine.lab.parity.points import engine_model

    llm = open_engine(path, "float32", kv_cache_memory_bytes=64 << 20)
    parity, engine = attach(open_model(path, "float32"), llm), engine_model(llm)
    # As many tokens as heads: what a norm of heads has first shows in later steps.
    prompts = [*PROMPTS, [5, 6, 7, 8]]
    report = parity.compare(prompts, max_tokens=6, top_k=20)
    llm.reset_prefix_cache()
    with torch.no_grad():
        engine.get_submodule(name).weight *= 1.001
    return report, parity.compare(prompts, max_tokens=6, top_k=20).finding


@pytest.mark.parametrize(
    ("kind", "name", "point", "least"),
    [
        ("phi", "input_layernorm", "model.layers.1.input_layernorm", 25),
        pytest.param(
            *("gpt_neox", "input_layernorm", "gpt_neox.layers.1.input_layernorm", 23),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("olmo2", "self_attn.q_norm", "model.layers.1.self_attn.q_norm", 28),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_model_of_transformers_in_vllm(
    tmp_path: Path, kind: str, name: str, point: str, least: int
) -> None:
    path = save_other(kind, tmp_path)[1]
    name = f"model.layers.1.{name}"
    [(report, finding)] = run_ranks(of_transformers, 1, path, name, timeout_s=200)
    assert report.finding is None, report
    assert len(report.differences) >= least and not any(report.differences.values()), report
    assert finding is not None and finding.point == point, finding
