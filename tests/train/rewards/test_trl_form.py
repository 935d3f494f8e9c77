"""Reward functions in TRL's form, in a file and from Python, on rows of TRL."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridengine.rewards.local import given_functions
from hybridengine.run.config import RewardConfig
from hybridengine.run.config.rl import CustomRewardConfig, RewardManagerConfig
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import RewardResult, build_reward_manager

CHAT = ({"role": "user", "content": "hi"},)
SAMPLES = [
    PromptSample(i, [1], f"prompt {i}", "data", None, {"answer": str(i), "hard": i > 1}, CHAT)
    for i in range(3)
]
SOURCE = """
def right(prompts, completions, answer, **columns):
    assert prompts == [[{"role": "user", "content": "hi"}]] * 3
    assert sorted(columns) == ["ground_truth", "hard"] and columns["hard"] == [False, False, True]
    return [float(chat[0]["content"] == text) for chat, text in zip(completions, answer)]

def length(completions):
    return [len(chat[0]["content"]) for chat in completions]

async def later(prompts, completions, **columns):
    return [0.5] * len(completions)

def short(completions): return [1.0]
def unknown(prompts, completions, solution): return [1.0] * len(completions)
def none(prompts, completions): return [1.0, None, 1.0]
"""
RESPONSES = ["0", "xyz", "2"]


def score(paths: tuple[str, ...], names: tuple[str, ...], manager: str) -> RewardResult:
    config = RewardConfig(
        CustomRewardConfig(paths, names), num_workers=2, reward_manager=RewardManagerConfig(manager)
    )
    return build_reward_manager(config, 10).score(SAMPLES, RESPONSES, [1, 1, 1])


@pytest.mark.parametrize("from_python", [False, True])
@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_scores(tmp_path: Path, from_python: bool, manager: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(SOURCE)
    names, own = ("right", "length", "later"), dict[str, object]()
    exec(compile(SOURCE, str(file), "exec"), own)
    with given_functions([own[name] for name in names] if from_python else []) as given:  # type: ignore[misc]
        paths = tuple(given) if from_python else (str(file),) * 3
        result = score(paths, names, manager)
    assert result.parts["right"].scores == [1.0, 0.0, 1.0]
    assert result.parts["length"].scores == [1.0, 3.0, 1.0]
    assert result.scores == [2.5, 3.5, 2.5]


@pytest.mark.parametrize(
    ("name", "message"), [("short", "1"), ("unknown", "'solution'"), ("none", "None")]
)
def test_faults_name_the_function(tmp_path: Path, name: str, message: str) -> None:
    file = tmp_path / "reward.py"
    file.write_text(SOURCE)
    with pytest.raises(RewardError, match=f"{name}.*{message}"):
        score((str(file),), (name,), "naive")
