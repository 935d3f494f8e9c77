"""Exact engines and models beside them, and what engines sampled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from tests.tiny_models import VOCAB
from tests.vllm_llm import open_llm

__all__ = ["compare_under_pressure", "counted_preemptions", "open_engine", "open_model", "sampled"]


def open_engine(path: str, dtype: str, **options: Any) -> Any:
    from hybridengine.engine.exact.operators import use_exact_operators
    from hybridengine.engine.vllm.sampling import FusedSampler

    llm = open_llm(path, dtype, exact=True, max_model_len=160, **options)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    use_exact_operators(runner.get_model(), 160)
    FusedSampler(runner, exact=True)
    return llm


def open_model(path: str, dtype: str, splits: Mapping[str, int] = MappingProxyType({})) -> Any:
    from transformers import AutoModelForCausalLM

    from hybridengine.model.attention import ATTENTION
    from hybridengine.model.exact import use_exact_operators
    from hybridengine.model.extensions import prepare_model
    from hybridengine.model.head import patch_head

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
    ).eval()
    prepare_model(model)
    use_exact_operators(model, splits)
    patch_head(model)
    return model


@contextmanager
def counted_preemptions() -> Iterator[list[str]]:
    """While open, the ids of requests that vLLM preempts are added to the list."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, preempted = Scheduler._preempt_request, list[str]()

    def noting(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **options)

    with patch.object(Scheduler, "_preempt_request", noting):
        yield preempted


class Sampled(NamedTuple):
    """A response, and its columns of what truncated sampling kept."""

    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    kept: dict[str, Any]


def sampled(llm: Any, prompts: list[list[int]], **truncation: float) -> tuple[list[Sampled], int]:
    """Return the responses, and how many tokens of prompts were cached."""
    from vllm import SamplingParams

    from hybridengine.engine.response import pack_kept
    from hybridengine.engine.vllm.sampling import record_kept_ids

    options = {"temperature": 0.8, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    requests = [
        SamplingParams(n=1 + i % 3, max_tokens=1 + 7 * i % 24, **options, **truncation)
        for i in range(len(prompts))
    ]
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    with record_kept_ids(llm, runner) if truncation else nullcontext():
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], requests, use_tqdm=False
        )
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        for sample in output.outputs:
            ids = list(sample.token_ids)
            values = [step[i].logprob for i, step in zip(ids, sample.logprobs, strict=True)]
            kept = pack_kept(ids, sample.sampling_mask.token_ids, VOCAB) if truncation else {}
            rows.append(Sampled(prompt, ids, values, kept))
    return rows, sum(output.num_cached_tokens or 0 for output in outputs)


def kept_part(rows: list[Sampled]) -> dict[str, Any]:
    """Return the parts of a packed batch that hold what sampling kept."""
    from hybridengine.model.head import KeptIds

    ids, counts = (
        torch.tensor([x for row in rows for x in row.kept.get(name, ())], dtype=torch.int32)
        for name in ("kept_ids", "num_kept")
    )
    return {"kept": KeptIds.from_counts(ids, counts)} if len(counts) else {}


def compare_under_pressure(
    path: str,
    dtype: str,
    *,
    shared: int,
    truncations: Sequence[Mapping[str, float]] = ({},),
    **options: Any,
) -> tuple[Any, list[tuple[list[int], list[int]]], torch.Tensor, bool]:
    """Compare the log-probs of an engine with those of the model, in several packings.

    shared: tokens with which three of the prompts begin. truncations: of `SamplingParams`, each for
    all prompts. options: of `vllm.LLM`, a small cache.

    Returns the model, (prompt, response) of all samples, their log-probs, and whether sequences
    were preempted and prefixes found in the cache.
    """
    from hybridengine.model import pack_rollouts, packed_log_probs

    pressure = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_seqs": 8}
    llm, model = open_engine(path, dtype, **pressure, **options), open_model(path, dtype)
    draw = random.Random(0)
    tokens = lambda n: [draw.randrange(3, VOCAB) for _ in range(n)]  # noqa: E731
    common = tokens(shared)
    prompts = [tokens(n) for n in (1, 2, 17, 60, 90)] + [common + tokens(n) for n in (1, 9, 30)]
    with counted_preemptions() as preempted:
        rows, num_cached = list[Sampled](), 0
        for truncation in truncations:
            for given in (prompts, prompts[::-1]):
                more, count = sampled(llm, given, **truncation)
                rows, num_cached = rows + more, num_cached + count
    pairs = [(row.prompt, row.ids) for row in rows]
    theirs, parts = torch.tensor([x for row in rows for x in row.log_probs]), kept_part(rows)
    assert len(theirs) > 250
    threads = torch.get_num_threads()
    for shared_prefix, count in ((False, threads), (True, 1), (True, 3)):
        torch.set_num_threads(count)
        batch = pack_rollouts(pairs, shared_prefix=shared_prefix, parts=parts)
        ours, _ = packed_log_probs(model, batch, 0.8)
        assert torch.equal(ours.detach(), theirs), (shared_prefix, count)
    torch.set_num_threads(threads)
    ours.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return model, pairs, theirs, bool(preempted) and num_cached > 0
