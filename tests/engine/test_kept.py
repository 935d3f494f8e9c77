"""The vocabulary entries that sampling kept, as both engines record them with each token."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybridengine.engine.response import pack_kept
from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.engine.vllm.sampling import record_kept_ids
from tests.engines import synced_engine
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, save_tiny

PROMPTS = [[5, 9, 33], [7, 8, 9, 10, 11, 12, 13], [3] * 40, [50 + i % 40 for i in range(30)]]
LIKELY = 25  # more than vLLM's own limit
TRUNCATIONS = [
    {"top_p": 0.8, "top_k": -1},
    {"top_p": 1.0, "top_k": 20},
    {"top_p": 0.8, "top_k": 20},
    {"top_p": 0.9, "top_k": 30, "min_p": 0.1},
    {"top_p": 1.0, "top_k": -1, "min_p": 0.3},
]


def build(path: str, world_size: int, kind: str) -> Any:
    stop = [2, *range(90, 100)]
    if kind == "hf":
        return synced_engine("hf", path, max_num_seqs=3, stop_token_ids=stop)
    return synced_engine(  # prompts in chunks of 16 tokens, and a cache of few blocks
        "vllm",
        path,
        tensor_model_parallel_size=world_size,
        max_model_len=256,
        kv_cache_gib=600 / 2**20 / world_size,  # of all ranks together
        max_num_batched_tokens=16,
        max_num_seqs=8,
        stop_token_ids=stop,
        record_likely=LIKELY,
    )


def body(rank: int, world_size: int, path: str, kind: str) -> dict[str, Any]:
    from hybridengine.engine.interface import SamplingSpec

    engine, preempted = build(path, world_size, kind), []
    sampled = []
    for truncation in TRUNCATIONS:
        spec = SamplingSpec(n=3, temperature=0.7, max_tokens=12, record_kept=True, **truncation)
        sampled.append(engine.generate(PROMPTS, spec, seed=1))
    cuts = ((1.0, -1, 0.0), LIKELY), ((0.8, 20, 0.0), 5), ((1.0, -1, 0.1), 5)
    likely = [SamplingSpec(2, 0.7, *cut, 12, record_likely=count) for cut, count in cuts]
    with_likely = [engine.generate(PROMPTS, spec, seed=6) for spec in likely]
    if kind == "vllm":  # long responses, more than the cache holds at once
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def recording_preempt(request: Any, *args: Any, **options: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *args, **options)

        scheduler._preempt_request = recording_preempt
        engine.stop_token_ids = []
        spec = SamplingSpec(n=2, max_tokens=150, temperature=0.7, top_k=20, record_kept=True)
        sampled.append(engine.generate(PROMPTS, spec, seed=2))
    without = [
        SamplingSpec(max_tokens=3, top_k=5),
        SamplingSpec(max_tokens=3, record_kept=True),
        SamplingSpec(max_tokens=3, temperature=0.0, top_k=5, record_kept=True),
    ]
    seeded = check_seeds(engine, kind)
    plain = [c for spec in without for [c] in engine.generate(PROMPTS, spec, seed=3)]
    assert all(not c.columns for c in plain)
    return {
        "sampled": sampled,
        "likely": with_likely,
        "preempted": len(preempted),
        "tp_rank": engine.tp_rank,
        "seeded": seeded,
    }


def check_seeds(engine: Any, kind: str) -> list[list[int]]:
    """Return the tokens of 3 × 2 samples of one prompt."""
    from hybridengine.engine.interface import SamplingSpec

    if engine.tp_rank == 0:  # user code may draw numbers on one rank only
        np.random.random(3)
        torch.rand(3)

    def generate(num_prompts: int, seed: int) -> list[list[int]]:
        spec = SamplingSpec(n=2, max_tokens=12)
        groups = engine.generate(PROMPTS[1:2] * num_prompts, spec, seed)
        return [c.token_ids for group in groups for c in group]

    state = torch.get_rng_state()
    samples = generate(3, seed=4)
    assert torch.equal(torch.get_rng_state(), state), "sampling moved the caller's generator"
    assert len(set(map(tuple, samples))) == 6, "samples have random numbers of their own"
    assert generate(3, seed=4) == samples != generate(3, seed=5)
    if kind == "vllm":  # whatever else is in the batch
        assert generate(2, seed=4) == samples[:4]
        engine.replica, engine.replicas = 1, 2
        assert generate(1, seed=4) == samples[2:4] and generate(2, seed=4)[2:] != samples[4:]
        engine.replica, engine.replicas = 0, 1
    return samples


def check_completion(
    model: Any, prompt: list[int], c: Any, top_p: float, top_k: int, min_p: float = 0.0
) -> None:
    """The kept entries are the likeliest ones, and log_probs are of the softmax over them."""
    assert len(c.columns["num_kept"]) == len(c.token_ids) == len(c.log_probs)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *c.token_ids]])).logits[0, len(prompt) - 1 : -1]
    z = logits.double() / 0.7
    kept_of_token = torch.tensor(c.columns["kept_ids"]).split(list(c.columns["num_kept"]))
    for row, ids, token, log_prob in zip(z, kept_of_token, c.token_ids, c.log_probs, strict=True):
        assert ids.diff().gt(0).all() and token in ids
        ranked = row.sort(descending=True).values
        assert ranked[ids.numel() - 1] <= row[ids].min() + 1e-5
        p = ranked.softmax(0)
        count = int((p >= min_p * (1 - 1e-5) * p[0]).sum())
        p = ranked[: min(count, top_k) if top_k > 0 else count].softmax(0)
        assert ids.numel() <= p.numel()
        assert p[: ids.numel()].sum() >= top_p - 1e-5 > p[: ids.numel() - 1].sum() - 2e-5
        expected = row[token] - row[ids].logsumexp(0)
        assert abs(expected.item() - log_prob) < 1e-4, "float32, another order of the sums"


def check_likely(model: Any, prompt: list[int], c: Any, truncates: bool) -> int:
    """The most likely entries of every token have the model's log-probs over what was kept.

    Returns how many tokens are none of them.
    """
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *c.token_ids]])).logits[0, len(prompt) - 1 : -1]
    counts, ids, log_probs = (
        torch.tensor(c.columns[name]) for name in ("num_likely", "likely_ids", "likely_log_probs")
    )
    assert truncates or counts.eq(LIKELY).all()
    others = 0
    for row, of_row, values, token, log_prob in zip(
        logits.double() / 0.7,
        *(x.split(counts.tolist()) for x in (ids, log_probs)),
        c.token_ids,
        c.log_probs,
        strict=True,
    ):
        assert of_row.diff().gt(0).all()
        total = row[token] - log_prob  # the log-sum-exp of what was kept
        torch.testing.assert_close(values.double(), row[of_row] - total, rtol=0, atol=1e-4)
        assert row[of_row].min() >= row.topk(len(of_row)).values[-1] - 1e-5
        others += token not in of_row
    return others


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("hf", 1),
        pytest.param("vllm", 1, marks=pytest.mark.exhaustive),
        ("vllm", 2),
    ],
)
def test_engines_record_the_entries_that_sampling_kept(
    tmp_path: Path, kind: str, world_size: int
) -> None:
    from transformers import AutoModelForCausalLM

    if kind == "vllm" and not vllm_available():
        pytest.skip("the rollout engine; `make setup` installs it")
    path = save_tiny("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    result, *others = run_ranks(body, world_size, path, kind, timeout_s=500)
    truncations = TRUNCATIONS + TRUNCATIONS[1:2] * (kind == "vllm")
    for truncation, groups in zip(truncations, result["sampled"], strict=True):
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for c in group:
                check_completion(model, prompt, c, **truncation)
    for truncates, groups in zip((False, True, True), result["likely"], strict=True):
        checked = [
            check_likely(model, prompt, c, truncates)
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for c in group
        ]
        assert sum(checked) > 0, "the sampled token is recorded only where it is likely"
    assert {c.finish_reason for g in result["sampled"][0] for c in g} == {"stop", "length"}
    assert (result["preempted"] > 0) == (kind == "vllm")
    for other in others:  # a replica's other ranks have the same tokens, and record nothing
        assert other["tp_rank"] > 0
        flat, own = (
            [c for part in r["sampled"] + r["likely"] for g in part for c in g]
            for r in (other, result)
        )
        assert [c.token_ids for c in flat] == [c.token_ids for c in own]
        assert other["seeded"] == result["seeded"]
        assert all(not c.columns for c in flat)


def test_the_second_model_runner_records_during_the_call_only() -> None:
    """It needs Triton, which vLLM has on GPUs only: here its switches."""
    sampler, scheduler = (SimpleNamespace(return_sampling_mask=False) for _ in range(2))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    with record_kept_ids(llm, SimpleNamespace(sampler=sampler)):
        assert sampler.return_sampling_mask and scheduler.return_sampling_mask
    assert not sampler.return_sampling_mask and not scheduler.return_sampling_mask
    spec = find_spec("vllm")
    if spec is not None and spec.submodule_search_locations:
        file = Path(spec.submodule_search_locations[0], "v1/worker/gpu/sample/sampler.py")
        assert "if self.return_sampling_mask:" in file.read_text()


def test_entries_of_other_tokens_are_refused() -> None:
    with pytest.raises(RuntimeError, match="entries of 1 tokens for a completion of 2"):
        pack_kept([3, 4], [[3]], VOCAB)
    with pytest.raises(RuntimeError, match="token 1 of a completion is 4, which is not among"):
        pack_kept([3, 4], [[3], [3, 5]], VOCAB)


def test_the_full_vocabulary_takes_no_entries() -> None:
    num_kept, kept_ids = pack_kept([3, 4], [range(VOCAB), [4, 9]], VOCAB).values()
    assert (list(num_kept), list(kept_ids)) == ([0, 2], [4, 9])
