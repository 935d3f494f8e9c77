"""What a built-in rule gives for a response."""

from __future__ import annotations

from hybridengine.train.rewards.function import import_reward_function


def score(rule, source, response, truth):
    return import_reward_function(rule)[0](source, response, truth, None)
