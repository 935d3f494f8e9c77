"""Generate and score responses; every rank gets the same list of rollouts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridengine.data import PromptSample
from hybridengine.rewards import RewardManager, score_checked
from hybridengine.rollout import Completion, RolloutEngine, SamplingSpec
from hybridengine.runtime.session import Session

if TYPE_CHECKING:
    from hybridengine.trainer.models import RewardModel

SCORE_NAMES = ("score", "reward", "seq_reward")  # of the score; the last two are verl's


@dataclass(frozen=True)
class Rollout:
    """One scored response. log_probs are the engine's, one per response token.

    group: position of its prompt in the batch; responses of one prompt share it.
    parts: by name, (weight, score) of each reward; the score is their weighted sum.
    pred: a number that stands for the answer in majority votes, where the reward returns one.
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
    pred: float | None = None

    @property
    def results(self) -> dict[str, float]:
        """The score and the further results of the reward, by name."""
        return {"score": self.score, **self.extras}

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.sample.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class RolloutGenerator:
    """Spreads a batch of prompts over the engine's replicas, scores, and gathers the rollouts."""

    engine: RolloutEngine
    tokenizer: Any
    reward: RewardManager
    session: Session
    reward_model: RewardModel | None

    def generate(
        self, samples: Sequence[PromptSample], spec: SamplingSpec, seed: int
    ) -> list[Rollout]:
        """Generate and score spec.n responses per sample, in the samples' order. Collective."""
        replica, replicas = self.engine.replica, self.engine.replicas
        own = range(replica, len(samples), replicas)
        with self.session.phase("gen"):
            completions = self.engine.generate([samples[i].prompt_ids for i in own], spec, seed)
        rollouts: list[Rollout] = []
        if own and self.engine.tp_rank == 0:  # the replica's other ranks have the same
            with self.session.phase("reward"):
                groups = [i for i in own for _ in range(spec.n)]
                rollouts = self._score(samples, groups, [c for part in completions for c in part])
        with self.session.phase("gather_rollouts"):
            gathered: list[list[Rollout]] = [[] for _ in range(self.session.world_size)]
            dist.all_gather_object(gathered, rollouts)
        rollouts = sorted((r for part in gathered for r in part), key=lambda r: r.group)
        return rollouts if self.reward_model is None else self._add_model_scores(rollouts)

    def _score(
        self, samples: Sequence[PromptSample], groups: list[int], completions: list[Completion]
    ) -> list[Rollout]:
        ids, scored = [c.token_ids for c in completions], [samples[i] for i in groups]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        result = score_checked(self.reward, scored, texts, list(map(len, ids)))
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
        assert self.reward_model is not None
        with self.session.phase("reward"):
            scores = self.reward_model.score(rollouts)
        weight = self.reward_model.weight
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
    """Return the rewards that gdpo normalises separately: (values per rollout, weights).

    names: results of the reward (algorithm.gdpo_reward_keys); none: the parts of the score.
    weights: one per name; None: the weight of a part of the score, 1 for any other result.
    """
    known = rollouts[0].parts
    names = names or tuple(known)
    default_weights = tuple(known[name][0] if name in known else 1.0 for name in names)

    def value(r: Rollout, name: str) -> float:
        if name in r.parts:
            return r.parts[name][1]
        return r.score if name in SCORE_NAMES else r.extras[name]

    values = [[value(r, name) for name in names] for r in rollouts]
    return values, tuple(weights or default_weights)


def format_rollout(r: Rollout) -> str:
    """Format prompt, response and results for the console."""
    results = ", ".join(f"{name} {value:g}" for name, value in r.results.items())
    return (
        f"scored sample: prompt {r.sample.prompt_text[-200:]!r}\n"
        f"  response {r.response_text[:300]!r}, ground truth {r.sample.ground_truth!r}\n"
        f"  {results}"
    )


def select_groups(
    batches: Sequence[Sequence[Rollout]], metric: str, num_groups: int
) -> tuple[list[Rollout], int]:
    """Select up to `num_groups` groups, those with signal first (DAPO's dynamic sampling).

    A group has signal if `metric` ("score", or a further result of the reward) differs among its
    responses, or if it has one response only. batches: one list of rollouts per generated batch;
    the selected groups are numbered from 0. Returns (their rollouts, how many have signal).
    """
    groups: dict[tuple[int, int], list[Rollout]] = {}
    for number, batch in enumerate(batches):
        for r in batch:
            groups.setdefault((number, r.group), []).append(r)
    name = "score" if metric in SCORE_NAMES else metric
    has_signal = [len(g) == 1 or len({r.results[name] for r in g}) > 1 for g in groups.values()]
    ordered = sorted(zip(has_signal, groups.values(), strict=True), key=lambda pair: not pair[0])
    selected = ordered[:num_groups]
    renumbered = [replace(r, group=i) for i, (_, group) in enumerate(selected) for r in group]
    return renumbered, sum(signal for signal, _ in selected)
