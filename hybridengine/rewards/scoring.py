"""Scoring responses: finite numbers come out, or an error with the sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hybridengine.data import PromptSample
from hybridengine.rewards.function import RewardError, RewardFunction

__all__ = ["RewardResult", "score_responses"]


@dataclass(frozen=True)
class RewardResult:
    """Scores of N responses; `extras` holds one list of N numbers per further numeric result."""

    scores: list[float]
    extras: dict[str, list[float]]


def score_responses(
    function: RewardFunction, samples: Sequence[PromptSample], responses: Sequence[str]
) -> RewardResult:
    """Score `responses[i]`, an answer to `samples[i]`.

    The function returns a number, or a dict with "score" and further results: its numbers become
    `extras` (every response must then give the same ones), its texts are left out.

    Raises RewardError, with the sample, when the function raises or gives something else.
    """
    scores: list[float] = []
    extras: list[dict[str, float]] = []
    for sample, response in zip(samples, responses, strict=True):
        score, extra = _score_one(function, sample, response)
        if extras and extra.keys() != extras[0].keys():
            raise RewardError(
                f"reward function {function} gave the extra results {sorted(extra)} where an "
                f"earlier response had {sorted(extras[0])}; {_describe(sample, response)}"
            )
        scores.append(score)
        extras.append(extra)
    names = extras[0] if extras else ()
    return RewardResult(scores, {name: [extra[name] for extra in extras] for name in names})


def _score_one(
    function: RewardFunction, sample: PromptSample, response: str
) -> tuple[float, dict[str, float]]:
    try:
        result = function.call(
            data_source=sample.data_source,
            solution_str=response,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
    except Exception as error:
        raise RewardError(
            f"reward function {function.name} raised {type(error).__name__}: {error} at "
            f"{function.error_line(error)}; {_describe(sample, response)}"
        ) from error
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(
                f"reward function {function} gave a dict without 'score' (keys "
                f"{sorted(map(str, result))}); {_describe(sample, response)}"
            )
        extra = {
            str(name): _number(function, value, f"{name!r}", sample, response)
            for name, value in result.items()
            if name != "score" and not isinstance(value, str)
        }
        return _number(function, result["score"], "'score'", sample, response), extra
    return _number(function, result, "its result", sample, response), {}


def _number(
    function: RewardFunction, value: Any, name: str, sample: PromptSample, response: str
) -> float:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(
        f"reward function {function}: {name} is {value!r} ({type(value).__name__}), expected a "
        f"finite number; {_describe(sample, response)}"
    )


def _describe(sample: PromptSample, response: str) -> str:
    def short(text: str) -> str:
        return text if len(text) <= 300 else f"{text[:150]}…{text[-149:]}"

    return (
        f"prompt {short(sample.prompt_text)!r}, response {short(response)!r}, "
        f"ground truth {sample.ground_truth!r}"
    )
