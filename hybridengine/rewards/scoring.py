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
from hybridengine.rewards.function import ARGUMENTS, BATCH_ARGUMENTS, RewardError, RewardFunction

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
            values = _values(sample, response)
            results.append(function.call(**dict(zip(ARGUMENTS, values, strict=True))))
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
    about = f"first of {len(samples)}: {_describe(samples[0], responses[0])}"
    with _blamed(function, about, timeout_s):
        columns = map(list, zip(*map(_values, samples, responses), strict=True))
        results = function.call(**dict(zip(BATCH_ARGUMENTS, columns, strict=True)))
    if not isinstance(results, Sequence) or len(results) != len(samples):
        given = f"{len(results)} results" if isinstance(results, Sequence) else f"{type(results)}"
        raise RewardError(
            f"reward function {function} gave {given} for {len(samples)} responses; expected a "
            "list with one result each"
        )
    return _collect(function, samples, responses, results)


def _values(sample: PromptSample, response: str) -> tuple[Any, ...]:
    """As ARGUMENTS name them."""
    return sample.data_source, response, sample.ground_truth, sample.extra_info


def _collect(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    results: Sequence[Any],
) -> RewardResult:
    rows: list[dict[str, float]] = []
    for sample, response, result in zip(samples, responses, results, strict=True):
        try:
            rows.append(_numbers(result))
            if rows[-1].keys() != rows[0].keys():
                now, before = (sorted(row.keys() - {"score"}) for row in (rows[-1], rows[0]))
                raise ValueError(f"extra results {now} where an earlier response had {before}")
        except ValueError as fault:
            about = _describe(sample, response)
            raise RewardError(f"reward function {function}: {fault}; {about}") from None
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return RewardResult(columns.pop("score", []), columns)


def _numbers(result: Any) -> dict[str, float]:
    """ "score" and further results as finite numbers, or a ValueError."""
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ValueError(f"gave a dict without 'score' (keys {sorted(map(str, given))})")
    found = {}
    for name, value in given.items():
        if isinstance(value, Real) and math.isfinite(value):
            found[str(name)] = float(value)
        elif name == "score" or not isinstance(value, str):
            what = repr(name) if given is result else "its result"
            kind = type(value).__name__
            raise ValueError(f"{what} is {value!r} ({kind}), expected a finite number")
    return found


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


def _describe(sample: PromptSample, response: str) -> str:
    def short(text: str) -> str:
        return text if len(text) <= 300 else f"{text[:150]}…{text[-149:]}"

    return (
        f"prompt {short(sample.prompt_text)!r}, response {short(response)!r}, "
        f"ground truth {sample.ground_truth!r}"
    )
