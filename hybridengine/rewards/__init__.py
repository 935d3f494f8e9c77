"""Rewards: a user's function from a Python file, its faults shown with the sample."""

from hybridengine.rewards.function import RewardError, RewardFunction, load_reward_function
from hybridengine.rewards.scoring import RewardResult, score_responses

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "load_reward_function",
    "score_responses",
]
