"""Two rewards for the same response; each takes what verl gives to a reward function."""

import re


def correct(data_source, solution_str, ground_truth, extra_info):
    """The last number is the right one; a dict's further numbers are logged as reward/<name>."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str.replace(",", ""))
    right = bool(numbers) and float(numbers[-1]) == float(ground_truth)
    return {"score": float(right), "numbers": len(numbers)}


def well_formed(data_source, solution_str, ground_truth, extra_info):
    """Exactly one boxed answer."""
    return float(solution_str.count("\\boxed{") == 1)
