"""Reward functions given from Python: lambdas, closures, objects, coroutines; in a thread."""

import asyncio
import functools
import re
import sys
import time

import pytest

from hybridengine.rewards.local import given_functions
from hybridengine.rewards.workers import RewardWorkers
from hybridengine.run.config import RewardConfig
from hybridengine.run.config.rl import CustomRewardConfig, RewardManagerConfig
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import build_reward_manager

CHAT = ({"role": "user", "content": "hi"},)
SAMPLES = [PromptSample(i, [1, 2], f"prompt {i}", "sums", str(i), {}, CHAT) for i in range(3)]
RESPONSES = ["0", "5", "2"]


def scores(*functions, manager="naive", **settings):
    """Score the responses; return the result."""
    with given_functions(functions) as paths:
        config = RewardConfig(
            CustomRewardConfig(tuple(paths)),
            reward_manager=RewardManagerConfig(manager),
            **settings,
        )
        return build_reward_manager(config, 10).score(SAMPLES, RESPONSES, [1, 1, 1])


def test_a_closure_shares_its_variables():
    seen = []

    def right(solution_str, ground_truth):
        seen.append(solution_str)
        return solution_str == ground_truth

    assert scores(right).scores == [1.0, 0.0, 1.0]
    assert seen == RESPONSES


def test_several_functions_have_names_and_weights():
    result = scores(
        lambda solution_str: len(solution_str),
        lambda prompt, **others: prompt[0]["content"] == "hi" and len(others) == 4,
        weights=(1.0, 0.5),
    )
    assert result.scores == [1.5] * 3
    assert list(result.parts) == ["lambda", "lambda_2"]


class Judge:
    def __init__(self, bonus):
        self.bonus = bonus

    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return {"score": self.bonus, "x": int(solution_str)}


def add(solution_str, more):
    return int(solution_str) + more


def test_objects_and_partial_functions():
    result = scores(Judge(3))
    assert (result.scores, result.extras) == ([3.0] * 3, {"x": [0.0, 5.0, 2.0]})
    assert scores(functools.partial(add, more=1)).scores == [1.0, 6.0, 3.0]


def test_coroutines_run_concurrently():
    waiting = []

    async def together(solution_str):
        waiting.append(solution_str)
        while len(waiting) < len(RESPONSES):  # never ends if calls follow each other
            await asyncio.sleep(0.001)
        return 1.0

    assert scores(together, timeout_s=30.0).scores == [1.0] * 3


def test_a_batch_function_gets_lists():
    def batch(solution_strs, prompts):
        return [len(prompts) + int(text) for text in solution_strs]

    assert scores(batch, manager="batch").scores == [3.0, 8.0, 5.0]


def test_time_out_names_the_line_and_the_response():
    def hangs(solution_str):
        while solution_str == "5":
            time.sleep(0.01)
        return 1.0

    line = hangs.__code__.co_firstlineno
    message = rf"hangs returned no result within .* = 0.5 s at .*test_local.py:{line + 2}; .*'5'"
    with pytest.raises(RewardError, match=message):
        scores(hangs, timeout_s=0.5)


def raises(solution_str):
    raise KeyError(solution_str)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"raises raised KeyError: '0' at .*test_local.py:\d+; prompt 'prompt 0'"),
        (lambda solution_str: sys.exit(0), "lambda raised SystemExit"),
        (lambda solution_str: "good", "its result is 'good' .str., expected a finite number"),
        (lambda text: 1.0, "lambda requires 'text'; it is called with those of data_source, "),
        (lambda: 1.0, "lambda takes none of them; it is called with"),
        (max, "max takes none of them"),
    ],
)
def test_errors(function, message):
    with pytest.raises(RewardError, match=message):
        scores(function)


def test_the_next_call_works_after_a_failed_one():
    fail = [True]
    with given_functions([lambda solution_str: 1 / 0 if fail else 1.0]) as paths:
        manager = build_reward_manager(RewardConfig(CustomRewardConfig(tuple(paths))), 10)
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            manager.score(SAMPLES, RESPONSES, [1, 1, 1])
        fail.clear()
        assert manager.score(SAMPLES, RESPONSES, [1, 1, 1]).scores == [1.0] * 3


def test_a_name_of_another_process():
    config = RewardConfig(CustomRewardConfig(("python:right",)))
    with pytest.raises(RewardError, match=re.escape("'python:right' is not in this process")):
        build_reward_manager(config, 10)


def test_loading_before_a_run_does_not_check_the_arguments():
    config = RewardConfig()
    with given_functions([lambda anything: 1.0]) as [path]:
        caller = RewardWorkers.of(config)
        assert caller.load(path, arguments=()).source.name == "lambda"
        with pytest.raises(RewardError, match="requires 'anything'"):
            caller.load(path)
