"""Rewards: functions from Python files, combined by a manager, faults shown with the sample."""

from hybridengine.rewards.function import (
    RewardError,
    RewardFunction,
    import_file,
    load_reward_function,
)
from hybridengine.rewards.manager import RewardManager, build_reward_manager, register_manager
from hybridengine.rewards.scoring import RewardResult, score_batch, score_responses

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "RewardResult",
    "build_reward_manager",
    "import_file",
    "load_reward_function",
    "register_manager",
    "score_batch",
    "score_responses",
]
