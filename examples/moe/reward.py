"""The share of a sentence's words that may follow and are of the kind that the prompt asks for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

LENGTH = 16


def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any]
) -> float:
    words = [ground_truth["first"], *solution_str.split()]
    right = [
        word in ground_truth["following"].get(before, ())
        and int(word[1:]) % 2 == ground_truth["kind"]
        for before, word in pairwise(words)
    ]
    return sum(right) / max(LENGTH, len(right))
