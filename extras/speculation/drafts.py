"""Drafts of vLLM's engines: arguments, verification and counts."""

from __future__ import annotations

from typing import Any, get_args

from transformers import AutoConfig

from hybridengine.engine.interface import EngineOptions
from hybridengine.engine.vllm.sampling import FusedSampler
from hybridengine.model.stored import stored_quantization
from hybridengine.run.errors import ConfigError
from hybridengine.run.messages import all_gather_values
from hybridengine.speculation.config_checks import KEY
from hybridengine.speculation.sampler import DraftSampler
from hybridengine.sync.layout import LayoutError

__all__ = ["Drafts", "MtpDrafts"]


class Drafts:
    """Counts the drafts that the scheduler of `llm`, a `vllm.LLM` in this process, has verified."""

    def __init__(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.make_spec_decoding_stats = self._observe
        self._num_speculative_tokens = scheduler.num_spec_tokens
        self.reset()

    @staticmethod
    def arguments(options: EngineOptions) -> dict[str, Any]:
        """Return arguments of `vllm.LLM` besides those of the job."""
        return {}

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


class MtpDrafts(Drafts):
    """Drafts of the checkpoint's layers of multi-token prediction (MTP), which no sync writes.

    vLLM loads them, and takes embeddings and head from the policy's model: the same tensors, which
    a sync writes in place.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        super().__init__(llm)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        synced = set(runner.get_model().modules())
        for name, module in runner.get_draft_model().named_modules():
            if isinstance(module, VocabParallelEmbedding) and module not in synced:
                raise LayoutError(
                    f"{KEY}.method is mtp, but vLLM's drafter of this model has the weight "
                    f"{name!r} of its own, where a sync writes the policy's; use method ngram"
                )

    @staticmethod
    def arguments(options: EngineOptions) -> dict[str, Any]:
        """Return the arguments with which vLLM loads the layers, and nothing else.

        Raises ConfigError for a checkpoint whose layers it would not load as they are.
        """
        from vllm.config import LoadConfig
        from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

        model, config = options.model, options.rollout.engine_kwargs.vllm["speculative_config"]
        stored = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        if stored_quantization(stored) is not None:
            raise ConfigError(
                f"{KEY}.method is mtp, but the checkpoint at {model.path} is quantized, and its "
                "MTP layers would be read without their scales; use method ngram"
            )
        kind = stored.model_type
        drafter = SpeculativeConfig.hf_config_override(stored)
        known = drafter.model_type in get_args(MTPModelTypes)
        if not known or not getattr(drafter, "n_predict", None):
            raise ConfigError(
                f"{KEY}.method is mtp, but "
                + (
                    f"{model.path} declares no MTP layers"
                    if known
                    else f"vLLM has none of {kind!r}"
                )
                + "; use method ngram"
            )
        return {"speculative_config": {**config, "draft_load_config": LoadConfig()}}
