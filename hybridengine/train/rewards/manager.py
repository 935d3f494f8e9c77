"""Combine the reward functions of a run into one score per response; register your own manager.

    @register_manager("mine")
    class Mine(RewardManager):
        def score(self, samples, responses, lengths): ...        # a RewardResult

Select it with `reward.reward_manager.name=mine` and its file in `model.external_lib`, or, without
registering it, with `reward.reward_manager.name=package.module.Mine`. A manager runs in the rank;
the functions that it calls by `score_responses` run where their caller runs them.

Entry points of the group hybridengine.rewards take part in it: `processes` and the schemes of URLs
(`http`) build a `Caller` from the group `reward`, `verl_manager` adapts a class of verl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, NamedTuple

from hybridengine.run import import_object, load_plugin, registers
from hybridengine.run.config import RewardConfig, RLConfig
from hybridengine.run.errors import ConfigError, Faults, RewardError, shorten
from hybridengine.train.algorithms import NEEDS
from hybridengine.train.data import PromptDataset, PromptSample
from hybridengine.train.rewards.function import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    TIMED_OUT,
    Caller,
    CallError,
    RewardFunction,
    to_text,
)

MANAGERS: dict[str, type[RewardManager]] = {}
SCORE_NAMES = ("score", "reward", "seq_reward")  # of the score; the last two are verl's
_PROBED_ROWS = 3  # whose empty answer is scored, besides the first row of each data_source


class ResponseTokens(NamedTuple):
    """The tokens of a response, as rewards count them.

    ids: all after the prompt, each once.
    sampled: 1 for the model's, 0 for those of tools and users; None: all are the model's.
    length: what data.max_response_length limits: the tokens of tools and users count, too, and of
      a trajectory of several sequences the longest. None: all of `ids`.
    """

    ids: Sequence[int]
    sampled: Sequence[int] | None = None
    length: int | None = None


class RewardPart(NamedTuple):
    """One reward of those whose weighted sum is the score; `scores` holds N numbers."""

    weight: float
    scores: list[float]


@dataclass(frozen=True)
class Reward:
    """The results of one response; see `RewardResult`. parts: (weight, score) by name."""

    score: float = 0.0
    extras: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)

    @property
    def pred(self) -> str | None:
        """The answer that majority votes count, where the reward returns one."""
        return self.texts.get("pred")

    def add(self, name: str, weight: float, score: float) -> Reward:
        """Return it with a further reward in its score."""
        return replace(
            self,
            score=self.score + weight * score,
            extras={**self.extras, name: score},
            parts={**self.parts, name: (weight, score)},
        )


@dataclass(frozen=True)
class RewardResult:
    """Scores of N responses.

    extras: N numbers for each further numeric result, by name; they become metrics.
    parts: the rewards whose weighted sum is the score, by name; gdpo normalises each separately.
    texts: N texts for each further result that is a text, None where a response has none; rollout
      files contain them. "pred" is the answer that majority votes count.
    counts: N numbers by name that are metrics of training only: no results of validation.
    """

    scores: list[float]
    extras: dict[str, list[float]]
    parts: dict[str, RewardPart] = field(default_factory=dict)
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    counts: dict[str, list[float]] = field(default_factory=dict)

    def of(self, k: int) -> Reward:
        """Return the results of response `k`."""
        return Reward(
            self.scores[k],
            {name: x[k] for name, x in self.extras.items()},
            {name: (part.weight, part.scores[k]) for name, part in self.parts.items()},
            {name: text for name, x in self.texts.items() if (text := x[k]) is not None},
            {name: x[k] for name, x in self.counts.items()},
        )


def score_responses(
    function: RewardFunction, samples: Sequence[PromptSample], responses: Sequence[str]
) -> RewardResult:
    """Score `responses[i]`, an answer to `samples[i]`, by the function's caller.

    The function returns a number, or a dict with "score" and further results. Further numbers
    become `extras`, texts `texts`. Numbers and "pred" must have the same names for every response.

    Raises RewardError, with the sample, when the function raises, exceeds its time-out,
    ends its process, or returns anything else.
    """
    if not samples:
        return RewardResult([], {})
    try:
        columns = _columns(function, samples, responses)
        rows = function.caller.call(function, columns, len(samples))
    except CallError as error:
        first = f"first of {len(samples)}: " if error.index is None else ""
        where = _describe(samples[error.index or 0], responses[error.index or 0])
        raise RewardError(f"{error}; {first}{where}") from None
    required = [{n for n, x in row.items() if isinstance(x, float) or n == "pred"} for row in rows]
    for sample, response, own in zip(samples, responses, required, strict=True):
        if own != required[0]:
            now, before = (sorted(n - {"score"}) for n in (own, required[0]))
            raise RewardError(
                f"reward function {function.source}: extra results {now} where an earlier response "
                f"had {before}; {_describe(sample, response)}"
            )
    results: dict[str, list[Any]] = {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))
    }
    numbers = required[0] - {"pred"}
    extras = {name: x for name, x in results.items() if name in numbers}
    texts = {name: x for name, x in results.items() if name not in numbers}
    counts = {TIMED_OUT: extras.pop(TIMED_OUT)} if function.source.rule else {}
    return RewardResult(extras.pop("score"), extras, texts=texts, counts=counts)


def _columns(
    function: RewardFunction, samples: Sequence[PromptSample], responses: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the arguments of a function by name, a value for each response."""
    if function.source.columns is not None:
        return _trl_columns(function.source.columns, samples, responses)
    values: dict[str, list[Any]] = {
        "data_source": [s.data_source for s in samples],
        "solution_str": list(responses),
        "ground_truth": [s.ground_truth for s in samples],
        "extra_info": [s.extra_info for s in samples],
        "prompt": [s.chat for s in samples],
    }
    plural = "s" if function.takes_lists else ""
    named = {name + plural: column for name, column in values.items()}
    return {name: column for name, column in named.items() if name in function.arguments}


