"""Record the vocabulary entries that vLLM's top-k and top-p sampling kept for each token.

vLLM's second model runner returns them (`return_sampling_mask`), but as a setting of the engine,
which then refuses greedy requests and top-p without top-k; here it is on during one call. The first
runner does not. There our sampler returns them (`FusedSampler`); where it is not in use they are
the finite log-probs of the processed distribution, which our engine always asks for, so that vLLM
never takes a fused sampler, which has none. With both, vLLM's scheduler assigns the rows of a step
to requests, through preemption, chunked prefill and stops, as it assigns log-probs, and
`CompletionOutput.sampling_mask` is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridengine.engine.vllm.sampling import FusedSampler

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
    sample_tokens = runner.sample_tokens
    recording = _of_fused(runner) if FusedSampler.of(runner) else _of_processed(runner)
    with recording as take_masks:

        def recording_sample_tokens(*args: Any) -> Any:
            output = sample_tokens(*args)
            if (masks := take_masks()) is not None:
                # With asynchronous scheduling the output is filled in when its copies are done.
                getattr(output, "_model_runner_output", output).sampling_masks = masks
            return output

        with patch.object(runner, "sample_tokens", recording_sample_tokens):
            yield


@contextmanager
def _of_fused(runner: Any) -> Iterator[Callable[[], Any]]:
    """Yield what takes the masks of the newest step, if there was one, of a `FusedSampler`."""
    fused = FusedSampler.of(runner)
    assert fused is not None

    def take_masks() -> Any:
        masks, fused.masks = fused.masks, None
        return masks

    with patch.object(fused, "records", True):
        yield take_masks


@contextmanager
def _of_processed(runner: Any) -> Iterator[Callable[[], Any]]:
    """As `_of_fused`, of vLLM's own sampler, which computes all processed log-probs."""
    sampler = runner.sampler.topk_topp_sampler
    sample, log_probs = sampler.forward, list[Tensor]()

    def recording_sample(*args: Any) -> tuple[Tensor, Tensor]:
        tokens, processed = sample(*args)
        log_probs[:] = [processed]
        return tokens, processed

    def take_masks() -> Any:
        return _finite_entries(log_probs.pop()) if log_probs else None

    with patch.object(sampler, "forward", recording_sample):
        yield take_masks


def _finite_entries(log_probs: Tensor) -> Any:
    """Return the ids above -inf in each row of [R, V], as vLLM's `SamplingMaskLists`."""
    from vllm.v1.outputs import SamplingMaskLists

    rows, ids = (log_probs > -torch.inf).nonzero().cpu().unbind(1)
    offsets = torch.zeros(log_probs.shape[0] + 1, dtype=torch.int64)
    offsets[1:] = rows.bincount(minlength=log_probs.shape[0]).cumsum(0)
    return SamplingMaskLists(ids.int().numpy(), offsets.numpy())
