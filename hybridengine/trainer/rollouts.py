"""Scored responses; tokens and texts stay on the rank that generated them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.data import PromptSample, Subset
from hybridengine.rollout.columns import ARRAY_CODES, COLUMNS, ColumnValues
from hybridengine.rollout.routes import encode_routes
from hybridengine.rollout.versions import VersionRuns
from hybridengine.trainer.exchange import RowExchange
from hybridengine.trainer.outcomes import Outcomes, RewardColumn

_TOKEN_FIELDS = {  # of ScoredResponse
    "response_ids": torch.int32,
    "log_probs": torch.float32,
    "sampled": torch.int8,
    "turn_rewards": torch.float32,
    "context_ids": torch.int32,
}


def token_columns() -> dict[str, torch.dtype]:
    """Return the types of the per-token columns of a response, the declared ones included."""
    return _TOKEN_FIELDS | {name: column.dtype for name, column in COLUMNS.items()}


@dataclass(frozen=True)
class ScoredResponse:
    """One scored response, as an engine on ranks of its own sends it: without its prompt.

    group: position of its prompt in the batch; responses of one prompt share it.
    log_probs: the engine's, one per response token.
    parts: by name, (weight, score) of each reward; the score is their weighted sum.
    extras, texts: further numbers and texts of the reward, by name.
    columns: as of `Completion`.
    versions: of the weights that sampled its tokens, those of tools and users left out.

    Of trajectories of several turns: sampled: 1 for each token of the model, 0 for those of tools
    and users; empty: all are the model's. turn_rewards: per token, rewards of turns; empty: none.
    context_ids: the prompt; empty: the sample's. is_last: see `Outcomes`. turns: all turns, as
    rollout files have them. turn_numbers: numbers of the trajectory, by name.
    """

    group: int
    response_text: str
    response_ids: Sequence[int]
    log_probs: Sequence[float]
    score: float
    extras: dict[str, float]
    finish_reason: str
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    columns: ColumnValues = field(default_factory=dict)
    versions: VersionRuns = ()
    sampled: Sequence[int] = ()
    turn_rewards: Sequence[float] = ()
    context_ids: Sequence[int] = ()
    is_last: bool = True
    turns: Sequence[Mapping[str, Any]] = ()
    turn_numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Of the weights that sampled the oldest token."""
        return min((version for version, _ in self.versions), default=0)

    @property
    def pred(self) -> str | None:
        """The answer that majority votes count, where the reward returns one."""
        return self.texts.get("pred")

    def compact(self) -> ScoredResponse:
        """Return it with arrays in place of lists of numbers, which take 8 times the memory."""
        fields: dict[str, Any] = {
            name: array(ARRAY_CODES[dtype], values)
            for name, dtype in _TOKEN_FIELDS.items()
            if (values := getattr(self, name))
        }
        columns = {name: COLUMNS[name].pack(values) for name, values in self.columns.items()}
        return replace(self, **fields, columns=columns)

    def columns_in_files(self) -> dict[str, Any]:
        """Return the declared columns that rollout files have: an entry or a list per token, or
        `encode_routes` of one whose tokens differ in their number of entries."""
        return {
            name: np.asarray(values).reshape(-1, *COLUMNS[name].shape).tolist()
            if COLUMNS[name].counts is None
            else encode_routes(values)
            for name, values in self.columns.items()
            if COLUMNS[name].in_files
        }

    def per_token(self, name: str) -> Sequence[int | float]:
        """Return a column of `token_columns`, empty where there is none."""
        values: Sequence[float] = (
            getattr(self, name) if name in _TOKEN_FIELDS else self.columns.get(name, ())
        )
        return values

    @property
    def results(self) -> dict[str, float]:
        """The score and the further results of the reward, by name."""
        return {"score": self.score, **self.extras}

    def of(self, sample: PromptSample, group: int) -> Rollout:
        """Return the rollout of this response to `sample`, which is number `group` of a batch."""
        return Rollout(**(vars(self) | {"sample": sample, "group": group}))