def _trl_columns(
    taken: Sequence[str], samples: Sequence[PromptSample], responses: Sequence[str]
) -> dict[str, list[Any]]:
    """Return the arguments of a function in TRL's form: the chats and the other columns of rows.

    taken: the names of the columns that it takes; ("*",) for all.
    """
    rows = [{"ground_truth": s.ground_truth, **s.extra_info} for s in samples]
    columns: dict[str, list[Any]] = {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows))
    }
    columns["prompts"] = [list(s.chat) for s in samples]
    columns["completions"] = [[{"role": "assistant", "content": text}] for text in responses]
    return columns if taken == ("*",) else {n: columns[n] for n in taken if n in columns}


def _describe(sample: PromptSample, response: str) -> str:
    prompt, response = (repr(shorten(text, 300)) for text in (sample.prompt_text, response))
    truth = shorten(repr(sample.ground_truth), 300)
    where = f"row {sample.index} of the data (from 0)"
    return f"prompt {prompt}, response {response}, ground truth {truth}, {where}"


def register_manager(name: str) -> Callable[[type[RewardManager]], type[RewardManager]]:
    """Register a manager as `name`; ValueError for a name that is already registered."""
    return registers(MANAGERS, "reward manager", name)


@register_manager("naive")
class RewardManager:
    """Call every function once per response; add the scores with `reward.weights`."""

    batched = False  # whether functions are loaded as ones that take lists

    def __init__(
        self, functions: Sequence[RewardFunction], reward: RewardConfig, max_response_length: int
    ) -> None:
        self.functions, self.reward = functions, reward
        self.max_response_length = max_response_length

    def score(
        self, samples: Sequence[PromptSample], responses: Sequence[str], lengths: Sequence[int]
    ) -> RewardResult:
        """Score `responses[i]`, an answer to `samples[i]`.

        lengths: of the responses in tokens, as data.max_response_length counts them.
        The score of each function is in `parts` under its label, and with several functions in
        `extras` too.
        """
        results = [(f.source.label, score_responses(f, samples, responses)) for f in self.functions]
        total = RewardResult([0.0] * len(samples), {})
        extras, counts, texts = total.extras, total.counts, total.texts
        for (label, result), weight in zip(results, self.reward.all_weights, strict=False):
            total.scores[:] = [
                s + weight * r for s, r in zip(total.scores, result.scores, strict=True)
            ]
            own = {label: result.scores} if len(results) > 1 else {}
            for kind, columns in ((extras, {**result.extras, **own}), (counts, result.counts)):
                for name, values in columns.items():
                    kind[_unused(name, label, extras.keys() | counts.keys())] = values
            total.parts[_unused(label, label, total.parts)] = RewardPart(weight, result.scores)
        for label, result in results:
            for name, column in result.texts.items():
                texts[_unused(name, label, extras.keys() | texts.keys())] = column
        return total

    def score_tokens(
        self,
        samples: Sequence[PromptSample],
        responses: Sequence[str],
        tokens: Sequence[ResponseTokens],
    ) -> RewardResult:
        """As `score`, from the tokens of each response; what a run calls."""
        lengths = [len(t.ids) if t.length is None else t.length for t in tokens]
        return self.score(samples, responses, lengths)


