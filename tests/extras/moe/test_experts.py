"""Experts by grouped_linear equal transformers' eager form, with gradients, in any architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from hybridengine.moe import experts
from hybridengine.moe.experts import EXPERTS
from hybridengine.moe.router_replay import RouterReplay
from tests.extras.moe.moe_models import (
    ARCHITECTURES,
    NUM_EXPERTS,
    TOP_K,
    assert_close,
    assert_same_when_checkpointed,
    run,
    tiny_moe,
)
from tests.model.cases import load
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny

LENGTH = 24
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")  # the layouts that the interface has


def both(model: Any, ids: torch.Tensor) -> tuple[Any, Any]:
    """The results by the eager form and by ours, which must run."""
    found = []
    for name in ("eager", EXPERTS):
        model.set_experts_implementation(name)
        with mock.patch.object(experts, "grouped_linear", wraps=experts.grouped_linear) as product:
            found.append(run(model, ids))
        assert product.called == (name == EXPERTS)
    return found[0], found[1]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_equal_to_eager(kind: str) -> None:
    model = tiny_moe(kind, **ARCHITECTURES[kind])
    expected, got = both(model, torch.randint(3, 100, (1, LENGTH)))
    assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_eager_with_replayed_routes(kind: str) -> None:
    model, ids = tiny_moe(kind, **ARCHITECTURES[kind]), torch.randint(3, 100, (1, LENGTH))
    replay = RouterReplay(model)
    with replay.record(LENGTH) as recorded:
        model(input_ids=ids, use_cache=False)
    routes = torch.where(recorded.routes < 0, -1, (recorded.routes + 1) % NUM_EXPERTS)
    natural = run(model, ids)[0]
    with replay.replay(routes):
        expected, got = both(model, ids)
    assert_close(got, expected)
    assert not torch.allclose(got[0], natural, atol=1e-3)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    model = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"]).to(dtype)
    module = model.model.layers[0].mlp.experts
    hidden, index = torch.randn(50, 64).to(dtype), torch.rand(50, NUM_EXPERTS).topk(TOP_K).indices
    weights = torch.rand(50, TOP_K).to(dtype)
    full = experts.grouped_experts(module, hidden, index, weights)
    for part in (slice(0, 1), slice(7, 9), slice(20, 50)):
        got = experts.grouped_experts(module, hidden[part], index[part], weights[part])
        assert torch.equal(got, full[part])


def test_bfloat16_is_as_near_to_float64_as_eager() -> None:
    model = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    module = model.model.layers[0].mlp.experts
    hidden, index = torch.randn(40, 64), torch.rand(40, NUM_EXPERTS).topk(TOP_K).indices
    weights = torch.rand(40, TOP_K)
    inputs = [t.bfloat16().double() for t in (hidden, weights)]
    module.double()
    model.set_experts_implementation("eager")
    exact = module(inputs[0], index, inputs[1])
    module.bfloat16()
    errors = []
    for name in ("eager", EXPERTS):
        model.set_experts_implementation(name)
        got = module(inputs[0].bfloat16(), index, inputs[1].bfloat16())
        errors.append((got.double() - exact).square().mean().item())
    assert errors[1] <= 1.5 * errors[0]


def test_experts_that_are_distributed_over_ranks_run_by_transformers() -> None:
    model = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"])
    module = model.model.layers[0].mlp.experts
    module._is_expert_parallel = True
    hidden, index = torch.randn(5, 64), torch.rand(5, NUM_EXPERTS).topk(TOP_K).indices
    weights = torch.rand(5, TOP_K)
    index[0, 0], weights[0, 0] = NUM_EXPERTS, 0.0  # an expert of another rank
    expected = grouped_mm_experts_forward(module, hidden, index, weights)
    assert torch.equal(experts.grouped_experts(module, hidden, index, weights), expected)


def test_gradient_checkpointing_and_compiled_layers() -> None:
    model, ids = tiny_moe("qwen3_moe", **ARCHITECTURES["qwen3_moe"]), torch.randint(3, 100, (1, 24))
    model.set_experts_implementation(EXPERTS)
    expected = run(model, ids)
    assert_same_when_checkpointed(model, ids, expected)
    torch._dynamo.reset()
    module = model.model.layers[0].mlp.experts
    hidden, index = torch.randn(9, 64), torch.rand(9, NUM_EXPERTS).topk(TOP_K).indices
    arguments = (module, hidden.requires_grad_(), index, torch.rand(9, TOP_K))
    compiled = torch.compile(experts.grouped_experts, fullgraph=True, backend="aot_eager")
    results = [function(*arguments) for function in (compiled, experts.grouped_experts)]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(r.sum(), hidden)[0] for r in results))


def loaded_body(rank: int, world_size: int, path: str, out: str) -> tuple[str, bool, list[Any]]:
    """Implementation, whether ours ran, and (logits, gradient norms) of it and of eager."""
    model = load(path, world_size, enable_gradient_checkpointing=True)
    chosen = model.config._experts_implementation
    ids, results = torch.arange(3, 3 + LENGTH)[None], []
    with mock.patch.object(experts, "grouped_linear", wraps=experts.grouped_linear) as product:
        for name in (chosen, "eager"):
            model.set_experts_implementation(name)
            model.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits
            logits.logsumexp(-1).sum().backward()
            norms = [float(whole(p.grad).norm()) for p in model.parameters()]
            results.append((logits.detach(), torch.tensor(norms)))
    model.config.save_pretrained(out)
    return chosen, product.called, results


def test_the_trainer_chooses_them_on_a_cpu(tmp_path: Path) -> None:
    path, out = save_tiny("qwen3_moe", tmp_path), tmp_path / "config"
    for chosen, ran, (ours, eager) in run_ranks(loaded_body, 2, path, str(out)):
        assert chosen == EXPERTS and ran
        for got, expected in zip(ours, eager, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert EXPERTS not in (out / "config.json").read_text(), "the choice is not the model's"