@dataclass(frozen=True, kw_only=True)
class Rollout(ScoredResponse):
    """One scored response with its prompt.

    advantage: mean over its tokens, where it is known.
    trained: what training computed per response token, by name, for rollout files.
    """

    sample: PromptSample
    advantage: float | None = None
    trained: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.context_ids or self.sample.prompt_ids

    @property
    def response(self) -> ScoredResponse:
        """The response without its prompt."""
        return ScoredResponse(**{f.name: getattr(self, f.name) for f in fields(ScoredResponse)})


@dataclass(frozen=True)
class Rollouts:
    """N scored responses of all ranks: the numbers of all, tokens and texts of this rank's own.

    prompts: prompts[g] is that of group g; every rank reads those that it needs from the dataset.
    own: what `rank` generated, in the order of `outcomes`. step: of the run, 0 outside a run.
    """

    prompts: Subset[PromptSample]
    outcomes: Outcomes
    own: Sequence[Rollout]
    rank: int = 0
    step: int = 0

    @staticmethod
    def gather(prompts: Subset[PromptSample], own: Sequence[Rollout], rank: int) -> Rollouts:
        """Gather the outcomes of all ranks, each of which passes its own rollouts. Collective.

        own: sorted by group; the responses to one prompt are all on one rank.
        """
        return Rollouts(prompts, own_outcomes(own, rank).gather(), own, rank)

    def column(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Return a column of `token_columns`: those of this rank's own rollouts, end to end."""
        empty = torch.empty(0, dtype=token_columns()[name]).numpy()
        parts = [np.asarray(r.per_token(name), empty.dtype) for r in self.own]
        return torch.from_numpy(np.concatenate([empty, *parts])).to(device)

    def move(
        self, exchange: RowExchange, device: torch.device | str, names: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Move the columns that are not empty to where `exchange` wants the rows. Collective.

        names: of the columns; None: all.
        """
        sizes = self.outcomes.sizes
        return {
            name: exchange(self.column(name, device), sizes[name])
            for name in (token_columns() if names is None else names)
            if sizes[name].any()
        }

    def gather_numbers(self, values: Sequence[float]) -> Tensor:
        """Gather one number per own rollout to float64 [N] on every rank. Collective."""
        numbers = torch.zeros(len(self.outcomes), dtype=torch.float64)
        numbers[self.outcomes.ranks == self.rank] = numbers.new_tensor(values)
        dist.all_reduce(numbers)  # exact: one rank's value plus zeros
        return numbers

    def add_reward(self, name: str, weight: float, scores: Tensor) -> Rollouts:
        """Add a declared reward, float64 [N], to the scores."""
        own_scores = scores[self.outcomes.ranks == self.rank].tolist()
        own = [
            replace(
                r,
                score=r.score + weight * score,
                extras={**r.extras, name: score},
                parts={**r.parts, name: (weight, score)},
            )
            for r, score in zip(self.own, own_scores, strict=True)
        ]
        return replace(self, outcomes=self.outcomes.add_reward(name, weight, scores), own=own)

    def with_advantages(self, advantages: Tensor) -> Rollouts:
        """Add the advantage of each response, [N], to this rank's own."""
        own_advantages = advantages[self.outcomes.ranks == self.rank].tolist()
        pairs = zip(self.own, own_advantages, strict=True)
        return replace(self, own=[replace(r, advantage=a) for r, a in pairs])

    def with_trained(self, columns: Mapping[str, Sequence[Tensor]]) -> Rollouts:
        """Add what training computed per token: by name, a tensor for each of this rank's own."""
        trained = [
            {name: rows[k].tolist() for name, rows in columns.items()} for k in range(len(self.own))
        ]
        own = [replace(r, trained=x) for r, x in zip(self.own, trained, strict=True)]
        return replace(self, own=own)

    def select(self, groups: Sequence[int]) -> Rollouts:
        """Select groups; they are numbered from 0 in the given order."""
        rows_of = [(self.outcomes.groups == group).nonzero().flatten() for group in groups]
        rows = torch.cat(rows_of)
        numbers = torch.repeat_interleave(torch.tensor([len(rows) for rows in rows_of]))
        outcomes = replace(self.outcomes.take(rows), groups=numbers)
        is_own = self.outcomes.ranks == self.rank
        selected = zip(rows.tolist(), numbers.tolist(), is_own[rows].tolist(), strict=True)
        position = (is_own.cumsum(0) - 1).tolist()
        own = [replace(self.own[position[row]], group=k) for row, k, mine in selected if mine]
        return replace(self, prompts=self.prompts.take(groups), outcomes=outcomes, own=own)

    @staticmethod
    def concatenate(batches: Sequence[Rollouts]) -> Rollouts:
        """Put batches one after another; the groups of each are numbered after the last one's."""
        prompts, outcomes = batches[0].prompts[:0], list[Outcomes]()
        for batch in batches:
            groups = batch.outcomes.groups + len(prompts)
            outcomes.append(replace(batch.outcomes, groups=groups))
            prompts = prompts + batch.prompts
        own = [r for batch in batches for r in batch.own]
        return Rollouts(prompts, Outcomes.concatenate(outcomes), own, batches[0].rank)


def own_outcomes(rollouts: Sequence[Rollout], rank: int) -> Outcomes:
    """Return the numbers of rollouts that `rank` generated."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    first = rollouts[0] if rollouts else None
    names = sorted(first.extras) if first else []
    parts = first.parts if first else {}
    has_preds = any(r.pred is not None for r in rollouts)
    answers = dict[str | None, float]()  # numbered, for all responses of a group are here
    turn_names = first.turn_numbers if first else {}
    groups = torch.tensor([r.group for r in rollouts], dtype=torch.int64)
    return Outcomes(
        groups=groups,
        ranks=torch.full_like(groups, rank),
        versions=groups.new_tensor([r.version for r in rollouts]),
        prompt_lengths=groups.new_tensor([len(r.prompt_ids) for r in rollouts]),
        is_truncated=torch.tensor([r.finish_reason == "length" for r in rollouts]).bool(),
        scores=column([r.score for r in rollouts]),
        sizes={
            name: groups.new_tensor([len(r.per_token(name)) for r in rollouts])
            for name in token_columns()
        },
        extras={name: column([r.extras[name] for r in rollouts]) for name in names},
        parts={
            name: RewardColumn(weight, column([r.parts[name][1] for r in rollouts]))
            for name, (weight, _) in parts.items()
        },
        turns={name: column([r.turn_numbers[name] for r in rollouts]) for name in turn_names},
        preds=column([answers.setdefault(r.pred, len(answers)) for r in rollouts])
        if has_preds
        else None,
        is_last=torch.tensor([r.is_last for r in rollouts]) if turn_names else None,
    )


def format_rollout(r: Rollout) -> str:
    """Format prompt, response and results for the console."""
    numbers = [f"{name} {value:g}" for name, value in r.results.items()]
    results = ", ".join(numbers + [f"{name} {text[:100]!r}" for name, text in r.texts.items()])
    return (
        f"scored sample: prompt {r.sample.prompt_text[-200:]!r}\n"
        f"  response {r.response_text[:300]!r}, ground truth {r.sample.ground_truth!r}\n"
        f"  {results}"
    )


def select_groups(
    batches: Sequence[Rollouts], metric: str, num_groups: int
) -> tuple[Rollouts, int]:
    """Select up to `num_groups` groups, those with signal first (DAPO's dynamic sampling).

    A group has signal if `metric` ("score", or a further result of the reward) differs among its
    responses, or if it has one response only. batches: one per generated batch; the selected groups
    are numbered from 0. Returns (their rollouts, how many have signal).
    """
    rollouts = Rollouts.concatenate(batches)
    values_of: dict[int, list[float]] = {}
    outcomes = rollouts.outcomes
    last = outcomes.last
    for group, value in zip(last.groups.tolist(), last.result(metric).tolist(), strict=True):
        values_of.setdefault(group, []).append(value)
    has_signal = {g: len(v) == 1 or len(set(v)) > 1 for g, v in values_of.items()}
    selected = sorted(has_signal, key=lambda group: not has_signal[group])[:num_groups]
    return rollouts.select(selected), sum(has_signal[group] for group in selected)
