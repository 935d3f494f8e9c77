"""Validation per data source: verl's names, and its best-of-n and majority votes in expectation."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.trainer.validation_metrics import expected_best, majority, source_metrics


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.integers(min_value=1, max_value=4))
def test_best_is_the_mean_over_all_draws(values: list[float], n: int) -> None:
    of_all = fmean(max(drawn) for drawn in itertools.product(values, repeat=n))
    assert expected_best(values, n) == pytest.approx(of_all, abs=1e-9)


def test_majority_is_near_the_mean_over_all_draws() -> None:
    values, preds, n = [1.0, 0.0, 1.0, 0.0, 0.5], [7.0, 8.0, 7.0, 9.0, 8.0], 3

    def vote(drawn: tuple[int, ...]) -> float:
        answers = [preds[i] for i in drawn]
        return values[drawn[max(range(n), key=lambda k: (answers.count(answers[k]), -k))]]

    of_all = fmean(vote(drawn) for drawn in itertools.product(range(5), repeat=n))
    assert majority(values, preds, n) == pytest.approx(of_all, abs=0.06)  # 4 sd of 1,000 draws
    assert majority(values, [1.0] * 5, 5) == pytest.approx(fmean(values), abs=0.06)
    assert majority([0.25] * 5, preds, 4) == 0.25


def test_names_and_sources() -> None:
    problems = [
        ("openai/gsm8k", {"reward": [0.0, 1.0, 1.0, 0.0], "pred": [1.0, 2.0, 2.0, 3.0]}),
        ("openai/gsm8k", {"reward": [1.0, 1.0, 1.0, 1.0], "pred": [2.0, 2.0, 2.0, 2.0]}),
        ("sums", {"reward": [0.5, 0.5, 0.5, 0.5], "acc": [0.0, 0.0, 0.0, 1.0]}),
    ]
    found = source_metrics(problems)
    assert found["val-core/openai/gsm8k/reward/mean@4"] == 0.75
    assert found["val-core/openai/gsm8k/reward/best@4/mean"] == pytest.approx((1 - 0.5**4 + 1) / 2)
    assert found["val-aux/openai/gsm8k/reward/best@2/mean"] == pytest.approx((1 - 0.5**2 + 1) / 2)
    assert found["val-aux/openai/gsm8k/reward/worst@4/mean"] == pytest.approx((0.5**4 + 1) / 2)
    assert 0.75 < found["val-core/openai/gsm8k/reward/maj@4/mean"] <= 1
    assert found["val-core/sums/acc/mean@4"] == 0.25
    assert found["val-aux/sums/reward/mean@4"] == 0.5
    assert not any("pred" in name or "maj" in name for name in found if "sums" in name)


def test_one_response_has_a_mean_only() -> None:
    assert source_metrics([("sums", {"reward": [1.0]}), ("sums", {"reward": [0.0]})]) == {
        "val-core/sums/reward/mean@1": 0.5
    }
