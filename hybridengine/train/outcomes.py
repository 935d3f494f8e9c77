"""The per-response numbers of a batch: a few dozen bytes a response, the same on every rank.

Group statistics, the selection of groups and the split into micro-batches are pure functions of
them, so every rank computes the same ones. Tokens and texts stay where they were generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridengine.run.errors import RewardError
from hybridengine.train.exchange import all_gather_rows

SCORE_NAMES = ("score", "reward", "seq_reward")  # of the score; the last two are verl's


class _Column:
    """An attribute of `Outcomes`: a column that is always there, [N] of `dtype`."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._name, self._dtype = name, dtype

    def __get__(self, outcomes: Outcomes, owner: type[Outcomes]) -> Tensor:
        return outcomes._column(self._name).to(self._dtype)


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

    def __len__(self) -> int:
        return self.values.shape[1]

    def _column(self, name: str) -> Tensor:
        return self.values[self.names.index(name)]

    def _optional(self, name: str) -> Tensor | None:
        return self._column(name) if name in self.names else None

    def _columns(self, kind: str) -> dict[str, Tensor]:
        """Return the columns whose names begin with `kind`, by the rest of their names."""
        named = zip(self.names, self.values, strict=True)
        return {n.removeprefix(kind): column for n, column in named if n.startswith(kind)}

    groups = _Column("group", torch.int64)  # the position of the prompt, which a group shares
    ranks = _Column("rank", torch.int64)  # the rank that has the tokens
    versions = _Column("version", torch.int64)  # of the weights that sampled the oldest token
    prompt_lengths = _Column("prompt_length", torch.int64)
    response_lengths = _Column("size/token_ids", torch.int64)  # with the tokens of tools and users
    num_sampled = _Column("num_sampled", torch.int64)  # of them the model's
    is_truncated = _Column("is_truncated", torch.bool)
    scores = _Column("score", torch.float64)

    @property
    def sizes(self) -> dict[str, Tensor]:
        """Elements of each of a response's `token_columns`, int64 [N] by name."""
        return {name: column.long() for name, column in self._columns("size/").items()}

    @property
    def extras(self) -> dict[str, Tensor]:
        """Further results of the reward, by name."""
        return self._columns("extra/")

    @property
    def counts(self) -> dict[str, Tensor]:
        """Numbers of the reward that are metrics alone, by name."""
        return self._columns("count/")

    @property
    def parts(self) -> dict[str, Tensor]:
        """The scores of the declared rewards, by name."""
        return self._columns("part/")

    @property
    def turns(self) -> dict[str, Tensor]:
        """Numbers of the trajectory, by name."""
        return self._columns("turn/")

    @property
    def preds(self) -> Tensor | None:
        """The answers that majority votes count, where the reward returns any.

        They are numbers that are equal within a group where the answers are.
        """
        return self._optional("pred")

    @property
    def is_last(self) -> Tensor | None:
        """Whether it is the last of its trajectory, bool [N]; None: all are."""
        column = self._optional("is_last")
        return None if column is None else column.bool()

    @property
    def lengths(self) -> Tensor:
        """The tokens of prompt and response together, int64 [N]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def trajectories(self) -> Tensor:
        """The trajectory that each response belongs to, int64 [N], counted from 0."""
        if self.is_last is None:
            return torch.arange(len(self))
        return self.is_last.cumsum(0) - self.is_last.long()

    def sum_of_trajectories(self, numbers: Tensor) -> Tensor:
        """Sum a number per response over each of the M trajectories: [N] -> [M]."""
        trajectories = self.trajectories.to(numbers.device)
        sums = numbers.new_zeros(len(self.last))
        return sums.index_add(0, trajectories, numbers)

    @property
    def first(self) -> Outcomes:
        """The first response of each trajectory, whose prompt is the trajectory's."""
        if self.is_last is None:
            return self
        return self.take(torch.cat([torch.tensor([True]), self.is_last[:-1]]).nonzero().flatten())

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
        names = [*self.names, f"extra/{name}", f"part/{name}"]
        values = torch.cat([self.values, scores.expand(2, -1)])
        values[names.index("score")] += weight * scores
        return Outcomes(names, values, {**self.weights, name: weight})

    def take(self, rows: Tensor) -> Outcomes:
        """Select rows, int64."""
        return replace(self, values=self.values[:, rows])

    def with_groups(self, groups: Tensor) -> Outcomes:
        """Number the groups anew, int64 [N]."""
        values = self.values.clone()
        values[self.names.index("group")] = groups.double()
        return replace(self, values=values)

    @staticmethod
    def concatenate(outcomes: Sequence[Outcomes]) -> Outcomes:
        """Put outcomes with the same names one after another."""
        return replace(outcomes[0], values=torch.cat([o.values for o in outcomes], dim=1))

    def gather(self) -> Outcomes:
        """Return those of all ranks, of which each passes its own, sorted by group. Collective.

        Raises:
            RewardError: on every rank, where the results of two ranks have other names.
        """
        gathered = all_gather_rows(self.values.T.flatten())
        encoded = json.dumps([list(self.names), dict(self.weights)]).encode()
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
        names, weights = json.loads(headers[first])
        rows = torch.cat([part.view(-1, len(names)) for part in gathered if part.numel()])
        order = rows[:, names.index("group")].argsort(stable=True)
        return Outcomes(names, rows[order].T.contiguous(), weights)
