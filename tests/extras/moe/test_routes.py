"""The experts that vLLM's routers selected, as the engine records them with each token."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridengine.engine.response import (
    COLUMNS,
    Response,
    TokenColumn,
    extend_columns,
    first_columns,
)
from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.moe.routes import decode_routes, pack_routes
from hybridengine.train.data import PromptSample
from hybridengine.train.rollout_files import rollout_line
from hybridengine.train.rollouts import ScoredResponse
from tests.engines import synced_engine
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

SAMPLE = PromptSample(0, [5], "", "", None, {})
LONG = [3 + i % 90 for i in range(70)]  # two full blocks of the cache
PROMPTS = [[5, 9, 33], LONG, [*LONG[:66], 7, 8], [50 + i % 40 for i in range(30)]]


def rows_of(completion: Any) -> np.ndarray:
    columns = completion.columns
    assert len(columns["num_routed"]) == len(completion.token_ids)
    assert sum(columns["num_routed"]) == len(columns["routed_experts"])
    return np.asarray(columns["routed_experts"], np.int16).reshape(-1, 2, 2)


def body(rank: int, world_size: int, path: str) -> dict[str, Any]:
    from hybridengine.engine.interface import Request, SamplingSpec

    engine = synced_engine(
        "vllm",
        path,
        tensor_model_parallel_size=world_size,
        max_model_len=256,
        kv_cache_gib=600 / 2**20 / world_size,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        stop_token_ids=[2],
        record_routes=True,
    )
    scheduler, preempted = engine.llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def recording_preempt(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **options)

    scheduler._preempt_request = recording_preempt
    spec = SamplingSpec(n=2, max_tokens=12, record_routes=True)
    result: dict[str, Any] = {"sampled": [(PROMPTS, engine.generate(PROMPTS, spec, seed=1))]}
    result["sampled"].append((PROMPTS, engine.generate(PROMPTS, spec, seed=2)))  # cached prompts
    engine.stop_token_ids = []
    long = SamplingSpec(n=3, max_tokens=150, record_routes=True)  # more than the cache holds
    result["sampled"].append((PROMPTS, engine.generate(PROMPTS, long, seed=3)))
    with engine.stream(spec, seed=4) as stream:
        for k, prompt in enumerate(PROMPTS):
            stream.add(Request(k, prompt, 8, seed=k))
        finished = dict[int, Any]()
        while stream.num_running:
            finished |= dict(stream.step())
    result["sampled"].append((PROMPTS, [[finished[k]] for k in range(len(PROMPTS))]))
    plain = engine.generate(PROMPTS, SamplingSpec(max_tokens=3), seed=3)
    assert all(not c.columns for [c] in plain)
    return result | {"preempted": len(preempted), "tp_rank": engine.tp_rank}


@pytest.mark.multirank
@pytest.mark.skipif(not vllm_available(), reason="the rollout engine; `make setup` installs it")
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_vllm_records_the_experts_of_every_computed_token(tmp_path: Path, world_size: int) -> None:
    """In float32 they are those of the trainer's model, but for ties that rounding decides.

    Through prompts in chunks, prompts from the prefix cache, preemption and streams.
    """
    from transformers import AutoModelForCausalLM

    from hybridengine.moe.router_replay import RouterReplay

    path = save_tiny("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    replay, differing, pairs = RouterReplay(model), 0.0, 0.0
    result, *others = run_ranks(body, world_size, path, timeout_s=500)
    assert result["preempted"] > 0
    for prompts, groups in result["sampled"]:
        for prompt, group in zip(prompts, groups, strict=True):
            for c in group:
                rows, ids = rows_of(c), [*prompt, *c.token_ids]
                assert len(rows) == len(ids) - 1, "nothing has read the last token"
                with torch.no_grad(), replay.replay(torch.from_numpy(rows)):
                    model(input_ids=torch.tensor([ids[:-1]]))
                counts = replay.pop_counts()
                assert counts.tokens == len(ids) - 1
                differing += float(counts.differing_pairs)
                pairs += float(counts.pairs)
    assert differing / pairs < 2e-3
    for other in others:  # a replica's other ranks have the same tokens, and record nothing
        assert other["tp_rank"] > 0
        assert all(not c.columns for _, groups in other["sampled"] for g in groups for c in g)


def test_turns_have_the_rows_of_the_whole_sequence_once() -> None:
    """Two turns with tokens of a tool between them, and a third one, which is cut."""
    rows = np.arange(12 * 4, dtype=np.int16).reshape(12, 2, 2)
    columns: dict[str, Any] = {}
    extend_columns(columns, 0, pack_routes(rows[:5], 3, 3), 3)  # prompt of 3, response of 3
    extend_columns(columns, 3, {}, 2)  # of a tool
    extend_columns(columns, 5, pack_routes(rows[:9], 8, 2), 2)
    assert columns["num_routed"].tolist() == [12, 4, 4, 0, 0, 12, 4]
    assert columns["routed_experts"].tolist() == rows[:9].flatten().tolist()
    cut = first_columns(columns, 5)
    assert list(cut["routed_experts"]) == rows[:5].flatten().tolist()
    with pytest.raises(ValueError, match="36 entries of a sequence whose next completion has 8"):
        extend_columns(columns, 7, pack_routes(rows[:2], 2, 1), 1)


def test_missing_rows_are_refused_and_surplus_ones_dropped() -> None:
    rows = np.ones((6, 1, 2), np.uint8)
    assert len(pack_routes(rows, 3, 3)["routed_experts"]) == 10
    with pytest.raises(RuntimeError, match=r"experts of 6 tokens for a prompt of 4 .* expected 7"):
        pack_routes(rows, 4, 4)


def test_rollout_files_have_the_ids() -> None:
    rows = np.random.default_rng(0).integers(0, 512, (9, 3, 4)).astype(np.int16)
    response = Response([1, 2, 3, 4], [0.0] * 4, "length", columns=pack_routes(rows, 6, 4))
    text = json.loads(rollout_line(SAMPLE, ScoredResponse(response)))["routed_experts"]
    assert np.array_equal(decode_routes(text, 3, 4), rows)


def test_files_have_ragged_entries_of_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    column = TokenColumn("weights_of", torch.float32, counts="num_weights")
    monkeypatch.setitem(COLUMNS, "weights_of", column)
    response = Response([1, 2], [0.0] * 2, "stop", columns={"weights_of": [0.25, 70000.5]})
    text = json.loads(rollout_line(SAMPLE, ScoredResponse(response)))["weights_of"]
    data = zlib.decompress(base64.b64decode(text))
    assert np.frombuffer(data, "<f4").tolist() == [0.25, 70000.5]
