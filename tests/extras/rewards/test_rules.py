"""The built-in rules, and the rule of each data_source."""

import time

import pytest

from hybridengine.rewards.functions import BUILT_IN, CHECK, is_plain
from hybridengine.run.errors import RewardError
from tests.extras.rewards.rules import score


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"Hence \boxed{\frac{2}{3}}", "0.5", 0.0),
        ("The answer is 7", "7", 1.0),
        ("The answer is 7", 7, 1.0),
        (r"$x = \sqrt{8}$", r"2\sqrt{2}", 1.0),
        ("no answer at all", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math(response, truth, expected):
    assert score("math_verify", "math", response, truth) == expected


@pytest.mark.parametrize("truth", ["", " ", "}", "$$", r"\text{}", ["34"], [3, 43], None, {}])
def test_math_refuses_a_ground_truth_that_no_answer_can_equal(truth):
    for function in ("compute_score", "check_ground_truth"):
        with pytest.raises(
            RewardError, match=r"ground_truth is .*the rule math_verify needs a num"
        ):
            score("math_verify", "math", r"\boxed{3}", truth, function)


@pytest.mark.parametrize(
    "truth",
    ["7", 7, 0.5, "(1, 2)", r"(-\infty, 2]", "1 < x < 2", r"\frac{1}{2}", "blue", "A", "10%"],
)
def test_math_accepts_ground_truths_that_equal_themselves(truth):
    assert score("math_verify", "math", "", truth, CHECK) == 1
    assert score("math_verify", "math", f"\\boxed{{{truth}}}", truth) == 1


def test_a_long_ground_truth_is_looked_at_in_linear_time():
    started = time.process_time()
    assert is_plain("a" * 100_000) and not is_plain("a" * 100_000 + "{") and not is_plain("+ " * 9)
    assert time.process_time() - started < 20  # quadratic: minutes


def test_the_rules_that_check_ground_truths():
    checked = {name for name in BUILT_IN if hasattr(BUILT_IN[name], CHECK)}
    assert checked == {"math_verify", "gsm8k", "data_source"}


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("6 + 12 = 18\n#### 18", "18", 1.0),
        ("#### 18", 18, 1.0),
        ("#### 1,234.", "1234", 1.0),
        ("#### $18.00", "18", 1.0),
        ("#### -3", "#### -3", 1.0),
        ("#### 18\n#### 19", "18", 0.0),  # the last one counts
        ("the answer is 18", "18", 0.0),  # strict
        (r"\boxed{18}", "18", 0.0),
        ("#### 1.2.3", "1", 0.0),
        ("#### ,", "1", 0.0),
        ("####", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_gsm8k(response, truth, expected):
    assert score("gsm8k", "openai/gsm8k", response, truth) == expected


@pytest.mark.parametrize("truth", [None, "eighteen", "", "nan"])
def test_gsm8k_needs_a_number(truth):
    with pytest.raises(RewardError, match=r"ground_truth is .*the rule gsm8k expects a number"):
        score("gsm8k", "openai/gsm8k", "#### 18", truth)


@pytest.mark.parametrize(
    ("source", "response", "expected"),
    [
        ("openai/gsm8k", "#### 18", 1.0),
        ("openai/gsm8k", r"\boxed{18}", 0.0),
        ("lighteval/MATH", r"\boxed{18}", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{17}", 0.0),
        ("math_dapo", "Answer: 18", 1.0),
        ("aime2024", r"\boxed{18}", 1.0),
        ("numina_olympiads", r"\boxed{18}", 1.0),
        ("hiyouga/geometry3k", r"\boxed{18}", 1.0),
    ],
)
def test_the_rule_of_a_data_source(source, response, expected):
    assert score("data_source", source, response, "18") == expected


@pytest.mark.parametrize("source", ["sums", "codecontests", "", "None"])
def test_a_data_source_without_a_rule(source):
    message = (
        f"no rule for data_source '{source}' .*openai/gsm8k, .*aime.*; set "
        "reward.custom_reward_function.path to a Python file"
    )
    with pytest.raises(RewardError, match=message):
        score("data_source", source, "#### 18", "18")
