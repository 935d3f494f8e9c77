"""The per-response numbers of a batch: a few dozen bytes a response, the same on every rank.

Group statistics, the selection of groups and the split into micro-batches are pure functions of
them, so every rank computes the same ones. Tokens and texts stay where they were generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from hybridengine.errors import RewardError
from hybridengine.trainer.exchange import all_gather_rows

SCORE_NAMES = ("score", "reward", "seq_reward")  # of the score; the last two are verl's


class RewardColumn(NamedTuple):
    """One declared reward; scores: float64 [N]."""

    weight: float
    scores: Tensor


class _Header(TypedDict):
    """The names of the columns after the fixed ones, in their order; parts: with their weights."""

    sizes: list[str]
    extras: list[str]
    parts: dict[str, float]
    turns: list[str]
    preds: list[str]
    is_last: list[str]


@dataclass(frozen=True)
class Outcomes:
    """Numbers of N responses in the order of their groups; CPU tensors [N].

    extras: further results of the reward, by name. parts: the declared rewards, whose weighted sum
    is the score. preds: the answers that majority votes count, where the reward returns any, as
    numbers that are equal within a group where the answers are. sizes: elements of each per-token
    column of a rollout, by the column's name.

    A trajectory of several turns is one response, or several in a row where the chat template
    rewrote its history; they have its score, and statistics count the last one. turns: numbers of
    the trajectory, by name.
    """

    groups: Tensor  # int64, position of the prompt; responses to one prompt share it
    ranks: Tensor  # int64, where its tokens are
    versions: Tensor  # int64, of the weights that sampled its oldest token
    prompt_lengths: Tensor  # int64
    is_truncated: Tensor  # bool
    scores: Tensor  # float64
    sizes: Mapping[str, Tensor]  # int64
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # float64
    parts: Mapping[str, RewardColumn] = field(default_factory=dict)
    turns: Mapping[str, Tensor] = field(default_factory=dict)  # float64
    preds: Tensor | None = None  # float64
    is_last: Tensor | None = None  # bool, whether it is the last of its trajectory; None: all are

    def __len__(self) -> int:
        return self.groups.numel()

    @property
    def response_lengths(self) -> Tensor:
        return self.sizes["response_ids"]

    @property
    def lengths(self) -> Tensor:
        """Of prompt and response, int64 [N]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def trajectories(self) -> Tensor:
        """The trajectory that each response belongs to, int64 [N], counted from 0."""
        if self.is_last is None:
            return torch.arange(len(self))
        return self.is_last.cumsum(0) - self.is_last.long()

    @property
    def last(self) -> Outcomes:
        """One response of each trajectory."""
        return self if self.is_last is None else self.take(self.is_last.nonzero().flatten())

    @property
    def results(self) -> dict[str, Tensor]:
        """The score and the further results of the reward, by name."""
        return {"score": self.scores, **self.extras}

    def result(self, name: str) -> Tensor:
        """Return the score, under any of its names, or a further result of the reward."""
        return self.scores if name in SCORE_NAMES else self.extras[name]

    def add_reward(self, name: str, weight: float, scores: Tensor) -> Outcomes:
        """Add a declared reward, float64 [N], to scores, results and parts."""
        return replace(
            self,
            scores=self.scores + weight * scores,
            extras={**self.extras, name: scores},
            parts={**self.parts, name: RewardColumn(weight, scores)},
        )

    def take(self, rows: Tensor) -> Outcomes:
        """Select rows, int64."""
        return _from_matrix(self._matrix()[rows], self._header())

    @staticmethod
    def concatenate(outcomes: Sequence[Outcomes]) -> Outcomes:
        """Put outcomes with the same names one after another."""
        return _from_matrix(torch.cat([o._matrix() for o in outcomes]), outcomes[0]._header())

    def gather(self) -> Outcomes:
        """Return those of all ranks, of which each passes its own, sorted by group. Collective.

        Raises:
            RewardError: on every rank, where the results of two ranks have other names.
        """
        gathered = all_gather_rows(self._matrix().flatten())
        encoded = json.dumps(self._header()).encode()
        headers = [
            bytes(part.tolist()).decode()
            for part in all_gather_rows(torch.tensor([*encoded], dtype=torch.uint8))
        ]
        first = next(rank for rank, part in enumerate(gathered) if part.numel())
        for rank, part in enumerate(gathered):
            if part.numel() and headers[rank] != headers[first]:
                raise RewardError(
                    f"the reward's results are {headers[rank]} on rank {rank} and "
                    f"{headers[first]} on rank {first}; a reward must return the same names for "
                    "every response"
                )
        header = json.loads(headers[first])
        width = _NUM_FIXED + sum(map(len, header.values()))
        matrix = torch.cat([part.view(-1, width) for part in gathered if part.numel()])
        return _from_matrix(matrix[matrix[:, 0].argsort(stable=True)], header)

    def _header(self) -> _Header:
        return {
            "sizes": list(self.sizes),
            "extras": list(self.extras),
            "parts": {name: part.weight for name, part in self.parts.items()},
            "turns": list(self.turns),
            "preds": [] if self.preds is None else ["pred"],
            "is_last": [] if self.is_last is None else ["is_last"],
        }

    def _matrix(self) -> Tensor:
        """float64 [N, K]; integers up to 2^53 are exact."""
        columns = [
            *(self.groups, self.ranks, self.versions),
            *(self.prompt_lengths, self.is_truncated, self.scores),
            *self.sizes.values(),
            *self.extras.values(),
            *(part.scores for part in self.parts.values()),
            *self.turns.values(),
            *([] if self.preds is None else [self.preds]),
            *([] if self.is_last is None else [self.is_last]),
        ]
        return torch.stack([column.double() for column in columns], dim=1)


_NUM_FIXED = 6  # columns of every matrix


def _from_matrix(matrix: Tensor, header: _Header) -> Outcomes:
    columns = iter(matrix.T.contiguous())
    groups, ranks, versions, prompt_lengths, is_truncated, scores = (
        next(columns) for _ in range(_NUM_FIXED)
    )
    return Outcomes(
        groups=groups.long(),
        ranks=ranks.long(),
        versions=versions.long(),
        prompt_lengths=prompt_lengths.long(),
        is_truncated=is_truncated.bool(),
        scores=scores,
        sizes={name: next(columns).long() for name in header["sizes"]},
        extras={name: next(columns) for name in header["extras"]},
        parts={
            name: RewardColumn(weight, next(columns)) for name, weight in header["parts"].items()
        },
        turns={name: next(columns) for name in header["turns"]},
        preds=next(columns) if header["preds"] else None,
        is_last=next(columns).bool() if header["is_last"] else None,
    )
