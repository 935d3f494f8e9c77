"""The sampler of vLLM's second model runner, which GPUs have, by `sample_tokens`.

vLLM applies logits processors, temperature and min-p; the draw, top-k, top-p and the log-prob of
the token are one read of the logits and a part of a second, in place of a sort, a draw of noise and
a softmax of the vocabulary. The key of a draw is vLLM's: the request's seed and the position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler

from hybridengine.engine.response import token_ranks
from hybridengine.kernels import sample_tokens, token_log_probs

__all__ = ["FusedSecondSampler"]


class FusedSecondSampler(Sampler):
    """vLLM's sampler with another draw, where only sampled tokens have log-probs.

    Recorded sampling masks, replayed traces, several logits for a request and other log-probs are
    vLLM's own.
    """

    _is_exact = False
    _is_fused = False  # in the call that runs
    _log_probs: LogprobsTensors | None = None

    @staticmethod
    def install(sampler: Any, exact: bool = False) -> None:
        """Make a sampler of vLLM, with its state, one of this class.

        exact: log-probs are those of `token_log_probs`, as the trained model computes them, in
            steps where every request is sampled at a temperature, without other changes of logits.
        """
        if type(sampler) is Sampler:
            sampler.__class__ = FusedSecondSampler
            vars(sampler)["_is_exact"] = exact

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """Return vLLM's `SamplerOutput` for logits [B, V]."""
        rows = input_batch.idx_mapping_np
        wanted = self.get_logprobs_dims(rows)
        self._is_fused = (
            wanted in (None, (0, 0))
            and (wanted is None or self.logprobs_mode == "processed_logprobs")
            and not self.return_sampling_mask
            and self.trace_replay_state is None
            and logits.shape[0] == len(rows)
        )
        try:
            output = super().__call__(logits, input_batch)
        finally:
            log_probs, self._log_probs, self._is_fused = self._log_probs, None, False
        if wanted is not None and log_probs is not None:
            output.logprobs_tensors = log_probs
        return output

    def get_logprobs_dims(self, *args: Any, **kwargs: Any) -> tuple[int, int] | None:
        """Return what vLLM has to compute itself."""
        return None if self._is_fused else super().get_logprobs_dims(*args, **kwargs)

    def sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self._is_fused:
            return super().sample(logits, *args, **kwargs)
        states, (mapping, _, rows, positions, *_) = self.sampling_states, args
        skip: Any = {"skip_top_k_top_p": True}
        given, logits = logits, self.apply_sampling_params(logits, *args, **skip)
        top_k, top_p = states.get_top_k_top_p(mapping, rows)
        sampled = sample_tokens(
            logits,
            states.seeds.gpu[mapping],
            positions.long(),
            temperature=(states.temperature.gpu[mapping] > 0).float(),  # is applied: 1 or greedy
            top_k=0 if top_k is None else top_k,
            top_p=1.0 if top_p is None else top_p,
        )
        tokens, log_probs = sampled.tokens, sampled.log_probs
        if self._is_exact and not states.any_greedy(rows):
            log_probs, _ = token_log_probs(given.float(), tokens, states.temperature.gpu[mapping])
        self._log_probs = LogprobsTensors(
            tokens.unsqueeze(1).to(torch.int32),
            log_probs.unsqueeze(1),
            token_ranks(logits, tokens),
        )
        return tokens, logits
