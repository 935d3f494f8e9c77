"""The built-in rule `math_verify`: 1 where the answer equals the ground truth as mathematics."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from hybridengine.run.errors import RewardError

try:
    from math_verify import parse, verify  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    raise RewardError(
        "the rule math_verify needs the package math-verify; `pip install math-verify`"
    ) from None

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call without a limit
# Words and numbers, which are always parsed; parsing takes some milliseconds.
_PLAIN, _WORD = re.compile(r"[\w\s.,:;+\-/%()\[\]]+"), re.compile(r"\w")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Compare the last answer in `solution_str` (boxed, LaTeX or plain) with `ground_truth`.

    Raises RewardError for a ground truth that is not text or a number, or that cannot be parsed.
    """
    if not isinstance(ground_truth, str | int | float | Decimal):
        raise _unusable(ground_truth, f"a {type(ground_truth).__name__}")
    # The worker limits the time; math_verify's own limits need SIGALRM.
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not gold:
        raise _unusable(ground_truth, "not an answer that math_verify can parse")
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


def check_ground_truth(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> float:
    """Return 1 where a response can be right; raise RewardError where none can."""
    if isinstance(ground_truth, str) and _is_plain(ground_truth):
        return 1.0
    if not compute_score(data_source, f"\\boxed{{{ground_truth}}}", ground_truth, extra_info):
        raise _unusable(ground_truth, "not equal to itself for math_verify")
    return 1.0


def _is_plain(text: str) -> bool:
    return bool(_PLAIN.fullmatch(text) and _WORD.search(text))


def _unusable(ground_truth: Any, what: str) -> RewardError:
    kind = "null" if ground_truth is None else f"{ground_truth!r}, {what}"
    return RewardError(
        f"reward_model.ground_truth is {kind}; the rule math_verify needs a number or an answer "
        "as text, or no response could be right. Correct the row, or give a function of your own "
        "in reward.custom_reward_function.path"
    )
