"""New weights between the decode steps of running responses, in both engines, against an oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridengine.engine.interface import InFlightUpdate, Request, SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.engine.vllm.environment import vllm_available
from tests.engine.version_oracle import logits_by_version
from tests.engines import build_engine
from tests.loading import load_sharded
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny

BLOCK = 32  # of vLLM's cache: two prompts fill one, so that its prefix cache is used
PROMPTS = [[3 + k % 40 for k in range(37)], [50 + k for k in range(40)], [7, 8, 9]]
MAX_TOKENS = 40
DUE_AT = (2, 4)  # which looks for new weights find them: one after every token, or 8 steps of vLLM
SPEC = SamplingSpec(n=2, temperature=0.7, top_k=30, max_tokens=MAX_TOKENS, record_kept=True)


class Updates:
    """Updates an engine to versions from 1 on, whose weights are those of `paths` in turn."""

    def __init__(self, engine: Any, paths: Sequence[str]) -> None:
        from hybridengine.model import parameter_shards, sharding_mesh
        from hybridengine.sync.resharder import Resharder

        mesh = sharding_mesh("cpu", torch.distributed.get_world_size())
        self._engine, self._version = engine, 0
        models = [load_sharded(p, mesh=mesh) for p in paths]
        self._resharders = [
            Resharder(partial(parameter_shards, model), engine, 1 << 20, delta="off")
            for model in models
        ]
        self()

    def __call__(self) -> None:
        self._version += 1
        resharder = self._resharders[(self._version - 1) % len(self._resharders)]
        resharder.sync(self._version)

    def begin(self, keep_kv: bool, due_at: Sequence[int] = DUE_AT) -> None:
        """From here on the looks due_at find new weights."""
        looks = count(1)
        self._engine.in_flight = InFlightUpdate(lambda: next(looks) in due_at, self, keep_kv)


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """While open, vLLM's scheduler runs a step ahead, as on GPUs; on a CPU it would not.

    The steps of the CPU's model runner still run as they are scheduled.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    check, init = CpuPlatform.check_and_update_config, CPUModelRunner.__init__

    def check_and_switch_on(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    def init_runner(self: Any, *args: Any) -> None:
        init(self, *args)
        self.use_async_scheduling = False

    with (
        patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_and_switch_on)),
        patch.object(CPUModelRunner, "__init__", init_runner),
    ):
        yield


def body(rank: int, world_size: int, paths: Sequence[str], kind: str) -> dict[str, Any]:
    """(prompt, completion) of each response, by how it was generated."""
    if kind == "hf":
        engine = build_engine("hf", paths[0], max_num_seqs=4, stop_token_ids=[2])
    else:  # half of the responses begin when others have ended
        drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
        with asynchronous_scheduling() if kind == "vllm_async" else nullcontext():
            engine = build_engine(
                "vllm",
                paths[0],
                tensor_model_parallel_size=world_size,
                max_model_len=128,
                max_num_seqs=3,
                engine_kwargs={"block_size": BLOCK}
                | ({"speculative_config": drafts} if kind == "vllm" else {}),
                stop_token_ids=[2],
            )
        assert (engine.drafts is not None) == (kind == "vllm")
        core = engine.llm.llm_engine.engine_core.engine_core
        assert (core.batch_queue is not None) == (kind == "vllm_async")
    updates, found = Updates(engine, paths), dict[str, Any]()
    for name in ("keep_kv", "recompute_kv"):
        updates.begin(name == "keep_kv")
        groups = engine.generate(PROMPTS, SPEC, seed=1)
        found[name] = [(p, c) for p, group in zip(PROMPTS, groups, strict=True) for c in group]
    updates.begin(keep_kv=False)
    with engine.stream(SPEC, seed=3) as stream:
        finished = dict[int, Response]()
        for i, prompt in enumerate(PROMPTS):
            stream.add(Request(i, prompt, max_tokens=MAX_TOKENS, seed=i))
            finished |= dict(stream.step())
        while stream.num_running:
            finished |= dict(stream.step())
    found["stream"] = [(prompt, finished[i]) for i, prompt in enumerate(PROMPTS)]
    updates.begin(keep_kv=True, due_at=DUE_AT[:1])
    found["later"] = later(engine)
    engine.in_flight = None
    [[c]] = engine.generate(PROMPTS[:1], SamplingSpec(max_tokens=3), seed=1)
    found["after"] = c.versions == [(engine.weight_version, len(c.token_ids))]
    engine.shutdown()
    return found


