"""Generate and score responses to a batch of prompts, on all ranks that have an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridengine.agents import AgentRunner
from hybridengine.agents.trajectories import score_trajectories
from hybridengine.engine.engine import RolloutEngine, SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.rewards.reward_model import RewardModel
from hybridengine.run.config import RLConfig
from hybridengine.run.session import Session
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.rewards.manager import ResponseTokens, RewardManager, score_checked
from hybridengine.train.rollouts import Rollouts


def sampling_of(config: RLConfig) -> SamplingSpec:
    """Return how `rollout` samples the responses that are trained on."""
    r = config.rollout
    limit, records = config.data.max_response_length, config.actor.router_replay == "rollout"
    kept = config.replays_sampling
    return SamplingSpec(r.n, r.temperature, r.top_p, r.top_k, limit, r.stop, kept, records)


def val_sampling_of(config: RLConfig) -> SamplingSpec:
    """Return how `rollout.val_kwargs` samples responses."""
    v, limit = config.rollout.val_kwargs, config.data.max_response_length
    temperature = v.temperature if v.do_sample else 0.0
    return SamplingSpec(v.n, temperature, v.top_p, v.top_k, limit, config.rollout.stop)


def gather_rollouts(
    prompts: Subset[PromptSample],
    own: Sequence[Response],
    session: Session,
    reward_model: RewardModel | None,
) -> Rollouts:
    """Gather what each rank has of the responses to `prompts`; add the reward model's score.

    Collective.
    """
    with session.phase("gather_rollouts"):
        rollouts = Rollouts.gather(prompts, own, session.rank)
    if reward_model is not None:
        with session.phase("reward"):
            scores = reward_model.score(rollouts)
            rollouts = rollouts.add_reward("reward_model", reward_model.weight, scores)
    return rollouts


@dataclass(frozen=True)
class RolloutGenerator:
    """Spreads a batch of prompts over the engine's replicas and scores the responses.

    agents: runs trajectories of several turns; None: a response is one completion.
    weights_checksum: returns those of the weights that the engine has generated with, by version;
      raises RolloutError if they are not the trainer's.
    """

    engine: RolloutEngine
    tokenizer: Any
    reward: RewardManager
    session: Session
    reward_model: RewardModel | None
    agents: AgentRunner | None = None
    weights_checksum: Callable[[], Mapping[int, str]] = dict  # {}: not known

    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        """Generate and score spec.n responses per prompt, in the prompts' order. Collective."""
        replica, replicas = self.engine.replica, self.engine.replicas
        samples = {i: prompts[i] for i in range(replica, len(prompts), replicas)}
        own = self.respond(samples, spec, seed)
        return gather_rollouts(prompts, own, self.session, self.reward_model)

    def respond(
        self, samples: Mapping[int, PromptSample], spec: SamplingSpec, seed: int
    ) -> list[Response]:
        """Return the scored responses of this engine's `samples`, given by their position in the
        batch; [] on all but the first rank of an engine."""
        respond = self._respond if self.agents is None else self._act
        responses = respond(samples, spec, seed)
        if not (checksums := self.weights_checksum()):
            return responses
        return [
            replace(r, weights_checksums=[checksums[version] for version, _ in r.versions])
            for r in responses
        ]

    def _respond(
        self, samples: Mapping[int, PromptSample], spec: SamplingSpec, seed: int
    ) -> list[Response]:
        with self.session.phase("gen"):
            completions = self.engine.generate(
                [sample.prompt_ids for sample in samples.values()],
                spec,
                seed,
                [sample.images for sample in samples.values()],
            )
        if not samples or self.engine.tp_rank != 0:  # the replica's other ranks have the same
            return []
        with self.session.phase("reward"):
            groups = [i for i in samples for _ in range(spec.n)]
            return self._score(samples, groups, [c for part in completions for c in part])

    def _act(
        self, samples: Mapping[int, PromptSample], spec: SamplingSpec, seed: int
    ) -> list[Response]:
        assert self.agents is not None
        with self.session.phase("gen"):
            trajectories = self.agents.run(self.engine, samples, spec, seed)
        with self.session.phase("reward"):
            return score_trajectories(trajectories, self.tokenizer, self.reward)

    def _score(
        self, samples: Mapping[int, PromptSample], groups: list[int], completions: list[Response]
    ) -> list[Response]:
        ids, scored = [c.token_ids for c in completions], [samples[i] for i in groups]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        tokens = list(map(ResponseTokens, ids))
        result = score_checked(self.reward, scored, texts, tokens)
        return [
            replace(c.compact(), group=i, text=texts[k], **result.fields_of(k))
            for k, (i, c) in enumerate(zip(groups, completions, strict=True))
        ]