@register_manager("batch")
class BatchRewardManager(RewardManager):
    """Call every function once per batch, with lists."""

    batched = True


@register_manager("dapo")
class DapoRewardManager(RewardManager):
    """Add DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13), the extra overlong_penalty.

    It falls from 0 to -penalty_factor over the last `overlong_buffer.len` tokens before the limit,
    so it counts tokens as data.max_response_length does.
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
        return replace(
            result,
            scores=scores,
            extras={**result.extras, "overlong_penalty": penalties},
            parts={**result.parts, "overlong_penalty": RewardPart(1.0, penalties)},
        )


def score_checked(
    manager: RewardManager,
    samples: Sequence[PromptSample],
    responses: Sequence[str],
    tokens: Sequence[ResponseTokens],
) -> RewardResult:
    """Return `manager.score_tokens(...)`, with "pred" as text.

    Raises RewardError unless there is a finite number for each response, and a text or None in
    `texts`; and where a user's manager calls sys.exit, which would otherwise end the run without
    an error.
    """
    try:
        result = manager.score_tokens(samples, responses, tokens)
    except SystemExit as error:
        raise RewardError(
            f"reward manager {type(manager).__name__} raised SystemExit: {error}"
        ) from error
    parts = {name: part.scores for name, part in result.parts.items()}
    numbers_of: dict[str, Any] = {**parts, "score": result.scores, **result.extras, **result.counts}
    for name, numbers in numbers_of.items():
        _check(name, numbers, len(samples), _is_finite, "a finite number")
    for name, column in result.texts.items():
        _check(name, column, len(samples), lambda x: isinstance(x, str | None), "a text or None")
    columns: dict[str, Any] = dict(result.texts)
    extras = dict(result.extras)
    if "pred" in extras:
        columns["pred"] = extras.pop("pred")
    texts = {
        name: [x if x is None else to_text(x) for x in column] for name, column in columns.items()
    }
    return replace(result, extras=extras, texts=texts)


def _check(
    name: str, values: Sequence[Any], size: int, is_valid: Callable[[Any], bool], expected: str
) -> None:
    if len(values) != size:
        raise RewardError(
            f"the reward manager returned {len(values)} values of {name} for {size} responses"
        )
    if bad := [value for value in values if not is_valid(value)]:
        raise RewardError(f"the reward manager returned {bad[0]!r} as {name}, expected {expected}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _unused(name: str, label: str, taken: Container[str]) -> str:
    """Return the first of name, label/name, label/name_2, … that is not in `taken`."""
    numbered = (f"{label}/{name}_{k}" for k in count(2))
    return next(n for n in chain((name, f"{label}/{name}"), numbered) if n not in taken)


def build_reward_manager(
    reward: RewardConfig, max_response_length: int, tokenizer: Any = None
) -> RewardManager:
    """Build the manager `reward.reward_manager.name` with the reward functions of the run.

    A class that is no RewardManager, but takes verl's arguments, is adapted; tokenizer: for it.

    Raises ConfigError for a name that is neither registered nor a class; RewardError for a function
    that cannot be loaded.
    """
    manager = _find_manager(reward.reward_manager.name, reward.reward_manager.module.path)
    if not issubclass(manager, RewardManager):
        adapt = load_plugin("rewards", "verl_manager", "reward.reward_manager.name")
        return adapt(manager, reward, max_response_length, tokenizer)
    callers: dict[str, Caller] = {}
    functions = []
    for path, name in reward.functions:
        kind = caller_name(path)
        if kind not in callers:
            callers[kind] = _build_caller(kind, reward)
        arguments = BATCH_ARGUMENTS if manager.batched else ARGUMENTS
        functions.append(callers[kind].load(path, name, arguments))
    return manager(functions, reward, max_response_length)


def caller_name(path: str) -> str:
    """Return what calls the function `path`: a URL's scheme, or `processes`."""
    scheme, _, rest = path.partition("://")
    return scheme if rest else "processes"


