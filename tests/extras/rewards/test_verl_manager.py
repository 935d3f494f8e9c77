"""verl's reward managers, its own files where it is installed, behind our interface."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hybridengine.rewards.verl_manager import VerlData, VerlRewardManager
from hybridengine.run.config import ConfigError, RewardConfig
from hybridengine.run.config.rl import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardManagerConfig,
    RewardModuleConfig,
)
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import (
    ResponseTokens,
    RewardManager,
    build_reward_manager,
    score_checked,
)
from tests.tiny_models import save_tiny

VERL = "pip install --no-deps verl==0.9.1"
SAMPLES = [
    PromptSample(i, [10 + i] * (1 + i), f"prompt {i}", "sums", f"w{7 + i}", {"split": "train"})
    for i in range(3)
]
TOKENS = [
    ResponseTokens([7, 2]),
    ResponseTokens([5, 5, 5, 2], [1, 0, 1, 1]),
    ResponseTokens([9, 2]),
]
TEXTS = ["w7", "w5 w5 w5", "w9"]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "sums" and extra_info["split"] == "train"
    return {"score": float(solution_str == ground_truth), "words": len(solution_str.split())}

def plain(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]
"""
OWN = '''
import torch

class Dense:
    """Rewards every token, and writes to its data as managers do."""

    def __init__(self, tokenizer, num_examine, compute_score=None, **kwargs):
        assert num_examine == 0 and not kwargs
        self.tokenizer, self.compute_score = tokenizer, compute_score

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i, item in enumerate(data):
            item.non_tensor_batch["extra_info"]["seen"] = True
            prompt_length = item.batch["prompts"].shape[-1]
            length = item.batch["attention_mask"][prompt_length:].sum()
            rewards[i, :length] = 0.5
        data.batch["acc"] = rewards.sum(-1)
        n = len(data)
        extra_info = {"text": ["a"] * n, "short": ["b"], "pred": [7.0] * n, "other": [[1]] * n}
        return {"reward_tensor": rewards, "reward_extra_info": extra_info}

class Broken(Dense):
    def __call__(self, data, return_dict=False):
        return torch.zeros(len(data))

class Raises(Dense):
    def __call__(self, data, return_dict=False):
        raise ValueError("no reward")

class Demanding(Dense):
    def __init__(self, tokenizer, num_examine, sandbox): ...

class NoManager: ...
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = save_tiny("llama", tmp_path_factory.mktemp("model"))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def build(tmp_path, tokenizer, name, function=None, file=None, **settings):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "own.py").write_text(OWN)
    functions = CustomRewardConfig((str(tmp_path / "reward.py"),), (function,))
    config = RewardConfig(
        functions if function else CustomRewardConfig(),
        reward_manager=RewardManagerConfig(name, RewardModuleConfig(file)),
        **settings,
    )
    return build_reward_manager(config, 4, tokenizer)


def own(tmp_path, tokenizer, name, **options):
    return build(tmp_path, tokenizer, name, file=str(tmp_path / "own.py"), **options)


def test_data_as_verl_pads_it():
    data = VerlData.build(SAMPLES, TOKENS, pad=0)
    assert data.batch["prompts"].tolist() == [[0, 0, 10], [0, 11, 11], [12, 12, 12]]
    assert data.batch["responses"].tolist() == [[7, 2, 0, 0], [5, 5, 5, 2], [9, 2, 0, 0]]
    assert data.batch["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert data.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0]]
    assert data.batch["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert torch.equal(data.batch["input_ids"][:, 3:], data.batch["responses"])
    assert (len(data), len(data[1:]), len(list(data))) == (3, 2, 3)
    item = data[1]
    assert item.non_tensor_batch["reward_model"]["ground_truth"] == "w8"
    assert item.batch["responses"].shape == (4,)


def test_token_rewards_are_summed_and_rows_are_copied(tmp_path, tokenizer):
    manager = own(tmp_path, tokenizer, "Dense")
    assert isinstance(manager, VerlRewardManager)
    result = score_checked(manager, SAMPLES, TEXTS, TOKENS)
    assert (result.scores, result.extras) == ([1.0, 2.0, 1.0], {})
    assert result.texts == {"text": ["a"] * 3, "pred": ["7"] * 3}
    assert "seen" not in SAMPLES[0].extra_info
    empty = score_checked(manager, SAMPLES[:1], [""], [ResponseTokens(())])  # as before a run
    assert empty.scores == [0.0]


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("Broken", {}, RewardError, r"Broken returned torch.Size\(\[3\]\).* shape \(3, 4\)"),
        ("Raises", {}, RewardError, "reward manager Raises raised ValueError: no reward"),
        ("Demanding", {}, ConfigError, "Demanding requires 'sandbox'; a manager of verl is built"),
        ("NoManager", {}, ConfigError, "'NoManager', expected one of naive, batch, dapo"),
        ("Other", {}, ConfigError, "names 'Other', which is not in .*; Dense, Broken.* is there"),
    ],
)
def test_errors(tmp_path, tokenizer, name, options, error, message):
    with pytest.raises(error, match=message):
        score_checked(own(tmp_path, tokenizer, name, **options), SAMPLES, TEXTS, TOKENS)


def test_a_file_that_does_not_exist(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"the file none.py .* does not exist"):
        build(tmp_path, tokenizer, "Own", file="none.py")


@pytest.fixture(scope="module")
def verl_managers():
    """verl's reward managers, from its own files, without the parts of verl that need Ray."""
    stubs = pytest.importorskip("benchmarks._verl", reason=VERL, exc_type=ImportError)
    spec = importlib.util.find_spec("verl")
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("verl")}
    package, protocol = ModuleType("verl"), ModuleType("verl.protocol")
    package.__path__ = list(spec.submodule_search_locations)
    package.DataProto = protocol.DataProto = VerlData
    sys.modules |= {"verl": package, "verl.protocol": protocol}
    with stubs.empty_services():
        yield importlib.import_module("verl.workers.reward_manager")
    for name in [name for name in sys.modules if name.startswith("verl")]:
        del sys.modules[name]
    sys.modules |= before


@pytest.mark.parametrize(
    ("name", "function", "scores", "extras"),
    [
        (
            "NaiveRewardManager",
            "compute_score",
            [1.0, 0.0, 1.0],
            {"raw_score": [1.0, 0.0, 1.0], "words": [1.0, 3.0, 1.0]},
        ),
        ("NaiveRewardManager", "plain", [1.0, 0.0, 1.0], {}),
        ("BatchRewardManager", "batch", [1.0, 0.0, 1.0], {}),
    ],
)
def test_verls_own_managers(tmp_path, tokenizer, verl_managers, name, function, scores, extras):
    path = f"{verl_managers.__name__}.{name}"
    manager = build(tmp_path, tokenizer, path, function)
    result = score_checked(manager, SAMPLES, TEXTS, TOKENS)
    assert (result.scores, result.extras) == (scores, extras)


def test_verls_dapo_manager_agrees_with_ours(tmp_path, tokenizer, verl_managers):
    buffer = OverlongBufferConfig(enable=True, len=2, penalty_factor=0.5)
    path = f"{verl_managers.__name__}.DAPORewardManager"
    theirs = build(tmp_path, tokenizer, path, "plain", overlong_buffer=buffer)
    ours = build(tmp_path, tokenizer, "dapo", "plain", overlong_buffer=buffer)
    assert type(ours) is not RewardManager
    result, expected = (score_checked(m, SAMPLES, TEXTS, TOKENS) for m in (theirs, ours))
    assert result.scores == pytest.approx(expected.scores)
    assert result.extras["overlong_reward"] == expected.extras["overlong_penalty"]


def test_a_service_cannot_be_called_by_a_manager_of_verl(tmp_path, tokenizer):
    (tmp_path / "own.py").write_text(OWN)
    config = RewardConfig(
        CustomRewardConfig(("http://localhost:1/x",)),
        reward_manager=RewardManagerConfig("Dense", RewardModuleConfig(str(tmp_path / "own.py"))),
    )
    with pytest.raises(ConfigError, match=r"a manager of verl .* calls one function"):
        build_reward_manager(config, 4, tokenizer)
