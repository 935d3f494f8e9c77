"""Scored responses; tokens and texts stay on the rank that generated them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.engine.response import COLUMNS, Response
from hybridengine.model.attachments import Attachment
from hybridengine.run.errors import RolloutError
from hybridengine.run.messages import decode, encode
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.exchange import RowExchange
from hybridengine.train.outcomes import Outcomes
from hybridengine.train.rewards.manager import Reward


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

    def per_token(self, name: str) -> Sequence[int | float]:
        """Return a column of `token_columns`, empty where there is none."""
        if name == "context_ids":
            return self.multi_turn.context_ids
        numbers: Sequence[float] = (
            getattr(self.response, name)
            if name in _TOKEN_FIELDS
            else self.response.columns.get(name, ())
        )
        return numbers

    def compact(self) -> ScoredResponse:
        """Return it with arrays in place of lists of tokens, as `Response.compact`."""
        place = replace(self.multi_turn, context_ids=array("i", self.multi_turn.context_ids))
        return replace(self, response=self.response.compact(), multi_turn=place)

    def prompt_ids(self, sample: PromptSample) -> Sequence[int]:
        """Return the tokens before the response to `sample`."""
        return self.multi_turn.context_ids or sample.prompt_ids


_TOKEN_FIELDS = {"token_ids": torch.int32, "log_probs": torch.float32, "context_ids": torch.int32}


def token_columns() -> dict[str, torch.dtype]:
    """Return the types of a rollout's sequences of numbers, the declared columns included."""
    return _TOKEN_FIELDS | {name: column.dtype for name, column in COLUMNS.items()}


class ReceivedRows(NamedTuple):
    """What a rank gets of the responses that it is to hold.

    columns: see `Rollouts.move`.
    images: of each response.
    """

    columns: Mapping[str, Tensor]
    images: Sequence[Sequence[Attachment]]


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

    def column(self, name: str) -> Tensor:
        """Return a column of `token_columns`: those of this rank's own responses, end to end."""
        empty = torch.empty(0, dtype=token_columns()[name]).numpy()
        parts = [np.asarray(r.per_token(name), empty.dtype) for r in self.own]
        return torch.from_numpy(np.concatenate([empty, *parts]))

    def move(self, exchange: RowExchange, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Move the columns that are not empty to where `exchange` wants the rows. Collective.

        names: of the columns; None: all.
        """
        sizes = self.outcomes.sizes
        return {
            name: exchange(self.column(name), sizes[name])
            for name in (token_columns() if names is None else names)
            if sizes[name].any()
        }

    def check_images(self, supported: bool) -> None:
        """Raise RolloutError for an image of a tool in a job that does not support images."""
        image = next((image for r in self.own for image in r.multi_turn.images), None)
        if image is not None and not supported:
            raise RolloutError(
                f"{image.where} returned an image, which this job does not support: its model, "
                "critic, reward model, teacher, engine or sequence parallelism reads text alone"
            )

    def image_sizes(self) -> Tensor:
        """Return the encoded bytes of the images of tools of all responses, int64 [N]. Collective.

        For `move_images`.
        """
        return self.gather_numbers([len(record) for record in self._image_records()]).long()

    def _image_records(self) -> list[bytes]:
        return [encode([*images]) if (images := r.multi_turn.images) else b"" for r in self.own]

    def move_images(
        self, exchange: RowExchange, rows: Sequence[int], sizes: Tensor
    ) -> list[list[Attachment]]:
        """Return the images in the tokens of `rows`, those of their prompts first. Collective.

        Every rank reads those of prompts in its own dataset. Those of tools move as they are
        encoded, to where `exchange` wants its rows, which are `rows` here.

        sizes: of all responses, see `image_sizes`.
        """
        moved = [b""] * len(rows)
        if sizes.any():
            records = b"".join(self._image_records())
            values = torch.frombuffer(bytearray(records or b"\0"), dtype=torch.uint8)
            content = exchange(values, sizes).numpy().tobytes()
            ends = sizes[torch.tensor(rows, dtype=torch.int64)].cumsum(0).tolist()
            moved = [content[a:b] for a, b in pairwise([0, *ends])]
        groups, contexts = (
            self.outcomes.groups.tolist(),
            self.outcomes.sizes["context_ids"].tolist(),
        )
        of_prompts = {g: self.prompts[g].images for g in {groups[row] for row in rows}}
        images = list[list[Attachment]]()
        for row, record in zip(rows, moved, strict=True):
            of_prompt = [] if contexts[row] else of_prompts[groups[row]]
            of_tools = decode(record, list[Attachment], "images of a response") if record else []
            images.append([*of_prompt, *of_tools])
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

    def with_advantages(self, advantages: Tensor) -> Rollouts:
        """Add the advantage of each response, [N], to this rank's own."""
        own_advantages = advantages[self.outcomes.ranks == self.rank].tolist()
        pairs = zip(self.own, own_advantages, strict=True)
        return replace(self, own=[replace(r, advantage=a) for r, a in pairs])

    def with_trained(self, columns: Mapping[str, Sequence[Sequence[float | None]]]) -> Rollouts:
        """Add what training computed per token: by name, a list for each of this rank's own."""
        trained = [{name: rows[k] for name, rows in columns.items()} for k in range(len(self.own))]
        own = [replace(r, trained=x) for r, x in zip(self.own, trained, strict=True)]
        return replace(self, own=own)

    def select(self, groups: Sequence[int]) -> Rollouts:
        """Select groups; they are numbered from 0 in the given order."""
        rows_of = [(self.outcomes.groups == group).nonzero().flatten() for group in groups]
        rows = torch.cat(rows_of)
        numbers = torch.repeat_interleave(torch.tensor([len(rows) for rows in rows_of]))
        outcomes = self.outcomes.take(rows).with_groups(numbers)
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
            outcomes.append(batch.outcomes.with_groups(groups))
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
            "score": r.reward.score,
            **{f"size/{name}": len(r.per_token(name)) for name in token_columns()},
            **{f"extra/{name}": r.reward.extras[name] for name in sorted(r.reward.extras)},
            **{f"count/{name}": number for name, number in r.reward.counts.items()},
            **{f"part/{name}": score for name, (_, score) in r.reward.parts.items()},
            **{f"turn/{name}": number for name, number in r.multi_turn.numbers.items()},
            **({"pred": answers.setdefault(r.reward.pred, len(answers))} if has_preds else {}),
            **({"is_last": r.multi_turn.is_last} if r.multi_turn.numbers else {}),
        }
        for sample, r in _with_prompts(prompts, own)
    ]
    names = list(rows[0]) if rows else []
    numbers = [[float(row[name]) for row in rows] for name in names]
    values = torch.tensor(numbers, dtype=torch.float64).view(len(names), len(own))
    weights = {name: weight for name, (weight, _) in own[0].reward.parts.items()} if own else {}
    return Outcomes(names, values, weights)


def format_rollout(sample: PromptSample, r: ScoredResponse) -> str:
    """Format prompt, response and results for the console."""
    reward = r.reward
    named = {"score": reward.score, **reward.extras}
    numbers = [f"{name} {value:g}" for name, value in named.items()]
    results = ", ".join(numbers + [f"{name} {text[:100]!r}" for name, text in reward.texts.items()])
    return (
        f"scored sample: prompt {sample.prompt_text[-200:]!r}\n"
        f"  response {r.text[:300]!r}, ground truth {sample.ground_truth!r}\n"
        f"  {results}\n"
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
