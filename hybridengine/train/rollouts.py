"""Scored responses: tokens and texts where they were generated, numbers of all on every rank.

`Outcomes` are a few dozen bytes a response. Group statistics, the selection of groups and the split
into micro-batches are pure functions of them, so every rank computes the same ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.engine.response import COLUMNS, Response
from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import RewardError, RolloutError
from hybridengine.run.messages import all_gather_values, decode, encode
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.exchange import RowExchange
from hybridengine.train.rewards.manager import SCORE_NAMES, Reward


class _Column:
    """An attribute of `Outcomes`: a column that is always there, [N] of `dtype`."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._name, self._dtype = name, dtype

    def __get__(self, outcomes: Outcomes, owner: type[Outcomes]) -> Tensor:
        return outcomes.values[outcomes.names.index(self._name)].to(self._dtype)


class _Columns:
    """An attribute of `Outcomes`: the columns whose names begin with `kind`, by the rest."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float64) -> None:
        self._kind, self._dtype = kind, dtype

    def __get__(self, outcomes: Outcomes, owner: type[Outcomes]) -> dict[str, Tensor]:
        kind, named = self._kind, zip(outcomes.names, outcomes.values, strict=True)
        return {n.removeprefix(kind): x.to(self._dtype) for n, x in named if n.startswith(kind)}


@dataclass(frozen=True)
class Outcomes:
    """Numbers of N responses in the order of their groups.

    names: of the K columns, among them those of `own_outcomes`.
    values: float64 [K, N] on the CPU, exact for integers up to 2^53.
    weights: of the declared rewards, by name; their weighted sum is the score.

    A trajectory of several turns is one response, or several in a row where the chat template
    rewrote its history; they have its score, and statistics count the last one.
    """

    names: Sequence[str]
    values: Tensor
    weights: Mapping[str, float]

    groups = _Column("group", torch.int64)  # the position of the prompt, which a group shares
    ranks = _Column("rank", torch.int64)  # the rank that has the tokens
    versions = _Column("version", torch.int64)  # of the weights that sampled the oldest token
    prompt_lengths = _Column("prompt_length", torch.int64)
    response_lengths = _Column("size/token_ids", torch.int64)  # with the tokens of tools and users
    num_sampled = _Column("num_sampled", torch.int64)  # of them the model's
    is_truncated = _Column("is_truncated", torch.bool)
    is_last = _Column("is_last", torch.bool)  # of its trajectory
    scores = _Column("score", torch.float64)
    sizes = _Columns("size/", torch.int64)  # elements of each of a response's `token_columns`
    extras = _Columns("extra/")  # further results of the reward
    counts = _Columns("count/")  # numbers of the reward that are metrics alone
    parts = _Columns("part/")  # scores of the declared rewards
    turns = _Columns("turn/")  # numbers of the trajectory

    def __len__(self) -> int:
        return self.values.shape[1]

    def optional(self, name: str) -> Tensor | None:
        """Return a column that only some jobs have, float64 [N], else None.

        pred: the answers that majority votes count, as numbers that are equal within a group where
          the answers are.
        baseline: the reward of the greedy response to the prompt.
        """
        return self.values[self.names.index(name)] if name in self.names else None

    @property
    def lengths(self) -> Tensor:
        """The tokens of prompt and response together, int64 [N]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def trajectories(self) -> Tensor:
        """The trajectory that each response belongs to, int64 [N], counted from 0."""
        return self.is_last.cumsum(0) - self.is_last.long()

    def sum_of_trajectories(self, numbers: Tensor) -> Tensor:
        """Sum a number per response over each of the M trajectories: [N] -> [M]."""
        sums = numbers.new_zeros(int(self.is_last.sum()))
        return sums.index_add(0, self.trajectories.to(numbers.device), numbers)

    @property
    def first(self) -> Outcomes:
        """The first response of each trajectory, whose prompt is the trajectory's."""
        return self.take(torch.cat([torch.tensor([True]), self.is_last[:-1]]).nonzero().flatten())

    @property
    def last(self) -> Outcomes:
        """The last response of each trajectory."""
        return self.take(self.is_last.nonzero().flatten())

    @property
    def results(self) -> dict[str, Tensor]:
        """The score and the further results of the reward, by name."""
        return {"score": self.scores, **self.extras}

    def result(self, name: str) -> Tensor:
        """Return the score, under any of its names, or a further result of the reward."""
        return self.scores if name in SCORE_NAMES else self.extras[name]

    def with_column(self, name: str, values: Tensor) -> Outcomes:
        """Set a column, [N]."""
        columns = {**dict(zip(self.names, self.values, strict=True)), name: values.double()}
        return replace(self, names=list(columns), values=torch.stack(list(columns.values())))

    def add_reward(self, name: str, weight: float, scores: Tensor) -> Outcomes:
        """Add a declared reward, float64 [N], to scores, results and parts."""
        added = self.with_column("score", self.scores + weight * scores)
        added = added.with_column(f"extra/{name}", scores).with_column(f"part/{name}", scores)
        return replace(added, weights={**self.weights, name: weight})

    def take(self, rows: Tensor) -> Outcomes:
        """Select rows, int64."""
        return replace(self, values=self.values[:, rows])

    @staticmethod
    def concatenate(outcomes: Sequence[Outcomes]) -> Outcomes:
        """Put outcomes with the same names one after another."""
        return replace(outcomes[0], values=torch.cat([o.values for o in outcomes], dim=1))

    def gather(self) -> Outcomes:
        """Return those of all ranks, of which each passes its own, sorted by group. Collective.

        Raises:
            RewardError: on every rank, where the results of two ranks have other names.
        """
        gathered = all_gather_values(self, Outcomes)
        parts = {rank: part for rank, part in enumerate(gathered) if len(part)}
        first = min(parts)
        results = {rank: (part.names, part.weights) for rank, part in parts.items()}
        for rank, result in results.items():
            if result != results[first]:
                raise RewardError(
                    f"the reward's results are {result} on rank {rank} and {results[first]} on "
                    f"rank {first}; a reward must return the same names for every response"
                )
        everything = Outcomes.concatenate(list(parts.values()))
        return everything.take(everything.groups.argsort(stable=True))


