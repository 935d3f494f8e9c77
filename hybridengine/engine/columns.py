"""The numbers that an engine records with each sampled token, each declared once.

A declared column follows its tokens from the engine's `Response` through multi-turn trajectories,
messages between ranks and the exchange of responses to `RolloutBatch.columns`, of which
`PackedBatch.take` selects the rows of a micro-batch, and into rollout files.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

__all__ = [
    "COLUMNS",
    "ColumnValues",
    "TokenColumn",
    "declare_column",
    "extend_columns",
    "first_columns",
]

ColumnValues = Mapping[str, Sequence[int | float]]  # by name, entries of all tokens end to end
ARRAY_CODES = {torch.int8: "b", torch.int16: "h", torch.int32: "i", torch.float32: "f"}


@dataclass(frozen=True)
class TokenColumn:
    """One number, or one tensor, per token of a response.

    dtype: one of ARRAY_CODES.
    shape: of a token's entries.
    counts: name of the column with the number of a token's entries, where tokens differ in it.
    fill: the entries of tokens that were not sampled, such as those of tools.
    in_files: whether rollout files have it.
    of_context: the first token of a completion has the entries of its prompt as well; where a
      completion continues a sequence, those that the sequence has are dropped.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    counts: str | None = None
    fill: float = 0
    in_files: bool = True
    of_context: bool = False

    def num_entries(self, values: ColumnValues, num_tokens: int) -> int:
        """Return how many entries the first `num_tokens` tokens have."""
        if self.counts is not None:
            return int(sum(values[self.counts][:num_tokens]))
        return num_tokens * prod(self.shape)

    def pack(self, entries: Sequence[int | float] = ()) -> array[Any]:
        """Return the entries in an array, which takes an eighth of a list's memory."""
        return array(ARRAY_CODES[self.dtype], entries)


COLUMNS: dict[str, TokenColumn] = {}


def declare_column(column: TokenColumn) -> TokenColumn:
    """Declare a column, on every rank; ValueError for a name with another declaration."""
    if COLUMNS.setdefault(column.name, column) != column:
        raise ValueError(f"the token column {column.name!r} is declared as {COLUMNS[column.name]}")
    return column


# Of multi-turn trajectories. sampled: 1 for tokens of the model, 0 for those of tools and users.
# turn_rewards: rewards of turns, each at the last token of its turn.
declare_column(TokenColumn("sampled", torch.int8, in_files=False))
declare_column(TokenColumn("turn_rewards", torch.float32, in_files=False))
# The vocabulary entries that top-k and top-p sampling kept; no entries stand for all of them.
declare_column(TokenColumn("num_kept", torch.int32, in_files=False))
declare_column(TokenColumn("kept_ids", torch.int32, counts="num_kept", in_files=False))
# The experts [layers, k] of each row that the engine computed to sample a token (`rollout.routes`).
declare_column(TokenColumn("num_routed", torch.int32, in_files=False))
declare_column(TokenColumn("routed_experts", torch.int16, counts="num_routed", of_context=True))


def first_columns(values: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return the entries of the first `num_tokens` tokens."""
    return {
        name: entries[: COLUMNS[name].num_entries(values, num_tokens)]
        for name, entries in values.items()
    }


def extend_columns(
    values: dict[str, array[Any]], num_tokens: int, more: ColumnValues, num_more: int
) -> None:
    """Append to `values`, of `num_tokens` tokens, those of `num_more` further ones.

    Tokens without a column that others have get its fill.
    """
    for name in [name for name in more if COLUMNS[name].of_context]:
        more = _continued(COLUMNS[name], values, more)
    for name in values.keys() | more.keys():
        column = COLUMNS[name]
        if name not in values:
            values[name] = column.pack(_fill(column, num_tokens))
        values[name].extend(column.pack(more[name] if name in more else _fill(column, num_more)))


def _continued(column: TokenColumn, values: ColumnValues, more: ColumnValues) -> ColumnValues:
    """Drop the entries of a completion's context that `values` has."""
    assert column.counts is not None
    known = len(values.get(column.name, ()))
    first, *others = more[column.counts]
    if known > first:
        raise ValueError(
            f"the token column {column.name!r} has {known} entries of a sequence whose next "
            f"completion has {first} of its context"
        )
    return {**more, column.name: more[column.name][known:], column.counts: [first - known, *others]}


def _fill(column: TokenColumn, num_tokens: int) -> list[float]:
    if column.counts is not None:
        return []
    fill = column.fill if column.dtype.is_floating_point else int(column.fill)
    return [fill] * (num_tokens * prod(column.shape))
