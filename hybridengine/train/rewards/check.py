"""Check the reward of a run before any rank starts: its functions and their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridengine.run.config import ConfigError, RLConfig
from hybridengine.run.errors import Faults, RewardError, shorten
from hybridengine.train.algorithms import NEEDS
from hybridengine.train.build import multi_turn
from hybridengine.train.data import PromptDataset, PromptSample
from hybridengine.train.outcomes import SCORE_NAMES
from hybridengine.train.rewards.build import caller_name
from hybridengine.train.rewards.calls import RewardFunction
from hybridengine.train.rewards.function import (
    CPU_LIMIT_S,
    TIMED_OUT,
    import_reward_function,
)
from hybridengine.train.rewards.manager import (
    ResponseTokens,
    RewardManager,
    RewardResult,
    score_checked,
    score_responses,
)
from hybridengine.train.rewards.rules import CHECK

_CHECKED_AT_ONCE = 1000  # ground truths
_PROBED_ROWS = 3  # whose empty answer is scored, besides the first row of each data_source


def check_reward_files(config: RLConfig, faults: Faults) -> None:
    """Import the reward functions of files, without the manager that calls them."""
    with faults:
        for path, name in config.reward.functions:
            if caller_name(path) == "processes":
                faults.attempt(import_reward_function, path, name, None)


def check_reward(
    config: RLConfig, reward: RewardManager, datasets: Iterable[PromptDataset | None]
) -> None:
    """Score an empty answer to some prompts of each dataset, to detect a broken function.

    The built-in rules check every ground truth: that of a response can be right.
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
            if (turns := multi_turn(config)) is not None:
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
