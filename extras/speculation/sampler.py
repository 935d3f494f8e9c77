"""Verify drafted tokens by sampling: a draft is accepted where it is the token that was sampled.

Speculative decoding computes the logits of several drafted tokens in one step. vLLM accepts a draft
x with probability min(1, p(x) / q(x)) and samples a rejected position anew (Leviathan et al., 2023,
arXiv:2211.17192). Where drafts are not sampled, q is 1 at one token. There the rule is the same as
to sample a token of p at every position, and to keep them up to the first one that differs from its
draft: P(accept) = p(x), and a token that differs has the distribution p without x.

So all tokens come from the sampler that is used without drafts, with its log-probs and what top-k
and top-p kept. A request has the random numbers that it has without drafts, one for each token,
and so the same tokens where the logits have the same bits (`rollout.exact`).

On a CPU this takes the place of vLLM's `RejectionSampler`, whose temperatures of drafted positions
are uninitialised memory there (vLLM 0.32: `_expand_kernel_impl` writes to a copy).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridengine.engine.vllm.sampling import FusedSampler

__all__ = ["DraftSampler"]

_NONE = -1  # vLLM's mark for positions without a token


class DraftSampler:
    """Samples and verifies in place of the `rejection_sampler` of `runner`, on a CPU.

    fused: the sampler of `runner`; its log-probs, masks and ranks are those of each token.
    """

    def __init__(self, runner: Any, fused: FusedSampler) -> None:
        self._sampler, self._fused = runner.sampler, fused
        self._rejection = runner.rejection_sampler

    def __call__(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        """Return vLLM's `SamplerOutput`: tokens int32 [B, most drafts + 1], -1 after the last.

        metadata: vLLM's `SpecDecodeMetadata`.
        draft_probs: not read; a verified token has its distribution whatever the drafts are.
        logits: [drafts + B, V]; for each request those of its drafts, then the one after them.

        Raises RuntimeError for requests with other log-probs than those of the sampled tokens.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        if not self._fused.covers(sampling_metadata) or sampling_metadata.max_num_logprobs:
            raise RuntimeError(
                "speculative_config: a request wants other log-probs than those of its sampled "
                "tokens; send it with logprobs=0, to an engine of logprobs_mode processed_logprobs"
            )
        num_drafts = torch.tensor(metadata.num_draft_tokens)
        num_rows, width = num_drafts + 1, metadata.max_spec_len + 1
        position = torch.arange(width)
        is_row, is_draft = position < num_rows[:, None], position < num_drafts[:, None]

        numbers = _RandomNumbers(sampling_metadata.generators, num_rows)
        of_rows = {
            name: None if value is None else value.repeat_interleave(num_rows)
            for name in ("temperature", "top_k", "top_p")
            for value in (getattr(sampling_metadata, name),)
        }
        rows = self._processed(logits, metadata, sampling_metadata)
        tokens, log_probs = self._fused.sample(
            rows, numbers.seeds, replace(sampling_metadata, **of_rows)
        )
        if (masks := self._fused.masks) is not None:
            ends = [0, *num_rows.cumsum(0).tolist()]
            self._fused.masks = masks._replace(cu_num_generated_tokens=ends)

        sampled = torch.full(is_row.shape, _NONE, dtype=torch.int32)
        drafts = sampled.clone()
        sampled[is_row] = tokens.squeeze(1)
        drafts[is_draft] = metadata.draft_token_ids.int()
        num_accepted = (is_draft & (sampled == drafts)).long().cumprod(1).sum(1)
        numbers.keep(num_accepted + 1)
        output = sampled.masked_fill(position > num_accepted[:, None], _NONE)
        if log_probs is not None:
            values = torch.zeros(is_row.shape, dtype=torch.float32)
            ranks = torch.zeros(is_row.shape, dtype=torch.int64)
            values[is_row] = log_probs.logprobs.squeeze(1)
            ranks[is_row] = log_probs.selected_token_ranks
            log_probs = LogprobsTensors(output.view(-1, 1), values.view(-1, 1), ranks.view(-1))
        return SamplerOutput(sampled_token_ids=output, logprobs_tensors=log_probs)

    def _processed(self, logits: Tensor, metadata: Any, sampling: Any) -> Tensor:
        """Return float32 logits [drafts + B, V] after vLLM's processors, such as penalties."""
        last, drafted = metadata.bonus_logits_indices.long(), metadata.target_logits_indices.long()
        rows = torch.empty(logits.shape, dtype=torch.float32)
        rows[last] = self._sampler.apply_logits_processors(logits[last].float(), sampling, True)
        if len(drafted):
            rows[drafted] = self._rejection.apply_logits_processors(
                logits[drafted].float(), sampling, metadata
            )
        return rows


class _RandomNumbers:
    """A number of 31 bits for each row of logits, of the generator of its request.

    num_rows: int64 [B].

    Attributes:
        seeds: int64 [rows].
    """

    def __init__(self, generators: dict[int, torch.Generator], num_rows: Tensor) -> None:
        self.seeds = torch.empty(int(num_rows.sum()), dtype=torch.int64).random_(0, 2**31)
        self._generators, self._num_rows = generators, num_rows.tolist()
        self._states = {i: generator.get_state() for i, generator in generators.items()}
        parts = self.seeds.split(self._num_rows)
        for i, generator in generators.items():
            parts[i].random_(0, 2**31, generator=generator)

    def keep(self, num_tokens: Tensor) -> None:
        """Give back the numbers of a request's rows after the first `num_tokens` [B]."""
        for i, count in enumerate(num_tokens.tolist()):
            if i in self._generators and count < self._num_rows[i]:
                self._generators[i].set_state(self._states[i])
                torch.empty(count, dtype=torch.int64).random_(
                    0, 2**31, generator=self._generators[i]
                )
