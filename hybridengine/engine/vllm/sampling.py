"""vLLM's sampler by `sample_tokens`: one read of the logits, and a part of a second.

vLLM's first model runner sorts the vocabulary for top-p, writes the processed log-probs of all
entries and gathers one of them. Here its `Sampler` gets a forward that does the same for requests
that want the log-prob of the sampled token alone, as all of ours do. Random numbers are those of
vLLM's own sampler there: one of 31 bits for each token, of the request's generator. The second
model runner has another sampler (`hybridengine.engine.vllm.sampling_second`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import sample_tokens, token_log_probs

__all__ = ["FusedSampler", "token_ranks"]


class FusedSampler:
    """The forward of the sampler of `runner`, vLLM's first model runner, from now on.

    What it does not cover, vLLM's own forward does: other log-probs than the processed ones of the
    sampled tokens, and logits processors that apply to random sampling only, but for min-p.

    exact: log-probs are those of `token_log_probs`, as the trained model computes them, where
        nothing is cut from the vocabulary.
    ranks: whether the ranks of tokens among all are counted, or 0.

    Attributes:
        records: whether `masks` are kept.
        masks: of the newest step: the ids that were kept as vLLM's `SamplingMaskLists`; a row from
            which nothing was cut has none.
    """

    def __init__(self, runner: Any, exact: bool = False, ranks: bool = False) -> None:
        self._sampler = runner.sampler
        self._forward = self._sampler.forward
        self._sampler.forward = self.forward
        self._exact, self._ranks = exact, ranks
        self.records = False
        self.masks: Any = None

    @staticmethod
    def of(runner: Any) -> FusedSampler | None:
        """Return the one of a runner, None where it has vLLM's own sampler."""
        fused = getattr(getattr(runner.sampler, "forward", None), "__self__", None)
        return fused if isinstance(fused, FusedSampler) else None

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        """Return vLLM's `SamplerOutput` for logits [B, V]."""
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        metadata = sampling_metadata
        if logprobs_mode_override is not None or not self._covers(metadata):
            return self._forward(logits, metadata, predict_bonus_token, logprobs_mode_override)
        logits = self._sampler.apply_logits_processors(
            logits.float(), metadata, predict_bonus_token
        )
        sampled = sample_tokens(
            logits,
            _seeds(metadata.generators, logits),
            torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device),
            temperature=0.0 if metadata.temperature is None else metadata.temperature,
            top_k=0 if metadata.top_k is None else metadata.top_k,
            top_p=1.0 if metadata.top_p is None else metadata.top_p,
            min_p=_min_p(metadata),
            return_kept_ids=self.records,
        )
        if self.records:
            self.masks = _mask_lists(sampled.num_kept, sampled.kept_ids)
        tokens = sampled.tokens.int().unsqueeze(1)
        log_probs = None
        if metadata.max_num_logprobs is not None:
            ranks = torch.zeros_like(sampled.tokens)
            if self._ranks:
                ranks = token_ranks(logits, sampled.tokens)
            values = sampled.log_probs
            if self._exact and metadata.all_random:
                uncut, _ = token_log_probs(logits, sampled.tokens, metadata.temperature)
                values = torch.where(sampled.num_kept == 0, uncut, values)
            log_probs = LogprobsTensors(tokens, values.unsqueeze(1), ranks)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=log_probs)

    def _covers(self, metadata: Any) -> bool:
        from vllm.v1.sample.logits_processor import MinPLogitsProcessor

        return (
            self._sampler.logprobs_mode == "processed_logprobs"
            and not metadata.max_num_logprobs  # None or 0
            and not metadata.logprob_token_ids
            and all(
                isinstance(processor, MinPLogitsProcessor)
                for processor in metadata.logitsprocs.argmax_invariant
            )
        )


def _min_p(metadata: Any) -> float | Tensor:
    """Return min-p of the rows, float32 [B], or 0: of vLLM's processor, its only one here."""
    for processor in metadata.logitsprocs.argmax_invariant:
        if processor.min_p_count:
            return processor.min_p.squeeze(1)
    return 0.0


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the ranks of tokens, int64 [B], from 1, among the entries of logits [B, V]."""
    return (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(1)


def _seeds(generators: dict[int, torch.Generator], logits: Tensor) -> Tensor:
    """Draw a seed for each row, int64 [B]; rows without a generator take torch's own.

    A launch for each generator, which has its state on the device, and none besides where every
    row has one.
    """
    seeds = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(generators) < len(seeds):
        seeds.random_(0, 2**31)
    for row, generator in generators.items():
        seeds[row : row + 1].random_(0, 2**31, generator=generator)
    return seeds


def _mask_lists(num_kept: Tensor, kept_ids: Tensor | None) -> Any:
    from vllm.v1.outputs import SamplingMaskLists

    assert kept_ids is not None
    offsets = torch.zeros(num_kept.numel() + 1, dtype=torch.int64)
    torch.cumsum(num_kept.cpu(), 0, out=offsets[1:])
    return SamplingMaskLists(kept_ids.cpu().numpy(), offsets.numpy())
