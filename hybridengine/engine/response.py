"""One response, from the engine that samples it to the batch that trains on it.

The numbers that an engine records with each sampled token are columns, each declared once. A column
follows its tokens from the engine's `Response` through multi-turn trajectories, messages between
ranks and the exchange of responses to `RolloutBatch.columns`, of which `PackedBatch.take` selects
the rows of a micro-batch, and into rollout files.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from math import prod
from typing import Any

import torch

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
# The most likely entries of the engine's distribution, and their log-probs.
declare_column(TokenColumn("num_likely", torch.int32, in_files=False))
declare_column(TokenColumn("likely_ids", torch.int32, counts="num_likely", in_files=False))
declare_column(TokenColumn("likely_log_probs", torch.float32, counts="num_likely", in_files=False))
# The experts [layers, k] of each row that the engine computed to sample a token.
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


# (weight version, number of sampled tokens), in their order
VersionRuns = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Response:
    """One response as an engine has sampled it, without its prompt.

    log_probs: of the sampling distribution (after temperature, top-k, top-p), one per token.
    finish_reason: "stop" (end-of-sequence token or a text of SamplingSpec.stop; token_ids includes
      it) or "length".
    versions: of the weights that sampled the tokens, those of tools and users left out; one run,
      unless they were updated in between.
    columns: further numbers of each token, by the names of `COLUMNS`.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    versions: VersionRuns = ()
    columns: ColumnValues = field(default_factory=dict)

    def join(self, more: Response) -> Response:
        """Return `more` with the tokens of this response before its own."""
        runs = groupby([*self.versions, *more.versions], key=lambda run: run[0])
        columns: dict[str, array[Any]] = {}
        extend_columns(columns, 0, self.columns, len(self.token_ids))
        extend_columns(columns, len(self.token_ids), more.columns, len(more.token_ids))
        return replace(
            more,
            token_ids=[*self.token_ids, *more.token_ids],
            log_probs=[*self.log_probs, *more.log_probs],
            versions=[(version, sum(n for _, n in same)) for version, same in runs],
            columns=columns,
        )

    def first(self, count: int) -> Response:
        """Return it cut to at most `count` tokens."""
        if len(self.token_ids) <= count:
            return self
        versions, left = list[tuple[int, int]](), count
        for version, size in self.versions:
            if left > 0:
                versions.append((version, min(size, left)))
            left -= size
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            finish_reason="length",
            versions=versions,
            columns=first_columns(self.columns, count),
        )

    def compact(self) -> Response:
        """Return it with arrays in place of lists of numbers, which take 8 times the memory."""
        return replace(
            self,
            token_ids=array("i", self.token_ids),
            log_probs=array("f", self.log_probs),
            columns={name: COLUMNS[name].pack(values) for name, values in self.columns.items()},
        )

    @property
    def num_sampled(self) -> int:
        """The number of the model's tokens, without those of tools and users."""
        sampled = self.columns.get("sampled")
        return len(self.token_ids) if sampled is None else int(sum(sampled))

    @property
    def version(self) -> int:
        """The version of the weights that sampled the oldest token."""
        return min((version for version, _ in self.versions), default=0)


def pack_kept(
    token_ids: Sequence[int],
    kept: Sequence[Sequence[int]],
    vocab_size: int,
    advice: str = "set algorithm.sampling_replay=off",
) -> dict[str, array[int]]:
    """Return the columns num_kept and kept_ids of a completion.

    kept: the ids that each token was sampled from; none where nothing was cut.
    advice: what to do where they are not those of `token_ids`, for the RuntimeError.

    Examples:
        >>> pack_kept([7, 2], [[3, 7], [0, 1, 2]], vocab_size=3)
        {'num_kept': array('i', [2, 0]), 'kept_ids': array('i', [3, 7])}
    """
    if len(kept) != len(token_ids):
        raise RuntimeError(
            f"the engine recorded the kept vocabulary entries of {len(kept)} tokens for a "
            f"completion of {len(token_ids)}; {advice}"
        )
    for position, (token, ids) in enumerate(zip(token_ids, kept, strict=True)):
        if len(ids) and token not in ids:
            raise RuntimeError(
                f"token {position} of a completion is {token}, which is not among the {len(ids)} "
                f"vocabulary entries that the engine recorded for it; {advice}"
            )
    truncated = [ids if len(ids) < vocab_size else () for ids in kept]
    return {
        "num_kept": array("i", map(len, truncated)),
        "kept_ids": array("i", chain.from_iterable(truncated)),
    }


def token_ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the ranks of tokens, int64 [B], from 1, among the entries of logits [B, V]."""
    return (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(1)
