"""Reward functions by their names: in a Python file, or built-in rules.

A rule is an object with the functions of a user's reward file. Reward workers import this module:
it needs only the standard library.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridengine.rewards.calls import source_of
from hybridengine.run import import_file
from hybridengine.run.errors import RewardError
from hybridengine.train.rewards.function import ARGUMENTS, FunctionSource

CHECK = "check_ground_truth"  # of some rules: called as the rule is, before a run

# Words and numbers, which are always parsed; parsing takes some milliseconds.
_PLAIN, _WORD = re.compile(r"[\w\s.,:;+\-/%()\[\]]+"), re.compile(r"\w")
_GSM8K_ANSWER = re.compile(r"####\s*\$?(-?[0-9.,]+)")
_MATH_PREFIXES = ("aime", "numina_")  # aime2024, numina_olympiads, …
_SOURCES = {
    "gsm8k": ("openai/gsm8k",),
    "math_verify": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math",
        "math_dapo",
        "math_dapo_reasoning",
        "hiyouga/geometry3k",
    ),
}
_BY_SOURCE = {source: rule for rule, sources in _SOURCES.items() for source in sources}


class MathVerify:
    """The rule `math_verify`: 1 where the answer equals the ground truth as mathematics."""

    label = "math_rule"  # of its score among those of several functions

    def __init__(self) -> None:
        try:
            import math_verify  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise RewardError(
                "the rule math_verify needs the package math-verify; `pip install math-verify`"
            ) from None
        self._parse, self._verify = math_verify.parse, math_verify.verify
        # It warns at every call without a limit.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def compute_score(self, *, solution_str: str, ground_truth: Any, **_: Any) -> float:
        """Compare the last answer in `solution_str` (boxed, LaTeX or plain) with `ground_truth`.

        Raises RewardError for a ground truth that is not text or a number, or that cannot be
        parsed.
        """
        if not isinstance(ground_truth, str | int | float | Decimal):
            raise _unusable(ground_truth, f"a {type(ground_truth).__name__}")
        # The worker limits the time; math_verify's own limits need SIGALRM.
        gold = self._parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
        if not gold:
            raise _unusable(ground_truth, "not an answer that math_verify can parse")
        answer = self._parse(solution_str, parsing_timeout=None)
        return float(self._verify(gold, answer, timeout_seconds=None))

    def check_ground_truth(self, *, ground_truth: Any, **_: Any) -> float:
        """Return 1 where a response can be right; raise RewardError where none can."""
        if isinstance(ground_truth, str) and is_plain(ground_truth):
            return 1.0
        answer = f"\\boxed{{{ground_truth}}}"
        if not self.compute_score(solution_str=answer, ground_truth=ground_truth):
            raise _unusable(ground_truth, "not equal to itself for math_verify")
        return 1.0


def is_plain(text: str) -> bool:
    """Whether a ground truth has words and numbers only, and at least one."""
    return bool(_PLAIN.fullmatch(text) and _WORD.search(text))


def _unusable(ground_truth: Any, what: str) -> RewardError:
    kind = "null" if ground_truth is None else f"{ground_truth!r}, {what}"
    return RewardError(
        f"reward_model.ground_truth is {kind}; the rule math_verify needs a number or an answer "
        "as text, or no response could be right. Correct the row, or give a function of your own "
        "in reward.custom_reward_function.path"
    )


class Gsm8k:
    """The rule `gsm8k`: 1 where the last `#### number` is the ground truth's number."""

    label = "gsm8k"

    def compute_score(self, *, solution_str: str, ground_truth: Any, **_: Any) -> float:
        """Compare the number after the last "####" with `ground_truth`, as in GSM8K's answers.

        An answer in any other form is wrong.

        ground_truth: a number, or text like "1,234" or "#### 18".
        """
        truth = self._truth(ground_truth)
        answers = _GSM8K_ANSWER.findall(solution_str)
        return float(bool(answers) and _number(answers[-1]) == truth)

    def check_ground_truth(self, *, ground_truth: Any, **_: Any) -> float:
        """Return 1; raise RewardError for a ground truth that is not a number."""
        self._truth(ground_truth)
        return 1.0

    def _truth(self, ground_truth: Any) -> Decimal:
        truth = _number(str(ground_truth).rsplit("####", 1)[-1])
        if truth is None:
            raise RewardError(
                f"reward_model.ground_truth is {ground_truth!r}; the rule gsm8k expects a number"
            )
        return truth


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().lstrip("$").replace(",", "").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


