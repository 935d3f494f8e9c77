"""Types that vLLM serves by the model of transformers, whose class it changes in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.loading import load_sharded
from tests.model.rotary_configs import LONG_ROPE, tiny
from tests.ranks import run_ranks
from tests.sync.vllm_engines import PROMPTS, build, unequal
from tests.tensors import part, whole
from tests.tiny_models import SIZES, save_tiny
from tests.train.in_process import run_jobs, small_job

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

VLLM = ("rollout.name=vllm", "rollout.kv_cache_gib=0.01", "rollout.enforce_eager=true")
_PLAIN = (
    *("arcee", "cwm", "glm", "hunyuan_v1_dense", "jais2", "olmo", "olmo2", "olmo3"),
    *("seed_oss", "smollm3", "starcoder2", "vaultgemma"),
)
_EQUAL_HEADS = dict(num_key_value_heads=4)
_MOE = dict(num_experts=4, num_experts_per_tok=2)
KINDS: dict[str, dict[str, Any]] = {kind: {} for kind in _PLAIN} | {
    "flex_olmo": _MOE,
    "gpt_neox": _EQUAL_HEADS,
    "hunyuan_v1_moe": _MOE | {"moe_topk": 2},
    "mellum": _MOE | {"moe_intermediate_size": 64},
    "phi": _EQUAL_HEADS,
}


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(kind, **SIZES | KINDS[kind])


def members() -> dict[type, dict[str, Any]]:
    """Return what every class of transformers' models consists of."""
    found: dict[type, dict[str, Any]] = {}
    classes = [torch.nn.Module]
    while classes:
        for cls in classes.pop().__subclasses__():
            if cls not in found and cls.__module__.startswith("transformers.models."):
                found[cls] = {"__bases__": cls.__bases__, **vars(cls)}
            classes.append(cls)
    return found


def engine_between_policies(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """One policy is loaded before the engine, one after it; both train, the later one is synced."""
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import (
        pack_rollouts,
        packed_log_probs,
        parameter_shards,
        sharding_mesh,
    )

    options = {"param_dtype": torch.float32, "max_model_len": 64}  # the engine's
    mesh = sharding_mesh("cpu", 1)
    earlier = load_sharded(path, mesh=mesh, **options)
    before = members()
    engine, later, resharder = build(path, 1, torch.float32, 1 << 20, **options)
    after = members()
    changed = [
        f"{cls.__name__}.{name}"
        for cls, parts in before.items()
        for name in parts.keys() | after[cls].keys()
        if parts.get(name) is not after[cls].get(name)
        and not name.endswith("_cached_value")  # transformers' own notes about its source
    ]
    gaps = []
    for version in (1, 2):
        with torch.no_grad():
            for parameter in later.parameters():
                parameter.mul_(0.9).add_(0.01)
        resharder.sync(version)
        responses = engine.generate(PROMPTS, SamplingSpec(max_tokens=6), seed=version)
        responses = [r[0] for r in responses]
        batch = pack_rollouts(list(zip(PROMPTS, [r.token_ids for r in responses], strict=True)))
        later.zero_grad()
        log_probs, _ = packed_log_probs(later, batch)
        log_probs.sum().backward()
        theirs = torch.tensor([p for r in responses for p in r.log_probs])
        gaps.append((log_probs - theirs).abs().max().item())
    own, _ = packed_log_probs(earlier, batch)
    own.sum().backward()
    weights = {n: whole(p) for n, p in parameter_shards(later).items()}
    return {
        "changed": changed,
        "gaps": gaps,
        "unequal": unequal(
            engine.target.weights(), lambda: engine.target.load_full(weights.items())
        ),
        "without_gradient": [
            name
            for model in (earlier, later)
            for name, p in model.named_parameters()
            if p.grad is None or not part(p.grad).any()
        ],
    }


def check(result: dict[str, Any]) -> None:
    assert result["changed"] == [] and result["unequal"] == []
    assert max(result["gaps"]) < 1e-4, "float32 on both sides, in operators of their own"


def test_an_engine_between_two_policies(tmp_path: Path) -> None:
    """With LongRoPE, whose long factors both have for sequences below the original length, too."""
    path = save_tiny(tiny("smollm3", LONG_ROPE), tmp_path)
    (result,) = run_ranks(engine_between_policies, 1, path, timeout_s=400)
    check(result)
    assert result["without_gradient"] == []


@pytest.mark.parametrize("kind", ["olmo3", pytest.param("smollm3", marks=pytest.mark.exhaustive)])
def test_a_job(tmp_path: Path, kind: str) -> None:
    """Two steps: what the second generates is of the weights that the first has trained."""
    base = small_job(tmp_path)
    path = save_tiny(config_of(kind), tmp_path / kind)
    job = [*base, f"model.path={path}", *VLLM, "trainer.total_training_steps=2"]
    (result,) = run_jobs(tmp_path, [job])
    assert result.refused == ""
    for row in result.rows:
        assert row["actor/grad_norm"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-6, "float32 on both sides"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_type(tmp_path: Path, kind: str) -> None:
    path = save_tiny(config_of(kind), tmp_path)
    (result,) = run_ranks(engine_between_policies, 1, path, timeout_s=400)
    check(result)
