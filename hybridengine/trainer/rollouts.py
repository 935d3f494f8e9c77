"""From prompts to scored rollouts, the same list on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hybridengine.data import PromptSample
from hybridengine.distributed import Session
from hybridengine.rewards import RewardFunction, score_responses
from hybridengine.rollout import RolloutEngine, SamplingSpec

__all__ = ["Rollout", "RolloutMaker"]


@dataclass(frozen=True)
class Rollout:
    """One scored response. log_probs are the engine's, one per response token.

    group: position of its prompt in the batch; responses of one prompt share it.
    """

    group: int
    sample: PromptSample
    response_text: str
    response_ids: list[int]
    log_probs: list[float]
    score: float
    extras: dict[str, float]
    finish_reason: str

    @property
    def num_tokens(self) -> int:
        return len(self.sample.prompt_ids) + len(self.response_ids)


class RolloutMaker:
    """Spreads a batch of prompts over the engine's replicas, scores, and gathers everything."""

    def __init__(
        self, engine: RolloutEngine, tokenizer: Any, reward: RewardFunction, session: Session
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._reward, self._session = reward, session

    def make(self, samples: Sequence[PromptSample], spec: SamplingSpec, seed: int) -> list[Rollout]:
        """spec.n rollouts per sample, ordered by sample; identical on every rank."""
        replica, replicas = self._engine.replica, self._engine.replicas
        mine = range(replica, len(samples), replicas)
        with self._session.phase("gen"):
            completions = self._engine.generate([samples[i].prompt_ids for i in mine], spec, seed)
        rollouts: list[Rollout] = []
        if self._engine.tp_rank == 0:  # the other ranks of a replica hold the same completions
            with self._session.phase("reward"):
                flat = [(i, c) for i, group in zip(mine, completions, strict=True) for c in group]
                texts = self._tokenizer.batch_decode(
                    [c.token_ids for _, c in flat], skip_special_tokens=True
                )
                result = score_responses(self._reward, [samples[i] for i, _ in flat], texts)
                for k, (i, c) in enumerate(flat):
                    rollouts.append(
                        Rollout(
                            group=i,
                            sample=samples[i],
                            response_text=texts[k],
                            response_ids=c.token_ids,
                            log_probs=c.log_probs,
                            score=result.scores[k],
                            extras={name: v[k] for name, v in result.extras.items()},
                            finish_reason=c.finish_reason,
                        )
                    )
        with self._session.phase("gather_rollouts"):
            gathered: list[list[Rollout]] = [[] for _ in range(self._session.world_size)]
            dist.all_gather_object(gathered, rollouts)
        return sorted((r for part in gathered for r in part), key=lambda r: r.group)