def later(engine: Any) -> list[tuple[list[int], Response]]:
    """(prompt, completion) of two requests that begin with a response that spans an update.

    The first one caches the blocks that the response filled before the update. The second one reads
    these, and one more block, which the response filled after the update.
    """
    prompt = PROMPTS[0]
    [completions] = engine.generate([prompt], replace(SPEC, n=3), seed=1)
    response = max(completions, key=lambda c: len(c.token_ids))
    ids, num_older = [*prompt, *response.token_ids], response.versions[0][1]
    full = (len(prompt) + num_older - 1) // BLOCK
    sizes = [full * BLOCK + 1, (full + 1) * BLOCK + 1]
    assert len(response.versions) == 2 and len(ids) >= sizes[1]
    one = replace(SPEC, n=1, max_tokens=1)
    return [(ids[:size], engine.generate([ids[:size]], one, seed=1)[0][0]) for size in sizes]


def error(models: Any, prompt: list[int], c: Response, keep_kv: bool) -> torch.Tensor:
    """|log-prob - that of the oracle| of each token."""
    assert {"num_kept", "kept_ids"} <= c.columns.keys()
    assert sum(n for _, n in c.versions) == len(c.token_ids) == len(c.log_probs)
    logits = logits_by_version(models, prompt, c.token_ids, c.versions, keep_kv) / SPEC.temperature
    kept_of_token = torch.tensor(c.columns["kept_ids"]).split(list(c.columns["num_kept"]))
    wanted = [
        row[token] - row[kept].logsumexp(0)
        for row, token, kept in zip(logits, c.token_ids, kept_of_token, strict=True)
    ]
    return (torch.stack(wanted) - torch.tensor(c.log_probs)).abs()


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["hf", "vllm", "vllm_async"])
def test_log_probs_are_those_of_the_version_of_each_token(tmp_path: Path, kind: str) -> None:
    if kind != "hf" and not vllm_available():
        pytest.skip("the rollout engine; `make setup` installs it")
    from transformers import AutoModelForCausalLM

    paths = [save_tiny("llama", tmp_path / f"{seed}", seed=seed) for seed in range(2)]
    ranks = 2 if kind == "vllm" else 1
    found, *others = run_ranks(body, ranks, paths, kind, timeout_s=500)
    loaded = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float64) for p in paths]
    models = {version: loaded[(version - 1) % 2] for version in range(1, 9)}
    for name in ("keep_kv", "recompute_kv", "stream"):
        keeps = name == "keep_kv"
        for other in others:  # tensor-parallel ranks took the weights after the same steps
            assert [c.versions for _, c in other[name]] == [c.versions for _, c in found[name]]
        assert any(len(c.versions) > 1 for _, c in found[name]), name
        for prompt, c in found[name]:
            assert error(models, prompt, c, keeps).max() < 1e-4, (name, c.versions)
            assert c.finish_reason == ("length" if len(c.token_ids) == MAX_TOKENS else "stop")
    # Kept keys and values change what is sampled after an update, and nothing before.
    several = [(p, c) for p, c in found["keep_kv"] if len(c.versions) > 1]
    before = [c.versions[0][1] for _, c in several]
    gaps = [error(models, p, c, keep_kv=False) for p, c in several]
    assert max(gap[:k].max() for gap, k in zip(gaps, before, strict=True)) < 1e-4
    assert max(gap[k:].max() for gap, k in zip(gaps, before, strict=True)) > 1e-2
    if kind != "hf":  # responses that began after an update have one version, with a new prompt
        assert any(len(c.versions) == 1 for _, c in found["keep_kv"])
    assert any([v for v, _ in c.versions] == [1, 2, 3] for _, c in found["keep_kv"])
    assert found["after"]
    for prompt, c in found["later"]:
        assert len(c.versions) == 1 and error(models, prompt, c, keep_kv=False).max() < 1e-4


def test_runs_are_joined_and_cut() -> None:
    first, *others = [
        Response([1] * sum(n for _, n in runs), [0.0] * sum(n for _, n in runs), "stop", runs)
        for runs in ([(1, 2)], [(1, 1), (2, 4)], [(2, 1)])
    ]
    for more in others:
        first = first.join(more)
    assert first.versions == [(1, 3), (2, 5)]
    assert first.first(3).versions == [(1, 3)]
    assert first.first(4).versions == [(1, 3), (2, 1)]
    assert first.first(0).versions == []
