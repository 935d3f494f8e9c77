"""The built-in rule `math_verify`: 1 where the answer equals the ground truth as mathematics."""

from __future__ import annotations

import logging
from typing import Any

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it says at every call what we know


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The last answer in `solution_str` (boxed, LaTeX or plain) against `ground_truth`."""
    from math_verify import parse, verify  # type: ignore[import-not-found, unused-ignore]

    # Time is limited by reward.timeout_s; math_verify's own limits would unset that alarm.
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
