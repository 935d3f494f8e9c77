"""A user's reward function: loading, calls with verl's arguments, errors with the sample."""

import textwrap

import pytest

from hybridengine.rewards.workers import RewardWorkers
from hybridengine.run.errors import RewardError
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.manager import score_responses

SAMPLE = PromptSample(3, [1, 2], "what is 1 + 1", "sums", "2", {"level": 1})


def load(tmp_path, source: str, name: str = "compute_score"):
    file = tmp_path / "reward.py"
    file.write_text(textwrap.dedent(source))
    return RewardWorkers().load(file, name)


def score(tmp_path, body: str, *responses: str):
    function = load(
        tmp_path,
        f"""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            {body}
        """,
    )
    return score_responses(function, [SAMPLE] * len(responses), responses)


def test_numbers(tmp_path):
    result = score(tmp_path, "return solution_str == ground_truth", "2", "3")
    assert result.scores == [1.0, 0.0]
    assert result.extras == {}


def test_all_four_arguments_arrive(tmp_path):
    body = "assert (data_source, ground_truth, extra_info) == ('sums', '2', {'level': 1}); return 1"
    assert score(tmp_path, body, "2").scores == [1.0]


def test_dict_with_extras(tmp_path):
    body = "return {'score': 0.5, 'strict': solution_str == '2', 'note': solution_str}"
    result = score(tmp_path, body, "2", "3")
    assert result.scores == [0.5, 0.5]
    assert result.extras == {"strict": [1.0, 0.0]}
    assert result.texts == {"note": ["2", "3"]}


def test_a_text_may_be_there_for_some_responses(tmp_path):
    body = "return {'score': 1, **({'error': 'bad'} if solution_str == '2' else {})}"
    result = score(tmp_path, body, "1", "2")
    assert result.texts == {"error": [None, "bad"]}
    assert [result.of(k).texts for k in range(2)] == [{}, {"error": "bad"}]


def test_numpy_numbers_and_default_arguments(tmp_path):
    function = load(
        tmp_path,
        """
        import numpy as np
        def mine(data_source, solution_str, ground_truth, extra_info=None, *, bonus=1.0):
            return np.float32(bonus)
        """,
        "mine",
    )
    assert score_responses(function, [SAMPLE], ["x"]).scores == [1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "its result is None .NoneType., expected a finite number"),
        ("return '1'", "its result is '1' .str."),
        ("return float('nan')", "its result is nan"),
        ("return float('inf')", "its result is inf"),
        ("return {'acc': 1}", "a dict without 'score' .keys .'acc'"),
        ("return {'score': None}", "'score' is None"),
        ("return {'score': 1, 'strict': [1]}", r"'strict' is \[1\] .list."),
        ("return 1 / 0", "compute_score raised ZeroDivisionError: division by zero at .*py:3;"),
        ("return int(solution_str)", "compute_score raised ValueError"),
    ],
)
def test_errors_name_the_sample(tmp_path, body, message):
    with pytest.raises(RewardError, match=message) as error:
        score(tmp_path, body, "an answer")
    assert "prompt 'what is 1 + 1', response 'an answer', ground truth '2'" in str(error.value)
    assert f"{tmp_path / 'reward.py'}:" in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "now", "before"),
    [
        ({"a": 1}, {"b": 1}, r"\['b'\]", r"\['a'\]"),
        ({"a": 1}, {"a": "1"}, r"\[\]", r"\['a'\]"),
        ({"pred": "1"}, {}, r"\[\]", r"\['pred'\]"),
    ],
)
def test_numbers_and_answers_must_agree(tmp_path, first, second, now, before):
    body = f"return {{'score': 1, **({first} if solution_str == 'x' else {second})}}"
    with pytest.raises(RewardError, match=f"extra results {now} where an earlier .* had {before}"):
        score(tmp_path, body, "x", "y")


def test_the_error_line_is_the_deepest_of_the_users_file(tmp_path):
    function = load(
        tmp_path,
        """
        import json
        def helper(text):
            return json.loads(text)
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return helper(solution_str)
        """,
    )
    with pytest.raises(RewardError, match=r"JSONDecodeError: .* at .*reward\.py:4;"):
        score_responses(function, [SAMPLE], ["{"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def other(): pass", "has no function 'compute_score'; functions there: other"),
        ("compute_score = 3", "has no function 'compute_score'; functions there: none"),
        ("def compute_score(prompt, completion): pass", "must accept data_source, solution_str"),
        ("def compute_score(:\n", r"reward\.py:1 is not Python"),
        ("import no_such_module_anywhere", r"reward\.py:1 fails to import: ModuleNotFoundError"),
        ("x = 1\n1 / 0", r"reward\.py:2 fails to import: ZeroDivisionError"),
    ],
)
def test_errors_while_loading(tmp_path, source, message):
    with pytest.raises(RewardError, match=message):
        load(tmp_path, source)


def test_missing_file(tmp_path):
    with pytest.raises(RewardError, match=r"does not exist; check reward\.custom_reward_function"):
        RewardWorkers().load(tmp_path / "none.py")
