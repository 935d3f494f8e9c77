"""The trainers of the probes: those of a run, with data of full length in place of the real one."""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import replace
from typing import Any

from hybridengine.agents.trajectories import with_turns
from hybridengine.engine.interface import SamplingSpec
from hybridengine.engine.response import Response
from hybridengine.rewards.reward_model import RewardModel
from hybridengine.run.config import RLConfig, SFTConfig
from hybridengine.run.session import Session
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.models import Actor
from hybridengine.train.rewards.manager import ResponseTokens, Reward, score_checked
from hybridengine.train.rl import RLTrainer
from hybridengine.train.rollout_source import ColocatedRollouts, gather_rollouts
from hybridengine.train.rollouts import Rollouts, ScoredResponse
from hybridengine.train.sft import SFTTrainer
from hybridengine.train.start import Mode

__all__ = ["RLJob", "SFTJob"]

_PASSES = 2  # micro-batches of a rank and optimizer step: the second one finds gradients in memory


class _FullLength(ColocatedRollouts):
    """Rollouts of as many prompts as `num_prompts` says, whose responses have the full length.

    The engine generates nothing. The reward is called once, for the names of its results; a reward
    model is called for every response.
    """

    num_prompts = 0
    _results: Reward | None = None

    def connect(self, actor: Actor, reward_model: RewardModel | None) -> None:
        super().connect(actor, reward_model)
        self._reward_model = reward_model

    def next_batch(self, step: int, number: int) -> Rollouts:
        prompts = self._loader.next_batch()[: self.num_prompts]
        return self.generate(prompts, self._sampling, seed=step)

    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        session = self._session
        if self._results is None:
            turns = self._config.rollout.multi_turn.enable
            sample = with_turns(prompts[0]) if turns else prompts[0]
            scores = score_checked(self._reward, [sample], [""], [ResponseTokens([])])
            self._results = scores.of(0)
        mine = range(session.rank, len(prompts), session.world_size)
        own = [self._response(group, k, spec) for group in mine for k in range(spec.n)]
        return gather_rollouts(prompts, own, session, self._reward_model)

    def _response(self, group: int, number: int, spec: SamplingSpec) -> ScoredResponse:
        """Return a response whose score differs from that of the next one: it has a gradient.

        `RLJob` replaces its log-probs.
        """
        size, score = spec.max_tokens, float(number % 2)
        assert self._results is not None
        response = Response(
            array("i", [number % 2]) * size,
            array("f", [0.0]) * size,
            "stop",  # none is masked as truncated
            versions=[(0, size)],
        )
        reward = Reward(
            score,
            extras=dict.fromkeys(self._results.extras, score),
            parts={name: (weight, score) for name, (weight, _) in self._results.parts.items()},
        )
        return ScoredResponse(response, group, reward=reward)


class _FullLengthMode(Mode):
    def rollouts(self, *arguments: Any) -> _FullLength:
        return _FullLength(*arguments)


class RLJob(RLTrainer):
    """One rank whose steps train on responses of full length."""

    key = "actor.ppo_max_token_len_per_gpu"
    source: Any

    def __init__(self, config: RLConfig, session: Session) -> None:
        super().__init__(config, session, _FullLengthMode(config))
        self.printed_samples = True  # these are not worth printing
        self.sync(0)

    def _build_batch(self, rollouts: Rollouts) -> RolloutBatch:
        """Give made-up tokens the trainer's log-probs, so that real checks and corrections hold."""
        batch = super()._build_batch(rollouts)
        return replace(batch, rollout_log_probs=self.actor.old_log_probs(batch))

    @property
    def shortest(self) -> int:
        """The least tokens of a micro-batch on a rank: those of the longest sequence."""
        return -(-self.config.max_sequence_length // self.dp.sp_size)

    @property
    def longest(self) -> int:
        """Tokens of a rank in an optimizer step: more in one micro-batch change nothing."""
        config, ranks = self.config, self.dp.dp_size * self.dp.sp_size
        responses = config.ppo_mini_batch_size * config.rollout.n
        return max(self.shortest, -(-responses * config.max_sequence_length // ranks))

    def train_on(self, limit: int) -> int:
        """Run a step in micro-batches of up to `limit` tokens a rank; return its tokens."""
        config = self.config
        self.config = replace(config, actor=replace(config.actor, ppo_max_token_len_per_gpu=limit))
        ranks = self.dp.dp_size * self.dp.sp_size
        of_group = config.rollout.n * config.data.max_response_length
        wanted = math.ceil(_PASSES * limit * ranks / of_group)  # of an optimizer step
        self.source.num_prompts = self.num_mini_batches * min(wanted, config.ppo_mini_batch_size)
        self.session.step += 1
        self._step_started = time.perf_counter()
        _, lengths = self.step(self.session.step)
        return sum(lengths)


class SFTJob(SFTTrainer):
    """One rank whose steps train on the longest conversations."""

    key = "data.max_token_len_per_gpu"

    def __init__(self, config: SFTConfig, session: Session) -> None:
        super().__init__(config, session)
        rows = sorted(range(len(self.data)), key=lambda i: -len(self.data[i].ids))
        self._longest = Subset(self.data, rows[: config.data.train_batch_size])

    @property
    def shortest(self) -> int:
        return -(-len(self._longest[0].ids) // self.dp.sp_size)

    @property
    def longest(self) -> int:
        ranks = self.dp.dp_size * self.dp.sp_size
        return max(self.shortest, -(-sum(len(s.ids) for s in self._longest) // ranks))

    def train_on(self, limit: int) -> int:
        config = self.config
        self.config = replace(config, data=replace(config.data, max_token_len_per_gpu=limit))
        self.session.step += 1
        _, lengths = self.update(self.session.step, list(self._longest))
        return sum(lengths)
