"""Combine the reward functions of a run into one score per response; register your own manager.

    @register_manager("mine")
    class Mine(RewardManager):
        def score(self, samples, responses, lengths): ...        # a RewardResult

Select it with `reward.reward_manager.name=mine` and its file in `model.external_lib`, or, without
registering it, with `reward.reward_manager.name=package.module.Mine`. A manager runs in the rank;
the functions that it calls by `score_responses` run in worker processes.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from hybridengine.config import RewardConfig
from hybridengine.data import PromptSample
from hybridengine.errors import ConfigError, RewardError, shorten
from hybridengine.reward_worker.function import ARGUMENTS, BATCH_ARGUMENTS
from hybridengine.rewards.workers import CallError, RewardFunction, RewardWorkers

MANAGERS: dict[str, type[RewardManager]] = {}


class RewardPart(NamedTuple):
    """One reward of those whose weighted sum is the score; `scores` holds N numbers."""

    weight: float
    scores: list[float]


@dataclass(frozen=True)
class RewardResult:
    """Scores of N responses; `extras` holds N numbers for each further numeric result.

    parts: the rewards whose weighted sum is the score, by name; gdpo normalises each separately.
    """

    scores: list[float]
    extras: dict[str, list[float]]
    parts: dict[str, RewardPart] = field(default_factory=dict)


def score_responses(
    function: RewardFunction,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    batched: bool = False,
) -> RewardResult:
    """Score `responses[i]`, an answer to `samples[i]`, in worker processes.

    The function returns a number, or a dict with "score" and further results. Further numbers
    become `extras`, and must have the same names for every response; texts are ignored.

    batched: one call with lists (verl's batch manager), instead of one call each.

    Raises RewardError, with the sample, when the function raises, exceeds the workers' time-out,
    ends its process, or returns anything else.
    """
    if not samples:
        return RewardResult([], {})
    values = [
        (sample.data_source, response, sample.ground_truth, sample.extra_info)
        for sample, response in zip(samples, responses, strict=True)
    ]
    try:
        if batched:
            columns = zip(BATCH_ARGUMENTS, map(list, zip(*values, strict=True)), strict=True)
            rows = function.workers.call_batch(function, dict(columns), len(samples))
        else:
            calls = [dict(zip(ARGUMENTS, row, strict=True)) for row in values]
            rows = function.workers.call(function, calls)
    except CallError as error:
        first = f"first of {len(samples)}: " if error.index is None else ""
        where = _describe(samples[error.index or 0], responses[error.index or 0])
        raise RewardError(f"{error}; {first}{where}") from None
    for sample, response, row in zip(samples, responses, rows, strict=True):
        if row.keys() != rows[0].keys():
            now, before = (sorted(r.keys() - {"score"}) for r in (row, rows[0]))
            raise RewardError(
                f"reward function {function.source}: extra results {now} where an earlier response "
                f"had {before}; {_describe(sample, response)}"
            )
    extras = {name: [row[name] for row in rows] for name in rows[0]}
    return RewardResult(extras.pop("score"), extras)


def _describe(sample: PromptSample, response: str) -> str:
    prompt, response = (repr(shorten(text, 300)) for text in (sample.prompt_text, response))
    truth = shorten(repr(sample.ground_truth), 300)
    return f"prompt {prompt}, response {response}, ground truth {truth}"


def register_manager(name: str) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Register a manager as `name`; ValueError for a name that is already registered."""

    def register(manager: type[RewardManager]) -> type[RewardManager]:
        if MANAGERS.setdefault(name, manager) is not manager:
            raise ValueError(f"reward manager {name!r} is already registered")
        return manager

    return register


@register_manager("naive")
class RewardManager:
    """Call every function once per response; add the scores with `reward.weights`."""

    batched = False  # whether functions take lists

    def __init__(
        self, functions: Sequence[RewardFunction], reward: RewardConfig, max_response_length: int
    ) -> None:
        self.functions, self.reward = functions, reward
        self.max_response_length = max_response_length

    def score(
        self, samples: Sequence[PromptSample], responses: Sequence[str], lengths: Sequence[int]
    ) -> RewardResult:
        """Score `responses[i]`, an answer of `lengths[i]` tokens to `samples[i]`.

        The score of each function is in `parts` under its label, and with several functions in
        `extras` too.
        """
        results = [score_responses(f, samples, responses, self.batched) for f in self.functions]
        weights = self.reward.all_weights[: len(results)]
        scores = [0.0] * len(samples)
        extras: dict[str, list[float]] = {}
        parts: dict[str, RewardPart] = {}
        for function, result, weight in zip(self.functions, results, weights, strict=True):
            label = function.source.label
            scores = [s + weight * r for s, r in zip(scores, result.scores, strict=True)]
            own = {label: result.scores} if len(results) > 1 else {}
            for name, values in {**result.extras, **own}.items():
                extras[_unused(name, label, extras)] = values
            parts[_unused(label, label, parts)] = RewardPart(weight, result.scores)
        return RewardResult(scores, extras, parts)


@register_manager("batch")
class BatchRewardManager(RewardManager):
    """Call every function once per batch, with lists."""

    batched = True


@register_manager("dapo")
class DapoRewardManager(RewardManager):
    """Add DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13), the extra overlong_penalty.

    It falls from 0 to -penalty_factor over the last `overlong_buffer.len` tokens.
    """

    def score(
        self, samples: Sequence[PromptSample], responses: Sequence[str], lengths: Sequence[int]
    ) -> RewardResult:
        result, buffer = super().score(samples, responses, lengths), self.reward.overlong_buffer
        if not buffer.enable:
            return result
        allowed = self.max_response_length - buffer.len  # without penalty
        penalties = [min(0.0, (allowed - n) / buffer.len * buffer.penalty_factor) for n in lengths]
        scores = [s + p for s, p in zip(result.scores, penalties, strict=True)]
        return RewardResult(
            scores,
            {**result.extras, "overlong_penalty": penalties},
            {**result.parts, "overlong_penalty": RewardPart(1.0, penalties)},
        )


def build_reward_manager(reward: RewardConfig, max_response_length: int) -> RewardManager:
    """Build the manager `reward.reward_manager.name` with the reward functions of the run.

    Raises ConfigError for a name that is neither registered nor a class; RewardError for a function
    that cannot be loaded.
    """
    name = reward.reward_manager.name
    manager = MANAGERS.get(name) or _import_class(name)
    workers = RewardWorkers(reward.num_workers, reward.timeout_s)
    arguments = BATCH_ARGUMENTS if manager.batched else ARGUMENTS
    loaded = [workers.load(path, own, arguments) for path, own in reward.functions]
    return manager(loaded, reward, max_response_length)


def score_checked(
    manager: RewardManager,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    lengths: Sequence[int],
) -> RewardResult:
    """Return `manager.score(...)`.

    Raises RewardError unless there is a finite number for each response, and where a user's manager
    calls sys.exit, which would otherwise end the run without an error.
    """
    try:
        result = manager.score(samples, responses, lengths)
    except SystemExit as error:
        raise RewardError(
            f"reward manager {type(manager).__name__} raised SystemExit: {error}"
        ) from error
    parts = {name: part.scores for name, part in result.parts.items()}
    for name, values in {**parts, "score": result.scores, **result.extras}.items():
        if len(values) != len(samples):
            raise RewardError(
                f"the reward manager returned {len(values)} values of {name} for {len(samples)} "
                "responses"
            )
        if bad := [v for v in values if not isinstance(v, int | float) or not math.isfinite(v)]:
            raise RewardError(
                f"the reward manager returned {bad[0]!r} as {name}, expected a finite number"
            )
    return result


def _unused(name: str, label: str, taken: Container[str]) -> str:
    """Return the first of name, label/name, label/name_2, … that is not in `taken`."""
    numbered = (f"{label}/{name}_{k}" for k in count(2))
    return next(n for n in chain((name, f"{label}/{name}"), numbered) if n not in taken)


def _import_class(name: str) -> type[RewardManager]:
    try:
        manager = pkgutil.resolve_name(name) if "." in name else None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.reward_manager.name {name!r} cannot be imported: {error}"
        ) from error
    if not (isinstance(manager, type) and issubclass(manager, RewardManager)):
        raise ConfigError(
            f"reward.reward_manager.name is {name!r}, expected one of {', '.join(MANAGERS)}, or "
            "package.module.Class of a RewardManager"
        )
    return manager
