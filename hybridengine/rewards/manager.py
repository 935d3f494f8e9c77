"""How the reward functions of a run become one score per response; a user's own by name.

    @register_manager("mine")
    class Mine(RewardManager):
        def score(self, samples, responses, lengths): ...        # a RewardResult

and `reward.reward_manager.name=mine` takes it, if `model.external_lib` names its file; so does
`reward.reward_manager.name=package.module.Mine` without either. A manager runs in the rank; the
functions that it scores with `score_responses` or `score_batch` run in worker processes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Container, Sequence
from itertools import chain, count

from hybridengine.config import ConfigError
from hybridengine.config.schema import RewardConfig
from hybridengine.data import PromptSample
from hybridengine.reward_worker import ARGUMENTS, BATCH_ARGUMENTS, RewardError
from hybridengine.rewards.scoring import RewardPart, RewardResult, score_batch, score_responses
from hybridengine.rewards.workers import RewardFunction, RewardWorkers

__all__ = [
    "MANAGERS",
    "RewardManager",
    "build_reward_manager",
    "register_manager",
    "score_checked",
]

MANAGERS: dict[str, type[RewardManager]] = {}


def register_manager(name: str) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Make a manager known as `name`; a name that is taken is an error."""

    def register(manager: type[RewardManager]) -> type[RewardManager]:
        if MANAGERS.setdefault(name, manager) is not manager:
            raise ValueError(f"reward manager {name!r} is already registered")
        return manager

    return register


@register_manager("naive")
class RewardManager:
    """Every function is called once per response; scores are added with `reward.weights`."""

    batched = False  # whether a function takes lists

    def __init__(
        self, functions: Sequence[RewardFunction], reward: RewardConfig, max_response_length: int
    ) -> None:
        self.functions, self.reward = functions, reward
        self.max_response_length = max_response_length

    def score(
        self, samples: Sequence[PromptSample], responses: Sequence[str], lengths: Sequence[int]
    ) -> RewardResult:
        """Score `responses[i]`, an answer of `lengths[i]` tokens to `samples[i]`.

        Each function's own score is a part of the score, under its label; with several functions
        it is among the extras too.
        """
        call = score_batch if self.batched else score_responses
        results = [call(f, samples, responses) for f in self.functions]
        weights = self.reward.all_weights[: len(results)]
        scores = [0.0] * len(samples)
        extras: dict[str, list[float]] = {}
        parts: dict[str, RewardPart] = {}
        for function, result, weight in zip(self.functions, results, weights, strict=True):
            label = function.label
            scores = [s + weight * r for s, r in zip(scores, result.scores, strict=True)]
            own = {label: result.scores} if len(results) > 1 else {}
            for name, values in {**result.extras, **own}.items():
                extras[_unused(name, label, extras)] = values
            parts[_unused(label, label, parts)] = RewardPart(weight, result.scores)
        return RewardResult(scores, extras, parts)


@register_manager("batch")
class BatchRewardManager(RewardManager):
    """Every function is called once per batch, with lists."""

    batched = True


@register_manager("dapo")
class DapoRewardManager(RewardManager):
    """Adds DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), the extra overlong_penalty.

    It falls from 0 to -penalty_factor over the last `overlong_buffer.len` tokens allowed.
    """

    def score(
        self, samples: Sequence[PromptSample], responses: Sequence[str], lengths: Sequence[int]
    ) -> RewardResult:
        result, buffer = super().score(samples, responses, lengths), self.reward.overlong_buffer
        if not buffer.enable:
            return result
        free = self.max_response_length - buffer.len
        penalties = [min(0.0, (free - n) / buffer.len * buffer.penalty_factor) for n in lengths]
        scores = [s + p for s, p in zip(result.scores, penalties, strict=True)]
        return RewardResult(
            scores,
            {**result.extras, "overlong_penalty": penalties},
            {**result.parts, "overlong_penalty": RewardPart(1.0, penalties)},
        )


def build_reward_manager(reward: RewardConfig, max_response_length: int) -> RewardManager:
    """The manager that `reward.reward_manager.name` names, over the functions of the run.

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

    Raises RewardError where there is not a finite number for each response, and where a manager of
    the user's own calls sys.exit, which must not look like the end of the run.
    """
    try:
        result = manager.score(samples, responses, lengths)
    except SystemExit as error:
        raise RewardError(
            f"reward manager {type(manager).__name__} raised SystemExit: {error}"
        ) from error
    result.check(len(samples))
    return result


def _unused(name: str, label: str, taken: Container[str]) -> str:
    """`name`, else label/name, else label/name_2 and so on: no result replaces another."""
    numbered = (f"{label}/{name}_{k}" for k in count(2))
    return next(n for n in chain((name, f"{label}/{name}"), numbered) if n not in taken)


def _import_class(name: str) -> type[RewardManager]:
    try:
        found = pkgutil.resolve_name(name) if "." in name else None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.reward_manager.name {name!r} cannot be imported: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, RewardManager)):
        raise ConfigError(
            f"reward.reward_manager.name is {name!r}, expected one of {', '.join(MANAGERS)}, or "
            "package.module.Class of a RewardManager"
        )
    return found
