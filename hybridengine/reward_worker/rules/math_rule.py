"""The built-in rule `math_verify`: 1 where the answer equals the ground truth as mathematics."""

from __future__ import annotations

import logging
from typing import Any

from hybridengine.errors import RewardError

try:
    from math_verify import parse, verify  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    raise RewardError(
        "the rule math_verify needs the package math-verify; `pip install math-verify`"
    ) from None

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call without a limit


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Compare the last answer in `solution_str` (boxed, LaTeX or plain) with `ground_truth`."""
    if ground_truth is None:
        raise RewardError(
            "reward_model.ground_truth is null; the rule math_verify compares with it"
        )
    # reward.timeout_s limits the time; math_verify's own limits need SIGALRM.
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
