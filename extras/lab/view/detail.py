"""What a screen shows of one response: its tokens, their values for colours, and its turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

__all__ = ["COLORS", "Color", "Detail", "Part", "detail_of", "text_of_token"]

_SHOWN = {"prompt", "response", "turns"}  # in other places than the facts


@dataclass(frozen=True)
class Color:
    """A column that tokens are coloured by.

    low, high: the values that have the strongest of the two colours; the neutral value has none.
    neutral: 0, or 1 for a ratio, whose logarithm is compared.
    """

    name: str
    label: str
    low: float
    high: float
    neutral: float = 0.0

    def strength(self, value: float) -> float:
        """Return a number from -1 to 1."""
        low, high = self.low, self.high
        if self.neutral:
            value, low, high = (math.log(max(x, 1e-9)) for x in (value, low, high))
        limit = high if value > 0 else -low
        return max(-1.0, min(1.0, value / limit)) if limit else 0.0


COLORS = {
    color.name: color
    for color in (
        Color("log_prob", "log-prob of the engine", -6.0, 0.0),
        Color("advantage", "advantage", -2.0, 2.0),
        Color("difference", "probability, trainer minus engine", -0.1, 0.1),
        Color("ratio", "ratio trainer / engine; the importance weight", 0.5, 2.0, 1.0),
        Color("entropy", "entropy, nats", 0.0, 4.0),
        Color("clipping", "clipped: 1, or -1 where the advantage is negative", -1.0, 1.0),
    )
}


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of the model, or of tools and users: tokens `start` to `end`."""

    title: str
    is_model: bool
    start: int
    end: int


@dataclass(frozen=True)
class Detail:
    """One response.

    values: name of a coloring → a number per token.
    results: what the reward was computed from and returned besides the score, by name.
    facts: the other columns that are no list of numbers per token, by name.
    """

    prompt: str
    token_ids: Sequence[int]
    values: Mapping[str, Sequence[float]]
    parts: Sequence[Part]
    results: Mapping[str, Any]
    facts: Mapping[str, Any]


def detail_of(row: Mapping[str, Any]) -> Detail:
    """Return what is shown of a row of a rollout file."""
    columns = {
        name: value
        for name, value in row.items()
        if name not in _SHOWN and not (isinstance(value, list) and name != "ground_truth")
    }
    results = {name: columns.pop(name) for name in _results_of(row) if name in columns}
    values, parts = _color_values(row), _parts(row)
    return Detail(row["prompt"], row["response_ids"], values, parts, results, columns)


def _results_of(row: Mapping[str, Any]) -> list[str]:
    """Return the ground truth and what the reward returned: a line has that after `reward`."""
    after = list(row)[list(row).index("reward") + 1 :]
    returned = takewhile(lambda name: name not in ("advantage", "finish_reason"), after)
    return ["ground_truth", *returned]


def _color_values(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return name of a coloring → a number per token, NaN where it has none.

    ratio: the ratio that the rollout correction clips.
    clipping: 0 for tokens that are not clipped, 1 for clipped ones, -1 for clipped ones with a
      negative advantage.
    """
    named = ("log_probs", "old_log_probs", "advantages", "entropy", "clipped")
    columns = {
        name: [math.nan if x is None else x for x in row[name]] for name in named if name in row
    }
    engine, trainer = columns["log_probs"], columns.get("old_log_probs")
    values: dict[str, list[float]] = {"log_prob": engine}
    if "advantages" in columns:
        values["advantage"] = columns["advantages"]
    elif row.get("advantage") is not None:
        values["advantage"] = [row["advantage"]] * len(engine)
    if trainer is not None:
        pairs = list(zip(trainer, engine, strict=True))
        values["difference"] = [math.exp(p) - math.exp(q) for p, q in pairs]
        values["ratio"] = [math.exp(max(min(p - q, 20.0), -20.0)) for p, q in pairs]  # NaN stays
    if "entropy" in columns:
        values["entropy"] = columns["entropy"]
    if "clipped" in columns:
        signs = [math.copysign(1.0, advantage) for advantage in columns["advantages"]]
        values["clipping"] = [x * sign for x, sign in zip(columns["clipped"], signs, strict=True)]
    return values


def _parts(row: Mapping[str, Any]) -> list[Part]:
    """Split the tokens where the writer changes; one part for a response of one turn."""
    length = len(row["response_ids"])
    turns = iter([t for t in row.get("turns", ()) if t["role"] == "assistant"])
    parts, start = list[Part](), 0
    for is_model, tokens in groupby(row.get("sampled") or [1] * length):
        end = start + len(list(tokens))
        title = _title(next(turns, {})) if is_model else "tool or user"
        parts.append(Part(f"{title} · {end - start} tokens", bool(is_model), start, end))
        start = end
    return parts


def _title(turn: Mapping[str, Any]) -> str:
    calls = [str(call.get("name", "")) for call in turn.get("tool_calls", ())]
    reward = [f"reward {turn['reward']:g}"] if turn.get("reward") else []
    called = [f"calls {', '.join(calls)}"] if calls else []
    return " · ".join(["model", *called, *reward])


def text_of_token(tokenizer: Any, token: int) -> str:
    """Return the text of one token; its id in brackets without a tokenizer."""
    piece = tokenizer.id_to_token(token) if tokenizer is not None else None
    if piece is None:
        return f"[{token}]"
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return " " + text.lstrip(" ") if piece[0] in "▁Ġ" and len(piece) > 1 else text or piece
