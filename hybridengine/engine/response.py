"""One response, from the engine that samples it to the batch that trains on it."""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from hybridengine.engine.columns import (
    ARRAY_CODES,
    COLUMNS,
    ColumnValues,
    extend_columns,
    first_columns,
)
from hybridengine.vision import EncodedImage

__all__ = ["Response", "VersionRuns", "token_columns"]

# (weight version, number of sampled tokens), in their order
VersionRuns = Sequence[tuple[int, int]]

_TOKEN_FIELDS = {"token_ids": torch.int32, "log_probs": torch.float32, "context_ids": torch.int32}


def token_columns() -> dict[str, torch.dtype]:
    """Return the types of a response's sequences of numbers, the declared columns included."""
    return _TOKEN_FIELDS | {name: column.dtype for name, column in COLUMNS.items()}


@dataclass(frozen=True)
class Response:
    """One response, without its prompt.

    An engine fills in the first fields:

    log_probs: of the sampling distribution (after temperature, top-k, top-p), one per token.
    finish_reason: "stop" (end-of-sequence token or a text of SamplingSpec.stop; token_ids includes
      it) or "length".
    versions: of the weights that sampled the tokens, those of tools and users left out; one run,
      unless they were updated in between.
    columns: further numbers of each token, by the names of `rollout.columns.COLUMNS`.

    The trainer fills in the others once it is scored:

    group: position of its prompt in the batch; responses of one prompt share it.
    extras, texts: further numbers and texts of the reward, by name; counts: metrics alone.
    parts: by name, (weight, score) of each reward; the score is their weighted sum.
    advantage: mean over its tokens, where it is known.
    trained: what training computed per token, by name, for rollout files; None: not computed.
    weights_checksums: of the engine's weights, one for each run of `versions`; (): not known.

    Of trajectories of several turns: context_ids: the prompt; empty: the sample's. images: those in
    context_ids and token_ids; without context_ids they follow the sample's. is_last: see
    `Outcomes`. turns: all turns, as rollout files have them. turn_numbers: numbers of the
    trajectory, by name.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    versions: VersionRuns = ()
    columns: ColumnValues = field(default_factory=dict)
    group: int = 0
    text: str = ""
    score: float = 0.0
    extras: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    trained: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    context_ids: Sequence[int] = ()
    images: Sequence[EncodedImage] = ()
    is_last: bool = True
    turns: Sequence[Mapping[str, Any]] = ()
    turn_numbers: Mapping[str, float] = field(default_factory=dict)
    weights_checksums: Sequence[str] = ()

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
        fields: dict[str, Any] = {
            name: array(ARRAY_CODES[dtype], values)
            for name, dtype in _TOKEN_FIELDS.items()
            if (values := getattr(self, name))
        }
        columns = {name: COLUMNS[name].pack(values) for name, values in self.columns.items()}
        return replace(self, **fields, columns=columns)

    def per_token(self, name: str) -> Sequence[int | float]:
        """Return a column of `token_columns`, empty where there is none."""
        values: Sequence[float] = (
            getattr(self, name) if name in _TOKEN_FIELDS else self.columns.get(name, ())
        )
        return values

    def columns_in_files(self) -> dict[str, Any]:
        """Return the declared columns that rollout files have: an entry or a list per token, or
        `_encode` of one whose tokens differ in their number of entries."""
        return {
            name: np.asarray(values).reshape(-1, *COLUMNS[name].shape).tolist()
            if COLUMNS[name].counts is None
            else _encode(values, COLUMNS[name].dtype)
            for name, values in self.columns.items()
            if COLUMNS[name].in_files
        }

    @property
    def num_sampled(self) -> int:
        """The number of the model's tokens, without those of tools and users."""
        sampled = self.columns.get("sampled")
        return len(self.token_ids) if sampled is None else int(sum(sampled))

    @property
    def version(self) -> int:
        """The version of the weights that sampled the oldest token."""
        return min((version for version, _ in self.versions), default=0)

    @property
    def pred(self) -> str | None:
        """The answer that majority votes count, where the reward returns one."""
        return self.texts.get("pred")


def _encode(values: Sequence[int | float], dtype: torch.dtype) -> str:
    """Return entries as rollout files have them: base64 of zlib of `dtype`, little-endian."""
    entries = np.asarray(values, f"<{ARRAY_CODES[dtype]}")
    return base64.b64encode(zlib.compress(entries.tobytes())).decode()
