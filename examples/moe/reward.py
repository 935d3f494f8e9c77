"""The share of a response's words that lie in the range of the ground truth."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: list[int], extra_info: dict[str, Any]
) -> float:
    words = [int(word[1:]) for word in solution_str.split() if word.startswith("w")]
    low, high = ground_truth
    return sum(low <= word < high for word in words) / max(1, len(words))
