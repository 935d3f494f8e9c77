"""A penalty of up to 1 for repeated word pairs, added to the reward model's score."""

from itertools import pairwise


def compute_score(data_source, solution_str, ground_truth, extra_info):
    pairs = list(pairwise(solution_str.split()))
    return len(set(pairs)) / len(pairs) - 1 if pairs else 0.0
