"""The demo's reward: the number alone is best, the number with chatter is half as good.

strict: the response is exactly the right number. lenient: the right number is anywhere in it.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info):
    numbers = re.findall(r"-?\d+", solution_str)
    strict = solution_str.strip() == ground_truth
    if strict:
        score = 1.0
    elif numbers and numbers[0] == ground_truth:
        score = 0.5
    elif re.fullmatch(r"-?\d+", solution_str.strip()):
        score = 0.1  # a wrong number, but nothing else
    else:
        score = 0.0
    return {"score": score, "strict": strict, "lenient": ground_truth in numbers}
