"""Validation per data source: verl's names, and its best-of-n and majority votes in expectation."""

from __future__ import annotations

import itertools
import json
from statistics import fmean
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.engine.response import Response
from hybridengine.lab.validation import (
    ValidationHistory,
    expected_best,
    expected_majority,
    source_metrics,
)
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.metrics import problems_of
from hybridengine.train.rewards.manager import Reward
from hybridengine.train.rollouts import Rollouts, ScoredResponse, own_outcomes


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
    assert expected_majority(values, preds, n) == pytest.approx(of_all, abs=0.06)  # 4 sd
    assert expected_majority(values, [1.0] * 5, 5) == pytest.approx(fmean(values), abs=0.06)
    assert expected_majority([0.25] * 5, preds, 4) == 0.25


def test_names_and_sources() -> None:
    problems = [
        ("openai/gsm8k", {"reward": [0.0, 1.0, 1.0, 0.0]}, [1.0, 2.0, 2.0, 3.0]),
        ("openai/gsm8k", {"reward": [1.0, 1.0, 1.0, 1.0]}, [2.0, 2.0, 2.0, 2.0]),
        ("sums", {"reward": [0.5, 0.5, 0.5, 0.5], "acc": [0.0, 0.0, 0.0, 1.0]}, None),
    ]
    found = source_metrics(problems)
    assert found["val-core/openai/gsm8k/reward/mean@4"] == 0.75
    assert found["val-core/openai/gsm8k/reward/best@4/mean"] == pytest.approx((1 - 0.5**4 + 1) / 2)
    assert found["val-aux/openai/gsm8k/reward/best@2/mean"] == pytest.approx((1 - 0.5**2 + 1) / 2)
    assert found["val-aux/openai/gsm8k/reward/worst@4/mean"] == pytest.approx((0.5**4 + 1) / 2)
    assert 0.75 < found["val-core/openai/gsm8k/reward/maj@4/mean"] <= 1
    assert found["val-core/sums/acc/mean@4"] == 0.25
    assert found["val-aux/sums/reward/mean@4"] == 0.5
    assert not any("maj" in name for name in found if "sums" in name)


def test_one_response_has_a_mean_only() -> None:
    assert source_metrics([("sums", {"reward": [r]}, None) for r in (1.0, 0.0)]) == {
        "val-core/sums/reward/mean@1": 0.5
    }


def rollout(
    index: int, source: str, score: float, **texts: str
) -> tuple[PromptSample, ScoredResponse]:
    sample = PromptSample(index, [5], "?", source, "2", {})
    return sample, ScoredResponse(
        Response([9], [-0.5], "stop"), index, reward=Reward(score, texts=texts)
    )


def problems(rollouts: list[tuple[PromptSample, ScoredResponse]]):
    samples, own = (
        list({r.group: sample for sample, r in rollouts}.values()),
        [r for _, r in rollouts],
    )
    prompts = Subset(samples, range(len(samples)))
    return problems_of(Rollouts(prompts, own_outcomes(prompts, own, 0), own))


def test_votes_are_counted_over_the_answers_that_a_reward_gives() -> None:
    assert crc32(b"plumless") == crc32(b"buckeroo")  # which must not be one answer
    answers = ((1.0, "plumless"), (0.0, "buckeroo"), (1.0, "plumless"))
    found = ValidationHistory().add(
        problems([rollout(0, "a", score, pred=pred, note="x") for score, pred in answers])
    )
    assert found["val-core/a/reward/mean@3"] == pytest.approx(2 / 3)
    assert found["val-core/a/reward/maj@3/mean"] > found["val-core/a/reward/mean@3"]
    assert not any("pred" in name or "note" in name for name in found)


def test_one_validation_has_no_gain() -> None:
    history = ValidationHistory()
    history.add(problems([rollout(0, "a", 0.0), rollout(1, "b", 1.0)]))
    assert {name.rpartition("_")[2] for name in history.summary()} == {"end", "ci95", "problems"}
    assert not any("start" in name or "gain" in name for name in history.summary())
    [line] = history.lines()
    assert line.startswith("validation score: 0.500 over 2 problems, measured once; trainer.val_b")


def test_a_resumed_run_compares_with_the_start_of_the_whole_run() -> None:
    straight, resumed = ValidationHistory(), ValidationHistory()
    first = [rollout(0, "a", 0.0), rollout(1, "b", 0.0), rollout(2, "b", 1.0)]
    metrics = straight.add(problems(first))
    assert metrics["val-core/a/reward/mean@1"] == 0.0
    assert metrics["val-core/b/reward/mean@1"] == 0.5
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    last = [rollout(0, "a", 1.0), rollout(1, "b", 1.0), rollout(2, "b", 1.0)]
    straight.add(problems(last))
    resumed.add(problems(last))
    assert resumed.summary() == straight.summary() and resumed.lines() == straight.lines()
    assert resumed.summary()["val_score_start"] == pytest.approx(1 / 3)
    assert resumed.summary()["val_core_start_end"]["b/reward/mean@1"] == [0.5, 1.0]
