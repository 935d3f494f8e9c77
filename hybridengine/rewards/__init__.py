"""Score responses: reward functions run in worker processes, a manager combines their scores.

    build         the manager and the functions of a run, from its configuration
    manager       call functions, errors name the sample; several become one score per response
    workers       the worker processes, with time-outs
    local         functions given from Python, in a thread of this process
    service       functions behind a URL
    verl_manager  managers written for verl

What runs inside a worker is the package `reward_worker`.
"""

from hybridengine.errors import RewardError
from hybridengine.rewards.build import build_reward_manager
from hybridengine.rewards.manager import (
    ResponseTokens,
    RewardManager,
    RewardPart,
    RewardResult,
    register_manager,
    score_checked,
    score_responses,
)
from hybridengine.rewards.workers import RewardFunction, RewardWorkers

__all__ = [
    "ResponseTokens",
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "RewardPart",
    "RewardResult",
    "RewardWorkers",
    "build_reward_manager",
    "register_manager",
    "score_checked",
    "score_responses",
]
