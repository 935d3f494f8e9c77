"""What a built-in rule gives for a response."""

from __future__ import annotations

from hybridengine.rewards.functions import import_reward_function


def score(rule, source, response, truth, function="compute_score"):
    return import_reward_function(rule, function)[0](
        data_source=source, solution_str=response, ground_truth=truth, extra_info=None
    )
