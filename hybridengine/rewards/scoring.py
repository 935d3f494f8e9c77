"""Scoring responses: finite numbers come out, or an error with the sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridengine.data import PromptSample
from hybridengine.reward_worker import ARGUMENTS, BATCH_ARGUMENTS, RewardError
from hybridengine.rewards.workers import CallError, RewardFunction

__all__ = ["RewardPart", "RewardResult", "score_batch", "score_responses"]


class RewardPart(NamedTuple):
    """One of the rewards that a score is the weighted sum of; `scores` holds N numbers."""

    weight: float
    scores: list[float]


@dataclass(frozen=True)
class RewardResult:
    """Scores of N responses; `extras` holds one list of N numbers per further numeric result.

    parts: the rewards whose weighted sum the score is, by name; gdpo normalises each by itself.
    """

    scores: list[float]
    extras: dict[str, list[float]]
    parts: dict[str, RewardPart] = field(default_factory=dict)

    def check(self, size: int) -> None:
        """Raise RewardError where scores, extras and parts are not `size` finite numbers each."""
        parts = {name: part.scores for name, part in self.parts.items()}
        for name, values in {**parts, "score": self.scores, **self.extras}.items():
            if len(values) != size:
                raise RewardError(
                    f"the reward manager gave {len(values)} values of {name} for {size} responses"
                )
            if bad := [v for v in values if not isinstance(v, int | float) or not math.isfinite(v)]:
                raise RewardError(
                    f"the reward manager gave {bad[0]!r} as {name}, expected a finite number"
                )


def score_responses(
    function: RewardFunction, samples: Sequence[PromptSample], responses: Sequence[str]
) -> RewardResult:
    """Score `responses[i]`, an answer to `samples[i]`, one call each, in worker processes.

    The function returns a number, or a dict with "score" and further results: its numbers become
    `extras` (every response must then give the same ones), its texts are left out.

    Raises RewardError, with the sample, when the function raises, takes longer than the workers'
    time-out, ends its process, or gives something else.
    """
    calls = [
        dict(zip(ARGUMENTS, _values(sample, response), strict=True))
        for sample, response in zip(samples, responses, strict=True)
    ]
    try:
        rows = function.workers.call(function, calls)
    except CallError as error:
        raise _blamed(function, samples, responses, error) from None
    return _collect(function, samples, responses, rows)


def score_batch(
    function: RewardFunction, samples: Sequence[PromptSample], responses: Sequence[str]
) -> RewardResult:
    """As `score_responses`, in one call with lists (verl's batch manager), a result for each."""
    if not samples:
        return RewardResult([], {})
    values = zip(*map(_values, samples, responses), strict=True)
    columns = {name: list(v) for name, v in zip(BATCH_ARGUMENTS, values, strict=True)}
    try:
        rows = function.workers.call_batch(function, columns, len(samples))
    except CallError as error:
        raise _blamed(function, samples, responses, error) from None
    return _collect(function, samples, responses, rows)


def _values(sample: PromptSample, response: str) -> tuple[Any, ...]:
    """As ARGUMENTS name them."""
    return sample.data_source, response, sample.ground_truth, sample.extra_info


def _blamed(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    error: CallError,
) -> RewardError:
    if error.is_complete:
        return RewardError(str(error))
    index = error.index or 0
    about = _describe(samples[index], responses[index])
    if error.index is None:
        about = f"first of {len(samples)}: {about}"
    return RewardError(f"reward function {function.name} {error}; {about}")


def _collect(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    rows: Sequence[dict[str, float]],
) -> RewardResult:
    for sample, response, row in zip(samples, responses, rows, strict=True):
        if row.keys() != rows[0].keys():
            now, before = (sorted(r.keys() - {"score"}) for r in (row, rows[0]))
            raise RewardError(
                f"reward function {function}: extra results {now} where an earlier response had "
                f"{before}; {_describe(sample, response)}"
            )
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return RewardResult(columns.pop("score", []), columns)


def _describe(sample: PromptSample, response: str) -> str:
    def short(text: str) -> str:
        return text if len(text) <= 300 else f"{text[:150]}…{text[-149:]}"

    return (
        f"prompt {short(sample.prompt_text)!r}, response {short(response)!r}, "
        f"ground truth {short(repr(sample.ground_truth))}"
    )
