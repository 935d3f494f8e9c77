"""Build the reward of a run from its configuration, and check it before any rank starts.

Entry points of the group hybridengine.rewards take part in it: `processes` and the schemes of URLs
(`http`) build a `Caller` from the group `reward`, `verl_manager` adapts a class of verl.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybridengine.run.config import RewardConfig, RLConfig
from hybridengine.run.errors import ConfigError, Faults, RewardError, shorten
from hybridengine.run.plugins import load_plugin
from hybridengine.train.algorithms import NEEDS
from hybridengine.train.data import PromptDataset, PromptSample
from hybridengine.train.outcomes import SCORE_NAMES
from hybridengine.train.rewards.calls import Caller, RewardFunction
from hybridengine.train.rewards.function import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    CPU_LIMIT_S,
    TIMED_OUT,
    import_file,
    import_reward_function,
)
from hybridengine.train.rewards.local import PREFIX, LocalFunctions
from hybridengine.train.rewards.manager import (
    MANAGERS,
    ResponseTokens,
    RewardManager,
    RewardResult,
    score_checked,
    score_responses,
)
from hybridengine.train.rewards.rules import CHECK

KEY = "reward.custom_reward_function.path"
_CHECKED_AT_ONCE = 1000  # ground truths
_PROBED_ROWS = 3  # whose empty answer is scored, besides the first row of each data_source


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


def check_reward_files(config: RLConfig, faults: Faults) -> None:
    """Import the reward functions of files, without the manager that calls them."""
    with faults:
        for path, name in config.reward.functions:
            if caller_name(path) == "processes":
                faults.attempt(import_reward_function, path, name, None)


def check_reward(
    config: RLConfig,
    reward: RewardManager,
    datasets: Iterable[PromptDataset | None],
    turns: Any = None,
) -> None:
    """Score an empty answer to some prompts of each dataset, to detect a broken function.

    The built-in rules check every ground truth: that of a response can be right.

    turns: the entry point of rollouts of several turns, see `multi_turn`; None: of single turns.
    """
    checks = [
        function.caller.load(function.source.rule, CHECK)
        for function in reward.functions
        if function.source.checks_ground_truth
    ]
    for dataset in datasets:
        if dataset is not None:
            _check_ground_truths(checks, dataset)
            firsts = {sample.data_source: sample for sample in reversed(dataset)}
            probed = [*dataset[:_PROBED_ROWS], *firsts.values()]
            if turns is not None:
                probed = [turns.with_turns(sample) for sample in probed]
            result = score_checked(
                reward, probed, [""] * len(probed), [ResponseTokens(())] * len(probed)
            )
            _check_reward_names(config, result)


def _check_ground_truths(checks: Sequence[RewardFunction], dataset: PromptDataset) -> None:
    """Check every different ground truth once, in worker processes."""
    seen, chunk = set[tuple[str, str]](), list[PromptSample]()
    for position, sample in enumerate(dataset if checks else ()):
        key = sample.data_source, repr(sample.ground_truth)
        if key not in seen:
            seen.add(key)
            chunk.append(sample)
        if len(chunk) < _CHECKED_AT_ONCE and position < len(dataset) - 1:
            continue
        for check in checks:
            result = score_responses(check, chunk, [""] * len(chunk))
            late = [s for s, x in zip(chunk, result.counts.get(TIMED_OUT, ()), strict=True) if x]
            if late:
                raise RewardError(
                    f"reward_model.ground_truth is {shorten(repr(late[0].ground_truth), 300)} in "
                    f"row {late[0].index} of the data (from 0), for which its rule needs more than "
                    f"{CPU_LIMIT_S:g} s of CPU time or 2 GiB of memory: no response could be "
                    "right. Correct the row"
                )
        chunk = []


def _check_reward_names(config: RLConfig, result: RewardResult) -> None:
    """Check that the reward returns the results, besides the score, that the algorithm needs."""
    algorithm = config.algorithm
    model = ["reward_model"] if config.reward.reward_model.enable else []
    turns = ["turn_rewards"] if config.rollout.multi_turn.enable else []
    declared = [*result.parts, *turns, *model]
    returned = ["score", *result.extras, *turns, *model]
    metric = algorithm.filter_groups.metric
    if algorithm.filter_groups.enable and metric not in {*returned, *SCORE_NAMES}:
        raise ConfigError(
            f"algorithm.filter_groups.metric names {metric!r}, which the reward does not return; "
            f"it returns {', '.join(returned)}"
        )
    if "reward_parts" in NEEDS[algorithm.adv_estimator]:
        keys = algorithm.gdpo_reward_keys
        if missing := sorted(set(keys) - set(declared)):
            raise ConfigError(
                f"algorithm.gdpo_reward_keys names {missing[0]!r}, which is not a declared reward; "
                f"the rewards of this run are {', '.join(declared)} (functions of "
                "reward.custom_reward_function.path and the reward model, with reward.weights)"
            )
        if len(keys or declared) < 2:
            raise ConfigError(
                f"algorithm.adv_estimator is {algorithm.adv_estimator!r}, which normalises several "
                f"rewards separately, and there is one ({', '.join(keys or declared)}); give "
                "several functions in reward.custom_reward_function.path"
            )