class TurnRewards:
    """No score of its own: the rewards of tools and environments alone (multi-turn rollouts)."""

    label = "turn_rewards"

    def compute_score(self, **_: Any) -> float:
        return 0.0


class ByDataSource:
    """The default: score each row by the rule of its `data_source`, as verl does."""

    label = "by_data_source"

    def compute_score(self, *, data_source: str, **others: Any) -> float:
        """Score by the rule of `data_source`; RewardError for a source that has none."""
        return float(_rule_of(data_source).compute_score(**others))

    def check_ground_truth(self, *, data_source: str, **others: Any) -> float:
        """Return 1; raise RewardError where the rule of `data_source` can give no response 1."""
        return float(_rule_of(data_source).check_ground_truth(**others))


@cache
def _rule_of(data_source: str) -> Any:
    is_math = data_source.startswith(_MATH_PREFIXES)
    rule = "math_verify" if is_math else _BY_SOURCE.get(data_source)
    if rule is None:
        known = ", ".join([*_BY_SOURCE, *(f"{prefix}*" for prefix in _MATH_PREFIXES)])
        raise RewardError(
            f"no reward function is given, and there is no rule for data_source {data_source!r} "
            f"(there is one for {known}); set "
            "reward.custom_reward_function.path to a Python file with your own, or to math_verify"
        )
    return BUILT_IN[rule]()


BUILT_IN: dict[str, Callable[[], Any]] = {
    "math_verify": MathVerify,
    "gsm8k": Gsm8k,
    "turn_rewards": TurnRewards,
    "data_source": ByDataSource,
}


def reward_file(path: str | Path) -> Path:
    """Return the file of `path`, a Python file or the name of a built-in rule.

    Raises RewardError where it does not exist.
    """
    if str(path) in BUILT_IN:
        return Path(__file__)
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        raise RewardError(
            f"reward file {file} is a folder; name the Python file in "
            "reward.custom_reward_function.path"
        )
    if not file.is_file():
        raise RewardError(
            f"reward file {file} does not exist; check reward.custom_reward_function.path"
        )
    return file


def import_reward_function(
    path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
) -> tuple[Callable[..., Any], FunctionSource]:
    """Import `name` from the file `path` into this process, and check that it takes `arguments`.

    path: a Python file, or the name of a built-in rule.
    arguments: () does not check the signature.

    Raises RewardError for a missing file, a file that fails to import, a missing function, and a
    signature that does not take the arguments by name.
    """
    rule = BUILT_IN.get(str(path))
    file = reward_file(path)
    module = rule() if rule else _import_once(file)
    call = getattr(module, name, None)
    if not callable(call):
        given = vars(module if isinstance(module, ModuleType) else type(module))
        functions = [n for n, v in given.items() if inspect.isfunction(v)]
        raise RewardError(
            f"reward file {file} has no function {name!r}; functions there: "
            f"{', '.join(functions) or 'none'} (reward.custom_reward_function.name)"
        )
    source = source_of(call, name, file)
    if arguments and source.columns is None:
        _check_signature(call, name, file, arguments)
    if rule:
        label = getattr(module, "label", file.stem) if name == "compute_score" else name
        source = replace(source, rule=str(path), label=label)
    return call, source


def _check_signature(
    call: Callable[..., Any], name: str, file: Path, arguments: Sequence[str]
) -> None:
    signature: inspect.Signature | str = "(?)"
    try:
        signature = inspect.signature(call)
        signature.bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise RewardError(
            f"reward function {name} in {file} must accept {', '.join(arguments)} by name, "
            f"but its signature is {name}{signature}: {error}"
        ) from None


_import_once = cache(import_file)  # for all functions of a file
