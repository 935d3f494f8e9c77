"""The built-in rule `math_verify`: 1 where the answer equals the ground truth as mathematics."""

from __future__ import annotations

import logging
from typing import Any

from hybridengine.reward_worker.function import RewardError

try:
    from math_verify import parse, verify  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    raise RewardError(
        "the rule math_verify needs the package math-verify; `pip install math-verify`"
    ) from None

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it says at every call what we know


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The last answer in `solution_str` (boxed, LaTeX or plain) against `ground_truth`."""
    if ground_truth is None:
        raise RewardError(
            "reward_model.ground_truth is null; the rule math_verify compares with it"
        )
    # Time is limited by reward.timeout_s; math_verify's own limits would need an alarm.
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
