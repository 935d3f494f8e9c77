"""Where a trainer rank gets its rollouts from: by default from engines on the same ranks.

`RolloutGenerator` generates and scores the responses to a batch of prompts on the ranks that have
an engine. `WeightsChecksum` proves whose weights they were sampled from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hybridengine.engine.interface import RolloutEngine, SamplingSpec, derive_seed
from hybridengine.model import SharedParameters
from hybridengine.model.shared_weights import LayeredWeights
from hybridengine.run.config import RLConfig
from hybridengine.run.errors import RolloutError
from hybridengine.run.messages import all_gather_values
from hybridengine.run.session import Session
from hybridengine.sync.layout import LayoutError
from hybridengine.sync.resharder import SyncReport
from hybridengine.sync.weight_target import EngineState, WeightTarget, target_of
from hybridengine.train.build import RunData, build_engine, build_resharder
from hybridengine.train.choices import Choices, refuse_shared
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.models import Actor
from hybridengine.train.rewards.manager import ResponseTokens, RewardManager, score_checked
from hybridengine.train.rollouts import Rollouts, ScoredResponse

_ENGINE = "the engine"  # of this process


Scorer = Callable[[Rollouts], Rollouts]  # adds a score to rollouts; collective


class SharedWeights(NamedTuple):
    """What the policy uses of the engine's weights.

    base: frozen parameter of a LoRA run → its view of the engine's tensors, or `LayeredWeights`.
    unsharded: trained parameter → the view that it is computed with, or `SlicedWeights`.
    target: the engine's weights.
    reason: why both are empty, and the policy is computed with what it gathers.
    """

    base: Mapping[str, torch.Tensor] = MappingProxyType({})
    unsharded: Mapping[str, torch.Tensor] = MappingProxyType({})
    target: WeightTarget | None = None
    reason: str = ""

    def describe(self) -> str:
        """Return a line of the plan of the run."""
        if self.reason:
            return f"gathered from shards: {self.reason}"
        weights, by = self.base or self.unsharded, ""
        if isinstance(weights, LayeredWeights):
            by = f", {weights.origin}"
        return f"the engine's{by}{', as the base of the adapters' if self.base else ''}"


def share_weights(config: RLConfig, choices: Choices, engine: RolloutEngine) -> SharedWeights:
    """Take the engine's weights where that was chosen. Collective.

    Raises ConfigError: `model.share_engine_weights` is on, and the engine holds a parameter in
    another form.
    """
    if not choices.shares:
        return SharedWeights(reason=choices.reasons["shares"])
    from hybridengine.engine.vllm.engine import VllmEngine

    assert isinstance(engine, VllmEngine)
    frozen = config.model.lora_rank > 0
    try:
        views = engine.share_weights(getattr(torch, config.sharding.dtype), frozen)
    except LayoutError as error:
        refuse_shared(config, str(error))
        return SharedWeights(reason=str(error))
    return SharedWeights(base=views) if frozen else SharedWeights({}, views, engine.target)


class WeightsChecksum:
    """Compares the weights of engines with what the last sync wrote; for runs that write rollouts.

    read: returns what the engines hold by their names, each with `version` and `checksum`; by
      default that of `engine` itself.

    With unmerged adapters the checksum is that of the adapters and of what else a sync writes.
    """

    def __init__(
        self,
        config: RLConfig,
        engine: RolloutEngine,
        read: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._is_wanted = config.trainer.rollout_freq > 0
        self._engine = engine
        self._read = read or (lambda: {_ENGINE: EngineState.of(target_of(engine))})
        self._synced: Mapping[str, Any] = {}
        self._of_version = dict[int, str]()  # the newest one, and those of responses that run

    def before_sync(self) -> None:
        """Check the weights that running responses were sampled from, before others come."""
        if self._engine.in_flight is not None and self._synced:
            self._check()

    def after_sync(self, left: EngineState | None = None) -> None:
        """Note what a sync has left in the engine.

        left: its state, where the sync knows it.

        Raises RolloutError if an engine has not taken part.
        """
        if not self._is_wanted:
            return
        self._synced = self._read() if left is None else {_ENGINE: left}
        newest = self._engine.weight_version
        for name, held in self._synced.items():
            expected = next(iter(self._synced.values())).checksum
            self._of_version[newest or 0] = expected  # a version may be synced several times
            if (held.version, held.checksum) != (newest, expected):
                raise RolloutError(
                    f"{name} missed the sync to version {newest}: it has weights of version "
                    f"{held.version} with the checksum {held.checksum}, expected is {expected}. "
                    "Something other than the trainer writes to it; start it again"
                )

    def __call__(self) -> Mapping[int, str]:
        """Return the checksum by version, of those since the last call; {} where not wanted.

        Raises RolloutError if the weights are not those that the last sync has left.
        """
        self._check()
        checksums = dict(self._of_version)
        newest = max(checksums, default=0)
        self._of_version = {v: x for v, x in checksums.items() if v == newest}
        return checksums

    def _check(self) -> None:
        if not self._is_wanted:
            return
        for name, held in self._read().items():
            synced = self._synced.get(name)
            if held != synced:
                raise RolloutError(
                    f"the weights of {name} have changed since the sync to version {held.version} "
                    f"(checksum {held.checksum}, then {synced and synced.checksum}): something "
                    "other than the trainer writes to them, and responses are not the policy's. "
                    "`hybridengine doctor --attach --verify` names the tensors"
                )


class RolloutSource(ABC):
    """All methods are collective over the trainer ranks.

    shared: what the policy uses of the engine's weights.
    tp_size: ranks of an engine, over which it slices parameters.
    """

    shared = SharedWeights()
    tp_size: int

    @abstractmethod
    def sliced_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the dimension in which a rank's engine slices each parameter, if it does."""

    @abstractmethod
    def connect(self, actor: Actor, reward_model: Scorer | None) -> None:
        """Prepare the weight sync from `actor`, and what scores rollouts besides the reward."""

    @abstractmethod
    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        """Generate and score spec.n responses to each prompt with the newest weights."""

    @abstractmethod
    def next_batch(self, step: int, number: int) -> Rollouts:
        """Return the next batch of training rollouts; number: of those of `step`, from 0."""

    @abstractmethod
    def sync(self, version: int) -> SyncReport:
        """Write the policy's weights into every engine."""

    def sleep(self) -> None:  # noqa: B027, optional
        """Free device memory for the update."""

    def metrics(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        """Return metrics of the rollouts that `step` is trained on."""
        return {}

    def stop_signal(self) -> int:
        """Return the number of a stop signal that an engine rank has received; 0: none."""
        return 0

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return lines of the plan of the run, by name."""

    @abstractmethod
    def summary(self, last: SyncReport) -> dict[str, Any]:
        """Return entries of summary.json. last: of the last sync."""

    def end(self) -> None:  # noqa: B027, optional
        """Begin to release the engines: no more rollouts are needed."""

    @abstractmethod
    def close(self) -> None:
        """Release the engines."""


class ColocatedRollouts(RolloutSource):
    """A part of an engine on every trainer rank: generation and training take turns."""

    def __init__(self, config: RLConfig, choices: Choices, session: Session, data: RunData) -> None:
        self._config, self._choices = config, choices
        self._session, self._data = session, data
        self._sampling = sampling_of(config)
        with session.phase("start_engine"):
            self.engine = build_engine(config, data.tokenizer, choices.engine, exact=choices.exact)
            self.tp_size = self.engine.tp_size
            self._layout = target_of(self.engine).layout  # of all parameters
            self.shared = share_weights(config, choices, self.engine)
        self._checksum = WeightsChecksum(config, self.engine)
        self.engine.sleep()

    def sliced_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        return self._layout.sliced_dims(shapes)

    def connect(self, actor: Actor, reward_model: Scorer | None) -> None:
        shared = self.shared
        if shared.target is not None:
            SharedParameters(actor.model, shared.unsharded, shared.target)
            actor.between_steps = lambda: self.sync(self._session.step)
        with self._session.phase("plan_reshard"):
            self._resharder = build_resharder(
                self._config, actor, self.engine, self._choices.delta, shared.base
            )
        data = self._data
        scoring = (data.tokenizer, data.reward, self._session, reward_model, data.agents)
        self._generator = RolloutGenerator(self.engine, *scoring, self._checksum)

    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        return self._generator.generate(prompts, spec, seed)

    def next_batch(self, step: int, number: int) -> Rollouts:
        if number == 0 and self.engine.drafts is not None:
            self.engine.drafts.reset()
        seed = derive_seed(self._config.seed, step, number)
        return self.generate(self._data.loader.next_batch(), self._sampling, seed)

    def sync(self, version: int) -> SyncReport:
        with self._session.phase("update_weights"):
            report = self._resharder.sync(version)
            self._checksum.after_sync(self._resharder.engine_state)
            return report

    def sleep(self) -> None:
        self.engine.sleep()

    def metrics(self, step: int, rollouts: Rollouts) -> dict[str, float]:
        return {} if self.engine.drafts is None else self.engine.drafts.metrics()

    def describe(self) -> dict[str, str]:
        plan, mib = self._resharder.plan, 2.0**20
        rows = {
            "weight sync": f"into {type(self.engine).__name__}: "
            f"{max(plan.bytes_received) / mib:.1f} MiB received per rank and step (lower bound "
            f"{max(plan.lower_bound) / mib:.1f}), {len(plan.buckets)} buckets of up to "
            f"{plan.staging_bytes / mib:.1f} MiB",
            "unsharded weights": self.shared.describe(),
        }
        return rows | ({"fully gathered": ", ".join(plan.fallback)} if plan.fallback else {})

    def summary(self, last: SyncReport) -> dict[str, Any]:
        return {
            "tp_size": self.tp_size,
            "reshard_bytes_received_by_last_sync_per_rank": all_gather_values(
                last.bytes_received, int
            ),
            "reshard_bytes_received_by_dense_sync_per_rank": self._resharder.plan.bytes_received,
            "reshard_bytes_lower_bound_of_dense_sync_per_rank": self._resharder.plan.lower_bound,
        }

    def close(self) -> None:
        self.engine.shutdown()


def sampling_of(config: RLConfig) -> SamplingSpec:
    """Return how `rollout` samples the responses that are trained on."""
    r = config.rollout
    return SamplingSpec(
        n=r.n,
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        max_tokens=config.data.max_response_length,
        stop=r.stop,
        record_kept=config.replays_sampling,
        record_routes=config.actor.router_replay == "rollout",
        record_likely=config.algorithm.score_centering.num_likely,
    )


def val_sampling_of(config: RLConfig) -> SamplingSpec:
    """Return how `rollout.val_kwargs` samples responses."""
    v = config.rollout.val_kwargs
    return SamplingSpec(
        n=v.n,
        temperature=v.temperature if v.do_sample else 0.0,
        top_p=v.top_p,
        top_k=v.top_k,
        max_tokens=config.data.max_response_length,
        stop=config.rollout.stop,
    )


def gather_rollouts(
    prompts: Subset[PromptSample],
    own: Sequence[ScoredResponse],
    session: Session,
    reward_model: Scorer | None,
) -> Rollouts:
    """Gather what each rank has of the responses to `prompts`; add the reward model's score.

    Collective.
    """
    with session.phase("gather_rollouts"):
        rollouts = Rollouts.gather(prompts, own, session.rank)
    if reward_model is None:
        return rollouts
    with session.phase("reward"):
        return reward_model(rollouts)


@dataclass(frozen=True)
class RolloutGenerator:
    """Spreads a batch of prompts over the engine's replicas and scores the responses.

    reward_model: scores the responses of all ranks, besides the reward functions.
    agents: its `respond` takes the generator and the arguments of `respond` here, and returns the
      scored responses of trajectories of several turns; None: a response is one completion.
    weights_checksum: returns those of the weights that the engine has generated with, by version;
      raises RolloutError if they are not the trainer's.
    """

    engine: RolloutEngine
    tokenizer: Any
    reward: RewardManager
    session: Session
    reward_model: Scorer | None
    agents: Any = None
    weights_checksum: Callable[[], Mapping[int, str]] = dict  # {}: not known

    def generate(self, prompts: Subset[PromptSample], spec: SamplingSpec, seed: int) -> Rollouts:
        """Generate and score spec.n responses per prompt, in the prompts' order. Collective."""
        replica, replicas = self.engine.replica, self.engine.replicas
        samples = {i: prompts[i] for i in range(replica, len(prompts), replicas)}
        own = self.respond(samples, spec, seed)
        return gather_rollouts(prompts, own, self.session, self.reward_model)

    def respond(
        self, samples: Mapping[int, PromptSample], spec: SamplingSpec, seed: int
    ) -> list[ScoredResponse]:
        """Return the scored responses of this engine's `samples`, given by their position in the
        batch; [] on all but the first rank of an engine."""
        if self.agents is None:
            responses = self._complete(samples, spec, seed)
        else:
            responses = self.agents.respond(self, samples, spec, seed)
        if not (checksums := self.weights_checksum()):
            return responses
        return [
            replace(r, weights_checksums=[checksums[version] for version, _ in r.response.versions])
            for r in responses
        ]

    def _complete(
        self, samples: Mapping[int, PromptSample], spec: SamplingSpec, seed: int
    ) -> list[ScoredResponse]:
        """Return the completions of the prompts, scored."""
        with self.session.phase("gen"):
            groups = self.engine.generate(
                [sample.prompt_ids for sample in samples.values()],
                spec,
                seed,
                [sample.images for sample in samples.values()],
            )
        if not samples or self.engine.tp_rank != 0:  # the replica's other ranks have the same
            return []
        with self.session.phase("reward"):
            own = [(i, c) for i, group in zip(samples, groups, strict=True) for c in group]
            tokens = [ResponseTokens(c.token_ids) for _, c in own]
            texts = self.tokenizer.batch_decode([t.ids for t in tokens], skip_special_tokens=True)
            result = score_checked(self.reward, [samples[i] for i, _ in own], texts, tokens)
            return [
                ScoredResponse(c.compact(), i, texts[k], result.of(k))
                for k, (i, c) in enumerate(own)
            ]
