"""Drafts of vLLM's engines: arguments, verification and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridengine.engine.vllm.sampling import FusedSampler
from hybridengine.run.messages import all_gather_values
from hybridengine.speculation.sampler import DraftSampler

__all__ = ["NgramDrafts"]


class NgramDrafts:
    """Counts the drafts that the scheduler of `llm`, a `vllm.LLM` in this process, has verified."""

    def __init__(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.make_spec_decoding_stats = self._observe
        self._num_speculative_tokens = scheduler.num_spec_tokens
        self.reset()

    @staticmethod
    def arguments(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for a `speculative_config`."""
        return {"speculative_config": dict(config)}

    @staticmethod
    def use_sampler(runner: Any, fused: FusedSampler) -> None:
        """Let vLLM's first model runner verify drafts by its sampler `fused`, on a CPU."""
        if runner.device.type == "cpu":
            runner.rejection_sampler = DraftSampler(runner, fused)

    def reset(self) -> None:
        """Count from 0."""
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        self.stats = SpecDecodingStats.new(self._num_speculative_tokens)

    def _observe(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **others: Any
    ) -> None:
        """Count a request's drafts of a step; vLLM calls it, and its own statistics are off."""
        if num_draft_tokens:
            self.stats.observe_draft(num_draft_tokens, num_accepted_tokens)

    def metrics(self) -> dict[str, float]:
        """Return metrics of all engines since the last `reset`. Collective.

        rollout/draft_acceptance_rate: accepted by drafted tokens; 0 without drafts.
        rollout/accepted_length: tokens of a step with drafts, the sampled one included.
        """
        own = [self.stats.num_drafts, self.stats.num_draft_tokens, self.stats.num_accepted_tokens]
        num_steps, num_drafted, num_accepted = map(
            sum, zip(*all_gather_values(own, list[int]), strict=True)
        )
        return {
            "rollout/draft_acceptance_rate": num_accepted / max(num_drafted, 1),
            "rollout/accepted_length": 1 + num_accepted / max(num_steps, 1),
        }
