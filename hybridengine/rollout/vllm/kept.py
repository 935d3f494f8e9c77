"""Record the vocabulary entries that vLLM's top-k and top-p sampling kept for each token.

vLLM's second model runner returns them (`return_sampling_mask`), but as a setting of the engine,
which then refuses greedy requests and top-p without top-k; here it is on during one call. The first
runner (on CPUs, and where the second does not support a feature) does not: there the entries are
the finite log-probs of the processed distribution, which our engine always asks for, so that vLLM
never takes a fused sampler, which has none. With both, vLLM's scheduler assigns the rows of a step
to requests, through preemption, chunked prefill and stops, as it assigns log-probs, and
`CompletionOutput.sampling_mask` is the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["record_kept_ids"]


@contextmanager
def record_kept_ids(llm: Any, runner: Any) -> Iterator[None]:
    """While open, completions of `llm` have a `sampling_mask`.

    llm: a `vllm.LLM` whose scheduler and model runner are in this process, with processed
    log-probs. Its requests must sample (temperature above 0) and return log-probs.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    second_runner = hasattr(runner.sampler, "return_sampling_mask")
    if not second_runner and llm.llm_engine.vllm_config.speculative_config is not None:
        raise RuntimeError(
            "algorithm.sampling_replay: vLLM's first model runner records no kept vocabulary "
            "entries with speculative decoding; remove "
            "rollout.engine_kwargs.vllm.speculative_config, or set algorithm.sampling_replay=off"
        )
    with patch.object(scheduler, "return_sampling_mask", True):
        if second_runner:
            with patch.object(runner.sampler, "return_sampling_mask", True):
                yield
        else:
            with _masks_of_first_runner(runner):
                yield


@contextmanager
def _masks_of_first_runner(runner: Any) -> Iterator[None]:
    """While open, the outputs of a `GPUModelRunner` have `sampling_masks`, one row per request."""
    sampler = runner.sampler.topk_topp_sampler
    sample, sample_tokens = sampler.forward, runner.sample_tokens
    log_probs: Tensor | None = None

    def recording_sample(*args: Any) -> tuple[Tensor, Tensor]:
        nonlocal log_probs
        tokens, log_probs = sample(*args)
        return tokens, log_probs

    def recording_sample_tokens(*args: Any) -> Any:
        nonlocal log_probs
        output = sample_tokens(*args)
        if log_probs is not None:
            masks, log_probs = _finite_entries(log_probs), None
            # With asynchronous scheduling the output is filled in when its copies are done.
            getattr(output, "_model_runner_output", output).sampling_masks = masks
        return output

    with (
        patch.object(sampler, "forward", recording_sample),
        patch.object(runner, "sample_tokens", recording_sample_tokens),
    ):
        yield


def _finite_entries(log_probs: Tensor) -> Any:
    """Return the ids above -inf in each row of [R, V], as vLLM's `SamplingMaskLists`."""
    from vllm.v1.outputs import SamplingMaskLists

    rows, ids = (log_probs > -torch.inf).nonzero().cpu().unbind(1)
    offsets = torch.zeros(log_probs.shape[0] + 1, dtype=torch.int64)
    offsets[1:] = rows.bincount(minlength=log_probs.shape[0]).cumsum(0)
    return SamplingMaskLists(ids.int().numpy(), offsets.numpy())
