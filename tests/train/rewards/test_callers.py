"""What calls a reward function comes from the entry points of hybridengine.rewards."""

from importlib.metadata import EntryPoint

import pytest

from hybridengine import run
from hybridengine.run.config import ConfigError, RewardConfig
from hybridengine.run.config.rl import CustomRewardConfig, RewardManagerConfig
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.function import FunctionSource, RewardFunction
from hybridengine.train.rewards.manager import build_reward_manager

SAMPLES = [PromptSample(i, [1], "", "sums", str(i), {}) for i in range(2)]


@pytest.fixture
def register(monkeypatch):
    """Return a function that replaces all entry points of hybridengine.rewards."""

    def replace(**values):
        group = "hybridengine.rewards"
        points = [EntryPoint(name, value, group) for name, value in values.items()]
        monkeypatch.setattr(run, "plugins", lambda _: {x.name: x for x in points})

    return replace


def manager(path, name="naive"):
    reward = RewardConfig(CustomRewardConfig((path,)), reward_manager=RewardManagerConfig(name))
    return build_reward_manager(reward, 10)


class Local:
    """A caller for URLs of the scheme `shout`."""

    def __init__(self, reward):
        self.timeout_s = reward.timeout_s

    def load(self, path, name="compute_score", arguments=()):
        return RewardFunction(FunctionSource(path, name, 1, "shout"), 0, self, arguments)

    def call(self, function, columns, size):
        return [{"score": float(len(text))} for text in columns["solution_str"]]


def test_a_scheme_of_ones_own(register):
    register(shout=f"{__name__}:Local")
    result = manager("shout://anywhere").score(SAMPLES, ["a", "abc"], [1, 3])
    assert result.scores == [1.0, 3.0] and list(result.parts) == ["shout"]


@pytest.mark.parametrize(
    ("path", "name", "key", "wanted"),
    [
        ("gsm8k", "naive", "custom_reward_function.path", "processes"),
        ("https://localhost/score", "naive", "custom_reward_function.path", "https"),
        ("gsm8k", f"{__name__}.Verl", "reward_manager.name", "verl_manager"),
    ],
)
def test_a_part_that_is_not_installed(register, path, name, key, wanted):
    register(shout=f"{__name__}:Local")
    message = rf"^reward\.{key} needs `{wanted}`.*hybridengine\.rewards; registered are: shout"
    with pytest.raises(ConfigError, match=message):
        manager(path, name)


class Verl:
    def __call__(self, data, return_dict=False):
        return {}
