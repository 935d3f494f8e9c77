"""Rewards: functions from Python files, run in worker processes, combined by a manager.

What goes wrong in a function is reported with the sample.
"""

from hybridengine.reward_worker import RewardError, import_file, import_reward_function
from hybridengine.rewards.manager import (
    RewardManager,
    build_reward_manager,
    register_manager,
    score_checked,
)
from hybridengine.rewards.scoring import RewardPart, RewardResult, score_batch, score_responses
from hybridengine.rewards.workers import RewardFunction, RewardWorkers, load_reward_function

__all__ = [
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "RewardPart",
    "RewardResult",
    "RewardWorkers",
    "build_reward_manager",
    "import_file",
    "import_reward_function",
    "load_reward_function",
    "register_manager",
    "score_batch",
    "score_checked",
    "score_responses",
]
