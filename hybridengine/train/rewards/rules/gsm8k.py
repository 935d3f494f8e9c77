"""The built-in rule `gsm8k`: 1 where the last `#### number` is the ground truth's number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from hybridengine.run.errors import RewardError

_ANSWER = re.compile(r"####\s*\$?(-?[0-9.,]+)")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Compare the number after the last "####" with `ground_truth`, as in GSM8K's answers.

    An answer in any other form is wrong. ground_truth: a number, or text like "1,234" or "#### 18".
    """
    truth = _truth(ground_truth)
    answers = _ANSWER.findall(solution_str)
    return float(bool(answers) and _number(answers[-1]) == truth)


def check_ground_truth(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> float:
    """Return 1; raise RewardError for a ground truth that is not a number."""
    _truth(ground_truth)
    return 1.0


def _truth(ground_truth: Any) -> Decimal:
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
