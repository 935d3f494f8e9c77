"""What runs in a reward worker process: the user's files, the built-in rules, the loop of calls.

It imports the standard library only, so that a worker starts in a tenth of a second and holds
neither torch nor the engine.
"""

from hybridengine.reward_worker.function import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    BUILT_IN,
    FunctionSource,
    RewardError,
    import_file,
    import_reward_function,
    reward_file,
)

__all__ = [
    "ARGUMENTS",
    "BATCH_ARGUMENTS",
    "BUILT_IN",
    "FunctionSource",
    "RewardError",
    "import_file",
    "import_reward_function",
    "reward_file",
]