@dataclass(frozen=True)
class MultiTurn:
    """What a response is in a trajectory of several turns.

    context_ids: its prompt; empty: the sample's.
    images: those in `context_ids` and the tokens; without `context_ids` they follow the sample's.
    is_last: see `Outcomes`.
    turns: all turns, as rollout files have them.
    numbers: of the trajectory, by name; they become metrics.
    """

    context_ids: Sequence[int] = ()
    images: Sequence[Attachment] = ()
    is_last: bool = True
    turns: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredResponse:
    """A response with its text and what is known about it.

    response: as the engine has sampled it.
    group: position of its prompt in the batch; responses to one prompt share it.
    text: of the response.
    reward: its results.
    multi_turn: what agents add.
    weights_checksums: of the engine's weights, one for each run of `versions`; (): not known.
    advantage: mean over its tokens, where it is known.
    trained: what training computed per token, by name, for rollout files; None: not computed.
    """

    response: Response
    group: int = 0
    text: str = ""
    reward: Reward = field(default_factory=Reward)
    multi_turn: MultiTurn = field(default_factory=MultiTurn)
    weights_checksums: Sequence[str] = ()
    advantage: float | None = None
    trained: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    def column(self, name: str) -> Sequence[int | float]:
        """Return a column of `token_columns`, empty where there is none."""
        match name:
            case "token_ids" | "log_probs":
                numbers: Sequence[int | float] = getattr(self.response, name)
                return numbers
            case "context_ids":
                return self.multi_turn.context_ids
            case "images":
                return bytearray(encode([*images])) if (images := self.multi_turn.images) else ()
        return self.response.columns.get(name, ())

    def compact(self) -> ScoredResponse:
        """Return it with arrays in place of lists of tokens, as `Response.compact`."""
        place = replace(self.multi_turn, context_ids=array("i", self.multi_turn.context_ids))
        return replace(self, response=self.response.compact(), multi_turn=place)

    def prompt_ids(self, sample: PromptSample) -> Sequence[int]:
        """Return the tokens before the response to `sample`."""
        return self.multi_turn.context_ids or sample.prompt_ids


