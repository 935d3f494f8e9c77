"""Texts that end a response, in both engines: at the token that completes one, which stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridengine.engine.vllm.environment import vllm_available
from tests.engines import synced_engine
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.multirank

PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 11, 12, 13], [3] * 12]


def body(rank: int, world_size: int, path: str, kind: str):
    """(free completions, the stop text, completions with it) of greedy decoding."""
    from transformers import AutoTokenizer

    from hybridengine.engine.interface import SamplingSpec

    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = synced_engine(
        kind, path, stop_token_ids=[2], max_num_seqs=2, stop=("text",), tokenizer=tokenizer
    )
    greedy = SamplingSpec(max_tokens=10, temperature=0.0)
    free = [c for [c] in engine.generate(PROMPTS, greedy, seed=0)]
    text = tokenizer.decode(free[0].token_ids[2:4])  # two tokens, complete with the fourth
    stopping = SamplingSpec(max_tokens=10, temperature=0.0, stop=("never", text))
    ended = [c for [c] in engine.generate(PROMPTS, stopping, seed=0)]
    pairs = []
    for before, after in zip(free, ended, strict=True):
        prefixes = [before.token_ids[: k + 1] for k in range(len(before.token_ids))]
        first = next((p for p in prefixes if text in tokenizer.decode(p)), None)
        pairs.append((before, after, first))
    return pairs


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_a_stop_text_ends_a_response(tmp_path: Path, kind: str) -> None:
    if kind == "vllm" and not vllm_available():
        pytest.skip("the rollout engine; `make setup` installs it")
    [pairs] = run_ranks(body, 1, save_tiny("llama", tmp_path), kind, timeout_s=500)
    for free, ended, first in pairs:
        wanted = free.token_ids if first is None else first
        assert ended.token_ids == wanted
        assert len(ended.log_probs) == len(wanted)
        assert ended.finish_reason == (free.finish_reason if first is None else "stop")
        torch.testing.assert_close(ended.log_probs, free.log_probs[: len(wanted)])
    assert len(pairs[0][1].token_ids) <= 4
    assert pairs[0][1].finish_reason == "stop"
