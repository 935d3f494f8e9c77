"""From prompts to scored rollouts, the same list on every rank."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridengine.data import PromptSample
from hybridengine.rewards import RewardManager, score_checked
from hybridengine.rollout import Completion, RolloutEngine, SamplingSpec
from hybridengine.runtime import Session

if TYPE_CHECKING:
    from hybridengine.trainer.reward_model import RewardModel

__all__ = [
    "SCORE_NAMES",
    "Rollout",
    "RolloutMaker",
    "reward_parts",
    "scored_sample",
    "select_groups",
]

SCORE_NAMES = ("score", "reward", "seq_reward")  # the score itself, under verl's names too


@dataclass(frozen=True)
class Rollout:
    """One scored response. log_probs are the engine's, one per response token.

    group: position of its prompt in the batch; responses of one prompt share it.
    parts: (weight, score) by name of the rewards whose weighted sum the score is.
    """

    group: int
    sample: PromptSample
    response_text: str
    response_ids: Sequence[int]
    log_probs: Sequence[float]
    score: float
    extras: dict[str, float]
    finish_reason: str
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    pred: float | None = None  # stands for its answer, where the reward gives one to vote on

    @property
    def results(self) -> dict[str, float]:
        return {"score": self.score, **self.extras}

    @property
    def num_tokens(self) -> int:
        return len(self.sample.prompt_ids) + len(self.response_ids)


class RolloutMaker:
    """Spreads a batch of prompts over the engine's replicas, scores, and gathers everything."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Any,
        reward: RewardManager,
        session: Session,
        reward_model: RewardModel | None = None,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._reward, self._session, self._reward_model = reward, session, reward_model

    def make(self, samples: Sequence[PromptSample], spec: SamplingSpec, seed: int) -> list[Rollout]:
        """spec.n rollouts per sample, ordered by sample; identical on every rank."""
        replica, replicas = self._engine.replica, self._engine.replicas
        mine = range(replica, len(samples), replicas)
        with self._session.phase("gen"):
            completions = self._engine.generate([samples[i].prompt_ids for i in mine], spec, seed)
        rollouts: list[Rollout] = []
        if self._engine.tp_rank == 0:  # the other ranks of a replica hold the same completions
            with self._session.phase("reward"):
                groups = [i for i in mine for _ in range(spec.n)]
                rollouts = self._scored(
                    samples, groups, [c for group in completions for c in group]
                )
        with self._session.phase("gather_rollouts"):
            gathered: list[list[Rollout]] = [[] for _ in range(self._session.world_size)]
            dist.all_gather_object(gathered, rollouts)
        rollouts = sorted((r for part in gathered for r in part), key=lambda r: r.group)
        return rollouts if self._reward_model is None else self._add_model_scores(rollouts)

    def _scored(
        self, samples: Sequence[PromptSample], groups: list[int], completions: list[Completion]
    ) -> list[Rollout]:
        ids, asked = [c.token_ids for c in completions], [samples[i] for i in groups]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        result = score_checked(self._reward, asked, texts, list(map(len, ids)))
        return [
            Rollout(
                group=i,
                sample=samples[i],
                response_text=texts[k],
                response_ids=array("i", c.token_ids),  # lists take 8 times the memory
                log_probs=array("f", c.log_probs),
                score=result.scores[k],
                extras={name: x[k] for name, x in result.extras.items() if name != "pred"},
                finish_reason=c.finish_reason,
                parts={name: (p.weight, p.scores[k]) for name, p in result.parts.items()},
                pred=result.extras["pred"][k] if "pred" in result.extras else None,
            )
            for k, (i, c) in enumerate(zip(groups, completions, strict=True))
        ]

    def _add_model_scores(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        assert self._reward_model is not None
        with self._session.phase("reward"):
            scores = self._reward_model.score(rollouts)
        weight = self._reward_model.weight
        return [
            replace(
                r,
                score=r.score + weight * score,
                extras={**r.extras, "reward_model": score},
                parts={**r.parts, "reward_model": (weight, score)},
            )
            for r, score in zip(rollouts, scores, strict=True)
        ]


def reward_parts(
    rollouts: Sequence[Rollout], names: Sequence[str], weights: Sequence[float] | None
) -> tuple[list[list[float]], tuple[float, ...]]:
    """The rewards that gdpo normalises each by itself: (their values per rollout, their weights).

    names: results of the reward (algorithm.gdpo_reward_keys); none: the parts of the score.
    weights: of those names; None: the part's own of a part of the score, 1 of any other result.
    """
    known = rollouts[0].parts
    names = names or tuple(known)
    own = tuple(known[name][0] if name in known else 1.0 for name in names)

    def value(r: Rollout, name: str) -> float:
        if name in r.parts:
            return r.parts[name][1]
        return r.score if name in SCORE_NAMES else r.extras[name]

    return [[value(r, name) for name in names] for r in rollouts], tuple(weights or own)


def scored_sample(r: Rollout) -> str:
    """What the reward makes of a response, for a person to read."""
    results = ", ".join(f"{name} {value:g}" for name, value in r.results.items())
    return (
        f"scored sample: prompt {r.sample.prompt_text[-200:]!r}\n"
        f"  response {r.response_text[:300]!r}, ground truth {r.sample.ground_truth!r}\n"
        f"  {results}"
    )


def select_groups(
    batches: Sequence[Sequence[Rollout]], metric: str, wanted: int
) -> tuple[list[Rollout], int]:
    """(rollouts of `wanted` groups, how many of these have signal), as DAPO samples them.

    A group has signal where `metric` ("score", or a further result of the reward) is not the same
    for all its responses, or where it has only one. Groups without it come last, in place of groups
    that are not there yet. batches: one list per generation; groups are numbered afresh.
    """
    groups: dict[tuple[int, int], list[Rollout]] = {}
    for number, batch in enumerate(batches):
        for r in batch:
            groups.setdefault((number, r.group), []).append(r)

    name = "score" if metric in SCORE_NAMES else metric
    has_signal = [len(g) == 1 or len({r.results[name] for r in g}) > 1 for g in groups.values()]
    ordered = sorted(zip(has_signal, groups.values(), strict=True), key=lambda pair: not pair[0])
    chosen = ordered[:wanted]
    renumbered = [replace(r, group=i) for i, (_, group) in enumerate(chosen) for r in group]
    return renumbered, sum(signal for signal, _ in chosen)
