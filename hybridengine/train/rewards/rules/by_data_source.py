"""The default rule: score each row by the rule of its `data_source`, as verl does."""

from __future__ import annotations

from functools import cache
from typing import Any

from hybridengine.run.errors import RewardError
from hybridengine.train.rewards.function import CHECK, import_reward_function

_RULES = {
    "gsm8k": ("openai/gsm8k",),
    "math_verify": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math",
        "math_dapo",
        "math_dapo_reasoning",
        "hiyouga/geometry3k",
    ),
}
_BY_SOURCE = {source: rule for rule, sources in _RULES.items() for source in sources}
_import_rule = cache(import_reward_function)
_MATH_PREFIXES = ("aime", "numina_")  # aime2024, numina_olympiads, …


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    """Score by the rule of `data_source`; RewardError for a source that has none."""
    return _import_rule(_rule_of(data_source))[0](
        data_source, solution_str, ground_truth, extra_info
    )


def check_ground_truth(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> Any:
    """Return 1; raise RewardError where the rule of `data_source` can give no response 1."""
    check, _ = _import_rule(_rule_of(data_source), CHECK)
    return check(data_source, solution_str, ground_truth, extra_info)


def _rule_of(data_source: str) -> str:
    is_math = data_source.startswith(_MATH_PREFIXES)
    rule = "math_verify" if is_math else _BY_SOURCE.get(data_source)
    if rule is None:
        known = ", ".join([*_BY_SOURCE, *(f"{prefix}*" for prefix in _MATH_PREFIXES)])
        raise RewardError(
            f"no reward function is given, and there is no rule for data_source {data_source!r} "
            f"(there is one for {known}); set "
            "reward.custom_reward_function.path to a Python file with your own, or to math_verify"
        )
    return rule
