"""Reward managers: several functions, batches, DAPO's overlong penalty, a user's own."""

import sys

import pytest

from hybridengine.run.config import ConfigError, RewardConfig
from hybridengine.run.config.rl import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardManagerConfig,
)
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import (
    ResponseTokens,
    RewardManager,
    RewardResult,
    build_reward_manager,
    register_manager,
    score_checked,
)

SAMPLES = [PromptSample(i, [1, 2], f"prompt {i}", "sums", str(i), {}) for i in range(3)]
NAMES = "data_source, solution_str, ground_truth, extra_info"
PLURAL = "data_sources, solution_strs, ground_truths, extra_infos"


def manager(tmp_path, sources, name="naive", **settings):
    """Return a manager of functions with the bodies `sources`, by file stem."""
    files = []
    for stem, body in sources.items():
        file = tmp_path / f"{stem}.py"
        arguments = PLURAL if name == "batch" else NAMES
        file.write_text(f"def compute_score({arguments}):\n    {body}\n")
        files.append(str(file))
    config = RewardConfig(
        CustomRewardConfig(tuple(files)), reward_manager=RewardManagerConfig(name), **settings
    )
    return build_reward_manager(config, max_response_length=10)


def score(built, lengths=(1, 1, 1)):
    return built.score(SAMPLES, ["0", "5", "2"], list(lengths))


def test_several_functions_with_weights(tmp_path):
    sources = {
        "right": "return solution_str == ground_truth",
        "long": "return {'score': 4, 'x': int(ground_truth)}",
    }
    result = score(manager(tmp_path, sources, weights=(1.0, 0.25)))
    assert result.scores == [2.0, 1.0, 2.0]
    assert result.extras == {
        "right": [1.0, 0.0, 1.0],
        "long": [4.0, 4.0, 4.0],
        "x": [0.0, 1.0, 2.0],
    }
    assert result.parts == {"right": (1.0, [1.0, 0.0, 1.0]), "long": (0.25, [4.0, 4.0, 4.0])}


def test_extras_of_the_same_name_get_prefixes(tmp_path):
    both = {"a": "return {'score': 1, 'x': 1}", "b": "return {'score': 2, 'x': 2}"}
    result = score(manager(tmp_path, both))
    assert (result.extras["x"], result.extras["b/x"]) == ([1.0] * 3, [2.0] * 3)
    both = {"a": "return {'score': 1, 'x': 'text'}", "b": "return {'score': 2, 'x': 2}"}
    result = score(manager(tmp_path, both))
    assert (result.extras["x"], result.texts) == ([2.0] * 3, {"a/x": ["text"] * 3})


def test_functions_of_the_same_name_keep_their_results(tmp_path):
    """Files of one name in three folders."""
    files = []
    for k in range(3):
        (tmp_path / str(k)).mkdir()
        files.append(tmp_path / str(k) / "right.py")
        files[-1].write_text(f"def compute_score({NAMES}): return {{'score': {k}, 'x': {10 * k}}}")
    config = RewardConfig(CustomRewardConfig(tuple(map(str, files))))
    result = score(build_reward_manager(config, 10))
    assert result.scores == [3.0] * 3
    names = ["x", "right", "right/x", "right/right", "right/x_2", "right/right_2"]
    assert {name: values[0] for name, values in result.extras.items()} == dict(
        zip(names, [0.0, 0.0, 10.0, 1.0, 20.0, 2.0], strict=True)
    )
    assert [part.scores[0] for part in result.parts.values()] == [0.0, 1.0, 2.0]


def test_batch_gets_lists(tmp_path):
    body = "return [float(s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]"
    told = "return [{'score': 0, 'pred': s} for s in solution_strs]"
    assert score(manager(tmp_path, {"b": told}, "batch")).texts == {"pred": ["0", "5", "2"]}
    assert score(manager(tmp_path, {"b": body}, "batch")).scores == [1.0, 0.0, 1.0]
    assert manager(tmp_path, {"b": body}, "batch").score([], [], []).scores == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned 1 results for 3 responses"),
        ("return 1.0", "returned <class 'float'> for 3 responses"),
        ("return [1, 2, None]", "its result is None .*prompt 'prompt 2', response '2'"),
        ("raise KeyError('x')", "raised KeyError: 'x' at .*py:2; first of 3: prompt 'prompt 0'"),
    ],
)
def test_errors_of_a_batch_function(tmp_path, body, message):
    with pytest.raises(RewardError, match=message):
        score(manager(tmp_path, {"b": body}, "batch"))