def _build_caller(kind: str, reward: RewardConfig) -> Caller:
    """Build what calls functions of this machine, or a service."""
    caller: Caller = load_plugin("rewards", kind, "reward.custom_reward_function.path")(reward)
    return caller


def _find_manager(name: str, file: str | None) -> type:
    """Return a RewardManager, or a class that is called as verl's."""
    key, manager = "reward.reward_manager.name", None if file else MANAGERS.get(name)
    if file or (manager is None and "." in name):
        manager = import_object(key, f"{file}:{name}" if file else name)
    if isinstance(manager, type) and (
        issubclass(manager, RewardManager) or "__call__" in dir(manager)
    ):
        return manager
    raise ConfigError(
        f"{key} is {name!r}, expected one of {', '.join(MANAGERS)}, or a class "
        "(package.module.Class, or one in the file reward.reward_manager.module.path) that is a "
        "RewardManager or has verl's __call__(self, data, return_dict)"
    )


def check_reward_files(config: RLConfig, faults: Faults) -> None:
    """Load the reward functions without the manager of the run."""
    for path, name in config.reward.functions:
        with faults:
            _build_caller(caller_name(path), config.reward).load(path, name, ())


def check_reward(
    config: RLConfig,
    reward: RewardManager,
    datasets: Iterable[PromptDataset | None],
    turns: Any = None,
) -> None:
    """Score an empty answer to some prompts of each dataset, to detect a broken function.

    Functions that can check rows, such as the built-in rules, check all.

    turns: the entry point of rollouts of several turns, see `multi_turn`; None: of single turns.
    """
    for dataset in filter(None, datasets):
        for function in reward.functions:
            function.check_rows(dataset)
        firsts = {sample.data_source: sample for sample in reversed(dataset)}
        probed = [*dataset[:_PROBED_ROWS], *firsts.values()]
        if turns is not None:
            probed = [turns.with_turns(sample) for sample in probed]
        tokens = [ResponseTokens(())] * len(probed)
        _check_reward_names(config, score_checked(reward, probed, [""] * len(probed), tokens))


def _check_reward_names(config: RLConfig, result: RewardResult) -> None:
    """Check that the reward returns the results, besides the score, that the algorithm needs."""
    algorithm = config.algorithm
    more = ["turn_rewards"] if config.rollout.multi_turn.enable else []
    more += ["reward_model"] if config.reward.reward_model.enable else []
    if algorithm.filter_groups.enable:
        metric, returned = algorithm.filter_groups.metric, ["score", *result.extras, *more]
        if metric not in {*returned, *SCORE_NAMES}:
            raise ConfigError(
                f"algorithm.filter_groups.metric names {metric!r}, which the reward does not "
                f"return; it returns {', '.join(returned)}"
            )
    if "reward_parts" in NEEDS[algorithm.adv_estimator]:
        keys, declared = algorithm.gdpo_reward_keys, [*result.parts, *more]
        if missing := sorted(set(keys) - set(declared)):
            raise ConfigError(
                f"algorithm.gdpo_reward_keys names {missing[0]!r}, which is not a declared reward; "
                f"the rewards of this run are {', '.join(declared)} (functions of "
                "reward.custom_reward_function.path and the reward model, with reward.weights)"
            )
        if len(keys or declared) < 2:
            raise ConfigError(
                f"algorithm.adv_estimator is {algorithm.adv_estimator!r}, which normalises several "
                f"rewards separately, and there is one ({', '.join(keys or declared)}); give "
                "several functions in reward.custom_reward_function.path"
            )
