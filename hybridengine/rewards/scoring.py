"""Scoring responses: finite numbers come out, or an error with the sample."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from types import FrameType
from typing import Any

from hybridengine.data import PromptSample
from hybridengine.rewards.function import RewardError, RewardFunction

__all__ = ["RewardResult", "score_batch", "score_responses"]


@dataclass(frozen=True)
class RewardResult:
    """Scores of N responses; `extras` holds one list of N numbers per further numeric result."""

    scores: list[float]
    extras: dict[str, list[float]]


def score_responses(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    timeout_s: float = 0.0,
) -> RewardResult:
    """Score `responses[i]`, an answer to `samples[i]`, one call each.

    The function returns a number, or a dict with "score" and further results: its numbers become
    `extras` (every response must then give the same ones), its texts are left out.

    Raises RewardError, with the sample, when the function raises, takes longer than `timeout_s`
    (0: any time) or gives something else.
    """
    results = []
    for sample, response in zip(samples, responses, strict=True):
        with _blamed(function, _describe(sample, response), timeout_s):
            result = function.call(
                data_source=sample.data_source,
                solution_str=response,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
            )
        results.append(result)
    return _collect(function, samples, responses, results)


def score_batch(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    timeout_s: float = 0.0,
) -> RewardResult:
    """As `score_responses`, in one call with lists (verl's batch manager), a result for each."""
    if not samples:
        return RewardResult([], {})
    with _blamed(
        function, f"first of {len(samples)}: {_describe(samples[0], responses[0])}", timeout_s
    ):
        results = function.call(
            data_sources=[s.data_source for s in samples],
            solution_strs=list(responses),
            ground_truths=[s.ground_truth for s in samples],
            extra_infos=[s.extra_info for s in samples],
        )
    if not isinstance(results, Sequence) or len(results) != len(samples):
        given = f"{len(results)} results" if isinstance(results, Sequence) else f"{type(results)}"
        raise RewardError(
            f"reward function {function} gave {given} for {len(samples)} responses; expected a "
            "list with one result each"
        )
    return _collect(function, samples, responses, results)


def _collect(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    results: Sequence[Any],
) -> RewardResult:
    scores: list[float] = []
    extras: list[dict[str, float]] = []
    for sample, response, result in zip(samples, responses, results, strict=True):
        score, extra = _read(function, sample, response, result)
        if extras and extra.keys() != extras[0].keys():
            raise RewardError(
                f"reward function {function} gave the extra results {sorted(extra)} where an "
                f"earlier response had {sorted(extras[0])}; {_describe(sample, response)}"
            )
        scores.append(score)
        extras.append(extra)
    names = extras[0] if extras else ()
    return RewardResult(scores, {name: [extra[name] for extra in extras] for name in names})


@contextmanager
def _blamed(function: RewardFunction, sample: str, timeout_s: float) -> Iterator[None]:
    """Turn what the function raises into a RewardError; end it when its time is up.

    The alarm reaches Python code in the main thread, not a loop inside a C library.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no result within reward.timeout_s = {timeout_s:g} s")

    limited = timeout_s > 0 and threading.current_thread() is threading.main_thread()
    if limited:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    except Exception as error:
        raise RewardError(
            f"reward function {function.name} raised {type(error).__name__}: {error} at "
            f"{function.error_line(error)}; {sample}"
        ) from error
    finally:
        if limited:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _read(
    function: RewardFunction, sample: PromptSample, response: str, result: Any
) -> tuple[float, dict[str, float]]:
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
