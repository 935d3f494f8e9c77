"""Two rewards for the same response, with the arguments of verl's reward functions."""

import re


def correct(data_source, solution_str, ground_truth, extra_info):
    """Return 1 if the last number is correct; further numbers are logged as reward/<name>."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str.replace(",", ""))
    right = bool(numbers) and float(numbers[-1]) == float(ground_truth)
    return {"score": float(right), "numbers": len(numbers)}


def well_formed(data_source, solution_str, ground_truth, extra_info):
    """Return 1 for exactly one boxed answer."""
    return float(solution_str.count("\\boxed{") == 1)