def token_columns() -> dict[str, torch.dtype]:
    """Return the types of a response's sequences of numbers, the declared columns included.

    images: those of tools, encoded.
    """
    return {
        "token_ids": torch.int32,
        "log_probs": torch.float32,
        "context_ids": torch.int32,
        "images": torch.uint8,
        **{name: column.dtype for name, column in COLUMNS.items()},
    }


@dataclass(frozen=True)
class Rollouts:
    """N scored responses of all ranks: the numbers of all, tokens and texts of this rank's own.

    prompts: prompts[g] is that of group g; every rank reads those that it needs from the dataset.
    own: what `rank` generated, in the order of `outcomes`.
    step: of the run, 0 outside a run.
    """

    prompts: Subset[PromptSample]
    outcomes: Outcomes
    own: Sequence[ScoredResponse]
    rank: int = 0
    step: int = 0

    @staticmethod
    def gather(prompts: Subset[PromptSample], own: Sequence[ScoredResponse], rank: int) -> Rollouts:
        """Gather the outcomes of all ranks, each of which passes its own responses. Collective.

        own: sorted by group; the responses to one prompt are all on one rank.
        """
        return Rollouts(prompts, own_outcomes(prompts, own, rank).gather(), own, rank)

    def with_prompts(self) -> Iterator[tuple[PromptSample, ScoredResponse]]:
        """Yield this rank's own responses, each with its prompt."""
        return _with_prompts(self.prompts, self.own)

    def move(self, exchange: RowExchange, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Move the columns that are not empty to where `exchange` wants the rows. Collective.

        Returns columns of `token_columns`: those of the wanted responses, end to end.
        names: of the columns; None: all.
        """
        sizes, moved = self.outcomes.sizes, dict[str, Tensor]()
        for name, dtype in token_columns().items():
            if (names is None or name in names) and sizes[name].any():
                empty = torch.empty(0, dtype=dtype).numpy()
                parts = [np.asarray(r.column(name), empty.dtype) for r in self.own]
                values = torch.from_numpy(np.concatenate([empty, *parts]))
                moved[name] = exchange(values, sizes[name])
        return moved

    def check_images(self, supported: bool) -> None:
        """Raise RolloutError for an image of a tool in a job that does not support images."""
        image = next((image for r in self.own for image in r.multi_turn.images), None)
        if image is not None and not supported:
            raise RolloutError(
                f"{image.where} returned an image, which this job does not support: its model, "
                "critic, reward model, teacher, engine or sequence parallelism reads text alone"
            )

    def images_of(
        self, rows: Sequence[int], columns: Mapping[str, Tensor]
    ) -> list[list[Attachment]]:
        """Return the images in the tokens of `rows`, those of their prompts first.

        Every rank reads those of prompts in its own dataset.
        columns: of `move`, to a rank that wants these rows.
        """
        index, sizes = torch.tensor(rows), self.outcomes.sizes
        encoded = columns.get("images", torch.empty(0, dtype=torch.uint8))
        records = encoded.split(sizes["images"][index].tolist())
        groups, contexts = self.outcomes.groups[index].tolist(), sizes["context_ids"][index]
        of_prompts = {group: self.prompts[group].images for group in set(groups)}
        images = list[list[Attachment]]()
        for group, context, record in zip(groups, contexts.tolist(), records, strict=True):
            message, what = record.numpy().tobytes(), "images of a response"
            of_tools = decode(message, list[Attachment], what) if message else []
            images.append([*(() if context else of_prompts[group]), *of_tools])
        return images

    def gather_numbers(self, values: Sequence[float]) -> Tensor:
        """Gather one number per own response to float64 [N] on every rank. Collective."""
        numbers = torch.zeros(len(self.outcomes), dtype=torch.float64)
        numbers[self.outcomes.ranks == self.rank] = numbers.new_tensor(values)
        dist.all_reduce(numbers)  # exact: one rank's value plus zeros
        return numbers

    def add_reward(self, name: str, weight: float, scores: Tensor) -> Rollouts:
        """Add a declared reward, float64 [N], to the scores."""
        own_scores = scores[self.outcomes.ranks == self.rank].tolist()
        own = [
            replace(r, reward=r.reward.add(name, weight, score))
            for r, score in zip(self.own, own_scores, strict=True)
        ]
        return replace(self, outcomes=self.outcomes.add_reward(name, weight, scores), own=own)

    def select(self, groups: Sequence[int]) -> Rollouts:
        """Select groups; they are numbered from 0 in the given order."""
        rows_of = [(self.outcomes.groups == group).nonzero().flatten() for group in groups]
        rows = torch.cat(rows_of)
        numbers = torch.repeat_interleave(torch.tensor([len(rows) for rows in rows_of]))
        outcomes = self.outcomes.take(rows).with_column("group", numbers)
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
            outcomes.append(batch.outcomes.with_column("group", groups))
            prompts = prompts + batch.prompts
        own = [r for batch in batches for r in batch.own]
        return Rollouts(prompts, Outcomes.concatenate(outcomes), own, batches[0].rank)


def _with_prompts(
    prompts: Subset[PromptSample], own: Sequence[ScoredResponse]
) -> Iterator[tuple[PromptSample, ScoredResponse]]:
    for group, responses in groupby(own, key=lambda r: r.group):
        sample = prompts[group]
        yield from ((sample, r) for r in responses)


def own_outcomes(
    prompts: Subset[PromptSample], own: Sequence[ScoredResponse], rank: int
) -> Outcomes:
    """Return the numbers of responses that `rank` generated."""
    has_preds = any(r.reward.pred is not None for r in own)
    answers = dict[str | None, float]()  # numbered, for all responses of a group are here
    rows: list[dict[str, float]] = [
        {
            "group": r.group,
            "rank": rank,
            "version": r.response.version,
            "prompt_length": len(r.prompt_ids(sample)),
            "num_sampled": r.response.num_sampled,
            "is_truncated": r.response.finish_reason == "length",
            "is_last": r.multi_turn.is_last,
            "score": r.reward.score,
            **{f"size/{name}": len(r.column(name)) for name in token_columns()},
            **{f"extra/{name}": r.reward.extras[name] for name in sorted(r.reward.extras)},
            **{f"count/{name}": number for name, number in r.reward.counts.items()},
            **{f"part/{name}": score for name, (_, score) in r.reward.parts.items()},
            **{f"turn/{name}": number for name, number in r.multi_turn.numbers.items()},
            **({"pred": answers.setdefault(r.reward.pred, len(answers))} if has_preds else {}),
        }
        for sample, r in _with_prompts(prompts, own)
    ]
    names = list(rows[0]) if rows else []
    numbers = [[float(row[name]) for row in rows] for name in names]
    values = torch.tensor(numbers, dtype=torch.float64).view(len(names), len(own))
    weights = {name: weight for name, (weight, _) in own[0].reward.parts.items()} if own else {}
    return Outcomes(names, values, weights)


def select_groups(
    batches: Sequence[Rollouts], metric: str, num_groups: int
) -> tuple[Rollouts, int]:
    """Select up to `num_groups` groups, those with signal first (DAPO's dynamic sampling).

    A group has signal if `metric` ("score", or a further result of the reward) differs among its
    responses, or if it has one response only. batches: one per generated batch; the selected groups
    are numbered from 0. Returns (their rollouts, how many have signal).
    """
    rollouts = Rollouts.concatenate(batches)
    last, values_of = rollouts.outcomes.last, dict[int, list[float]]()
    for group, value in zip(last.groups.tolist(), last.result(metric).tolist(), strict=True):
        values_of.setdefault(group, []).append(value)
    has_signal = {g: len(v) == 1 or len(set(v)) > 1 for g, v in values_of.items()}
    selected = sorted(has_signal, key=lambda group: not has_signal[group])[:num_groups]
    return rollouts.select(selected), sum(has_signal[group] for group in selected)
