"""Trajectories on real engines: requests that come at different times, and TP ranks in step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.engine.vllm.environment import vllm_available
from tests.engines import synced_engine
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 11, 12, 13], [3] * 12]
needs_vllm = pytest.mark.skipif(not vllm_available(), reason="needs vLLM")


def build(path: str, kind: str, tp_size: int, stop: list[int]) -> Any:
    """An engine with the weights of the model in `path`."""
    from transformers import AutoTokenizer

    engine = synced_engine(
        kind,
        path,
        tensor_model_parallel_size=tp_size,
        max_model_len=96,
        kv_cache_gib=16 / 1024,
        stop_token_ids=stop,
    )
    return engine, AutoTokenizer.from_pretrained(path)


def stream_body(rank: int, world_size: int, path: str, kind: str) -> Any:
    """Greedy completions of a stream, whose requests join late, and those of `generate`."""
    from hybridengine.engine.interface import Request, SamplingSpec

    engine, _ = build(path, kind, 1, [])
    spec = SamplingSpec(temperature=0.0, max_tokens=6)
    expected = [c for [c] in engine.generate(PROMPTS, spec, seed=3)]
    found = {}
    with engine.stream(spec, seed=3) as stream:
        for i, prompt in enumerate(PROMPTS):
            stream.add(Request(i, prompt, max_tokens=6 - i, seed=i))
            found |= dict(stream.step())
        while stream.num_running:
            found |= dict(stream.step())
    with engine.stream(spec, seed=3) as stream:  # left with a request that is not finished
        stream.add(Request(0, PROMPTS[0], max_tokens=6, seed=0))
        if kind == "vllm":
            stream.step()
    again = [c for [c] in engine.generate(PROMPTS, spec, seed=3)]
    return expected, found, again


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=needs_vllm)])
def test_requests_of_a_stream_are_those_of_a_batch(tmp_path: Path, kind: str) -> None:
    [(expected, found, again)] = run_ranks(stream_body, 1, save_tiny("llama", tmp_path), kind)
    for i, want in enumerate(expected):
        assert found[i].token_ids == want.token_ids[: 6 - i]
        torch.testing.assert_close(
            found[i].log_probs, want.log_probs[: 6 - i], atol=1e-5, rtol=1e-5
        )
        assert found[i].finish_reason == "length"
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]


def trajectories_body(rank: int, world_size: int, path: str) -> Any:
    """Sampled trajectories with tools of different speeds, by engines at TP 2."""
    from hybridengine.agents import AgentLoop, AgentRunner, LoopContext, TurnTemplate
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.run.config import DataConfig
    from hybridengine.run.config.rl import MultiTurnConfig
    from hybridengine.train.data import PromptSample
    from hybridengine.train.data.chats import ChatTemplate

    engine, tokenizer = build(path, "vllm", 2, [2, *range(70, 101)])

    class Slow(AgentLoop):
        async def run(self, trajectory: Any) -> None:
            for k in range(4):
                if await trajectory.generate() is None:
                    return
                await asyncio.sleep(0.02 * ((trajectory.number + k) % 3))
                trajectory.messages.append({"role": "user", "content": f"w{7 + k}"})

    context = LoopContext(MultiTurnConfig(enable=True), parse=lambda text: [])
    words = DataConfig(chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")
    template = TurnTemplate(ChatTemplate(tokenizer, words), tokenizer, [2, *range(70, 101)])
    runner = AgentRunner(context, "slow", template, {}, {"slow": Slow})
    samples = {
        i: PromptSample(
            i,
            prompt,
            tokenizer.decode(prompt) + " ",
            "toy",
            None,
            {},
            [{"role": "user", "content": tokenizer.decode(prompt)}],
        )
        for i, prompt in enumerate(PROMPTS)
    }
    runs = []
    for _ in range(2):
        done = runner.run(engine, samples, SamplingSpec(n=3, max_tokens=40), seed=5)
        runs.append(
            {
                (i, t.number): [
                    (list(s.ids), list(s.response.columns["sampled"]), list(s.response.log_probs))
                    for s in t.sequences
                ]
                for i, group in done.items()
                for t in group
            }
        )
    return runs


@needs_vllm
def test_tensor_parallel_ranks_take_the_same_steps(tmp_path: Path) -> None:
    """The second rank only follows; samples do not depend on which tool was faster."""
    path = save_tiny("llama", tmp_path)
    leader, follower = run_ranks(trajectories_body, 2, path, timeout_s=500)
    assert follower == [{}, {}]
    first, second = leader
    assert len(first) == 9
    assert {k: [s[:2] for s in v] for k, v in first.items()} == {
        k: [s[:2] for s in v] for k, v in second.items()
    }
    assert any(0 in mask for [(_, mask, _)] in first.values())
    for [(ids, mask, log_probs)] in first.values():
        assert len(ids) == len(mask) == len(log_probs) <= 40
        assert mask[-1] == 1
        assert all((lp == 0) == (not m) for lp, m in zip(log_probs, mask, strict=True))