def test_a_batch_function_must_take_lists(tmp_path):
    (tmp_path / "one.py").write_text(f"def compute_score({NAMES}): return 1")
    files = CustomRewardConfig((str(tmp_path / "one.py"),))
    config = RewardConfig(files, reward_manager=RewardManagerConfig("batch"))
    with pytest.raises(RewardError, match="must accept data_sources, solution_strs"):
        build_reward_manager(config, 10)


def test_dapo_overlong_penalty(tmp_path):
    """arXiv 2503.14476, eq. 13 with L_max 10, L_cache 4: 0 up to 6, then linear to -1 at 10."""
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=1.0)
    body = "return {'score': 1, 'pred': solution_str}"
    built = manager(tmp_path, {"r": body}, "dapo", overlong_buffer=buffer)
    result = score(built, (6, 7, 10))
    assert result.texts == {"pred": ["0", "5", "2"]}
    assert result.scores == [1.0, 0.75, 0.0]
    assert result.extras == {"overlong_penalty": [0.0, -0.25, -1.0]}
    assert result.parts == {"r": (1.0, [1.0] * 3), "overlong_penalty": (1.0, [0.0, -0.25, -1.0])}
    off = OverlongBufferConfig(enable=False, len=4)
    assert (
        score(manager(tmp_path, {"r": "return 1"}, "dapo", overlong_buffer=off)).scores == [1] * 3
    )


def test_a_users_manager(tmp_path, monkeypatch):
    class Longest(RewardManager):
        def score(self, samples, responses, lengths):
            return RewardResult([float(n == max(lengths)) for n in lengths], {})

    register_manager("longest_for_this_test")(Longest)
    assert score(manager(tmp_path, {}, "longest_for_this_test"), (1, 3, 2)).scores == [0, 1, 0]
    with pytest.raises(ValueError, match="already registered"):
        register_manager("longest_for_this_test")(RewardManager)
    (tmp_path / "users_module_for_this_test.py").write_text(
        "from hybridengine.train.rewards.manager import RewardManager, RewardResult\n"
        "class Own(RewardManager):\n"
        "    def score(self, samples, responses, lengths):\n"
        "        return RewardResult([7.0] * len(samples), {})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    built = manager(tmp_path, {}, "users_module_for_this_test.Own")
    assert score(built).scores == [7.0] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("naiv", "expected one of naive, batch, dapo"),
        ("no_such_package.Manager", "cannot be imported: No module named"),
        ("hybridengine.train.rewards.NoManager", "cannot be imported: .*no attribute"),
        ("hybridengine.run.errors.RewardError", "expected one of"),
    ],
)
def test_unknown_managers(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        manager(tmp_path, {}, name)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit(0)", "reward manager Own raised SystemExit: 0"),
        ("return RewardResult([1.0], {})", "returned 1 values of score for 3 responses"),
        ("return RewardResult([1.0] * 3, {'x': [1.0]})", "returned 1 values of x for 3 responses"),
        (
            "return RewardResult([1, 2, float('nan')], {})",
            "returned nan as score, expected a finite",
        ),
        ("return RewardResult([1, None, 2], {})", "returned None as score, expected a finite"),
        (
            "return RewardResult([1] * 3, {}, texts={'x': ['a', None, 1]})",
            "returned 1 as x, expected a text or None",
        ),
    ],
)
def test_the_result_of_a_users_manager_is_checked(body, message):
    space = {"RewardManager": RewardManager, "RewardResult": RewardResult, "sys": sys}
    exec(f"class Own(RewardManager):\n  def score(self, *given):\n    {body}", space)
    with pytest.raises(RewardError, match=message):
        score_checked(
            space["Own"]([], RewardConfig(), 10),
            SAMPLES,
            ["0", "5", "2"],
            [ResponseTokens([1])] * 3,
        )


def test_a_users_manager_may_return_answers_as_numbers():
    class Own(RewardManager):
        def score(self, *given):
            return RewardResult([1] * 3, {"pred": [1, 2.0, 2]}, texts={"x": ["a", None, "\ud83d"]})

    result = score_checked(
        Own([], RewardConfig(), 10), SAMPLES, ["0", "5", "2"], [ResponseTokens([1])] * 3
    )
    assert result.extras == {}
    assert result.texts == {"x": ["a", None, "\\ud83d"], "pred": ["1", "2", "2"]}
