"""Decoding steps of an exact engine are replayed with the bits of eager ones, where they may be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridengine.engine.vllm.environment import vllm_available
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.vllm_llm import open_llm

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it"),
]
KINDS = (
    "llama",
    "qwen2",
    "qwen3",
    pytest.param("gemma", marks=pytest.mark.exhaustive),
    pytest.param("mistral", marks=pytest.mark.exhaustive),
)
MAX_TOKENS = 12


def generate(llm: Any, count: int) -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probs; responses end one after the other."""
    from vllm import SamplingParams

    options = {"logprobs": 0, "ignore_eos": True, "detokenize": False}
    requests = [
        SamplingParams(seed=i, max_tokens=MAX_TOKENS - 2 * i, **options) for i in range(count)
    ]
    prompts = [{"prompt_token_ids": list(range(3 + i, 9 + 3 * i))} for i in range(count)]
    outputs = [o.outputs[0] for o in llm.generate(prompts, requests, use_tqdm=False)]
    return [
        (list(o.token_ids), [next(iter(x.values())).logprob for x in o.logprobs]) for o in outputs
    ]


class Counted:
    """How the decoding steps of an engine's model ran."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def graph(self, *arguments: Any, **options: Any) -> Any:
        from hybridengine.kernels.graph import Graph

        self.captured += 1
        graph = Graph(*arguments, **options)
        replay = graph.replay

        def counting(rows: int) -> Any:
            self.replayed += 1
            return replay(rows)

        graph.replay = counting  # type: ignore[method-assign]
        return graph

    def take(self) -> tuple[int, int]:
        taken = self.captured, self.replayed
        self.captured = self.replayed = 0
        return taken


def compare(rank: int, world_size: int, path: str, dtype: str) -> None:
    from hybridengine.engine.exact import operators, steps
    from hybridengine.engine.vllm.sampling import FusedSampler

    llm = open_llm(path, dtype, exact=True, max_model_len=64, kv_cache_memory_bytes=8 << 20)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    FusedSampler(runner, exact=True)
    model, counted = runner.get_model(), Counted()
    with patch.object(operators, "use_decode_graphs"):
        operators.use_exact_operators(model, 64)
    eager = model.forward
    expected = generate(llm, 4)
    steps.use_decode_graphs(model)
    replaying = model.forward
    with patch.object(steps, "Graph", counted.graph):
        assert generate(llm, 4) == expected
        captured, replayed = counted.take()
        assert captured == 1 and replayed == MAX_TOKENS - 2
        assert generate(llm, 2) == expected[:2]
        assert counted.take() == (0, MAX_TOKENS - 1)

        # Weights that are written in place are those of the next step.
        weight = next(p for p in model.parameters() if p.dim() == 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model.forward = eager
        changed = generate(llm, 3)
        assert changed != expected[:3]
        model.forward = replaying
        assert generate(llm, 3) == changed
        assert counted.take() == (0, MAX_TOKENS - 1)

        # Others are captured again, as is a larger batch; hooks see a step.
        for owner in model.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                replaced = parameter.data / 2
                owner.register_parameter(name, torch.nn.Parameter(replaced, requires_grad=False))
        assert weight is not next(p for p in model.parameters() if p.dim() == 2)
        assert generate(llm, 1) == expected[:1]
        assert counted.take() == (1, MAX_TOKENS - 2)
        assert generate(llm, 4) == expected
        assert counted.take() == (1, MAX_TOKENS - 2)
        seen: list[int] = []
        layer = next(m for name, m in model.named_modules() if name.endswith("input_layernorm"))
        handle = layer.register_forward_hook(lambda module, args, out: seen.append(1))
        assert generate(llm, 4) == expected
        assert counted.take() == (0, 0)
        assert len(seen) >= MAX_TOKENS
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_replayed_with_the_bits_of_eager_ones(kind: str, tmp_path: Path) -> None:
    dtype = "bfloat16" if kind == "qwen2" else "float32"
    run_ranks(compare, 1, save_tiny(kind, tmp_path), dtype)


def refuse(rank: int, world_size: int, path: str) -> None:
    from hybridengine.engine.exact.operators import use_exact_operators
    from hybridengine.engine.vllm.sampling import FusedSampler

    llm = open_llm(path, "float32", exact=True, max_model_len=64, kv_cache_memory_bytes=8 << 20)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    FusedSampler(runner, exact=True)
    model = runner.get_model()
    use_exact_operators(model, 64)
    layer = next(m for name, m in model.named_modules() if name.endswith("mlp"))
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 0.25  # type: ignore[method-assign]
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hybridengine.engine.exact.steps")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    first, second = generate(llm, 3), generate(llm, 3)
    assert first == second
    assert records == ["decoding steps are not replayed: torch computes aten::add.Tensor"]


def test_a_model_that_computes_by_torch_runs_eagerly(tmp_path: Path) -> None:
    run_ranks(refuse, 1, save_tiny("llama", tmp_path))
