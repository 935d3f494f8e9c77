"""Build the reward of a run from its configuration.

Entry points of the group hybridengine.rewards take part in it: `processes` and the schemes of URLs
(`http`) build a `Caller` from the group `reward`, `verl_manager` adapts a class of verl.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

from hybridengine.run.config import RewardConfig
from hybridengine.run.errors import ConfigError
from hybridengine.run.plugins import load_plugin
from hybridengine.train.rewards.calls import Caller, RewardFunction
from hybridengine.train.rewards.function import ARGUMENTS, BATCH_ARGUMENTS, import_file
from hybridengine.train.rewards.local import PREFIX, LocalFunctions
from hybridengine.train.rewards.manager import MANAGERS, RewardManager

KEY = "reward.custom_reward_function.path"


def build_reward_manager(
    reward: RewardConfig, max_response_length: int, tokenizer: Any = None
) -> RewardManager:
    """Build the manager `reward.reward_manager.name` with the reward functions of the run.

    A class that is no RewardManager, but takes verl's arguments, is adapted; tokenizer: for it.

    Raises ConfigError for a name that is neither registered nor a class; RewardError for a function
    that cannot be loaded.
    """
    name, file = reward.reward_manager.name, reward.reward_manager.module.path
    manager = _from_file(file, name) if file else MANAGERS.get(name) or _import_class(name)
    if issubclass(manager, RewardManager):
        return manager(_load_functions(reward, manager.batched), reward, max_response_length)
    adapt = load_plugin("rewards", "verl_manager", "reward.reward_manager.name")
    return adapt(manager, reward, max_response_length, tokenizer)


def caller_name(path: str) -> str:
    """Return what calls the function `path`: `python`, a URL's scheme, or `processes`."""
    scheme, _, rest = path.partition("://")
    return "python" if path.startswith(PREFIX) else scheme if rest else "processes"


def _load_functions(reward: RewardConfig, batched: bool) -> list[RewardFunction]:
    """Load every function of the run: in worker processes, in this process, or as a service."""
    callers: dict[str, Caller] = {"python": LocalFunctions(reward.timeout_s)}
    loaded = []
    for path, name in reward.functions:
        kind = caller_name(path)
        if kind not in callers:
            callers[kind] = load_plugin("rewards", kind, KEY)(reward)
        loaded.append(callers[kind].load(path, name, BATCH_ARGUMENTS if batched else ARGUMENTS))
    return loaded


def _from_file(path: str, name: str) -> type:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"reward.reward_manager.module.path {path!r} does not exist")
    module = import_file(file)
    manager = getattr(module, name, None)
    if not isinstance(manager, type):
        classes = [n for n, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f"reward.reward_manager.name is {name!r}, which is no class in {file}; classes there: "
            f"{', '.join(classes) or 'none'}"
        )
    return _checked(manager, name)


def _import_class(name: str) -> type:
    try:
        manager = pkgutil.resolve_name(name) if "." in name else None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.reward_manager.name {name!r} cannot be imported: {error}"
        ) from error
    return _checked(manager, name)


def _checked(manager: Any, name: str) -> type:
    """Return `manager`, a RewardManager or a class that is called as verl's."""
    is_class = isinstance(manager, type)
    if is_class and (issubclass(manager, RewardManager) or "__call__" in dir(manager)):
        return manager
    raise ConfigError(
        f"reward.reward_manager.name is {name!r}, expected one of {', '.join(MANAGERS)}, or a "
        "class (package.module.Class, or one in the file reward.reward_manager.module.path) that "
        "is a RewardManager or has verl's __call__(self, data, return_dict)"
    )
