"""Conversion of results to finite numbers and texts."""

import math
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.rewards.calls import to_results, to_rows

NUMBERS = [
    (True, 1.0),
    (3, 3.0),
    (Fraction(1, 4), 0.25),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.bool_(True), 1.0),
    (np.array(2.0), 2.0),
    (np.array([2.0]), 2.0),
    (torch.tensor(2.0), 2.0),
    (torch.tensor([True]), 1.0),
]
NOT_NUMBERS = [
    None,
    "1",
    [1],
    math.nan,
    math.inf,
    -math.inf,
    1j,
    10**400,
    10**5000,
    -(10**400),
    Decimal("1"),
    np.float64("nan"),
    np.array([1.0, 2.0]),
    torch.tensor([1.0, 2.0]),
    torch.tensor(math.inf),
    torch.empty(2, device="meta"),
    torch.empty((), device="meta"),
    object(),
    b"1",
]


@pytest.mark.parametrize(("given_value", "expected"), NUMBERS)
def test_numbers(given_value, expected):
    assert to_results(given_value) == {"score": expected}
    assert type(to_results({"score": 1, "x": given_value})["x"]) is float


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda v: type(v).__name__)
def test_values_that_are_not_numbers(value):
    with pytest.raises(ValueError, match=r"its result is .*, expected a finite number") as error:
        to_results(value)
    assert len(str(error.value)) < 400
    with pytest.raises(ValueError, match="'score' is "):
        to_results({"score": value})


class Verdict(StrEnum):
    """A text of a type that the other process does not have."""

    RIGHT = "right"


def test_texts_are_kept_and_the_score_is_required():
    found = to_results({"score": 1, "note": "x", "of": Verdict.RIGHT, "odd": "\ud83d", 3: 4})
    assert found == {"score": 1.0, "note": "x", "of": "right", "odd": "\\ud83d", "3": 4.0}
    assert type(found["of"]) is str
    with pytest.raises(ValueError, match=r"without 'score' .keys .'acc'"):
        to_results({"acc": 1})


@pytest.mark.parametrize(
    ("pred", "text"),
    [("42", "42"), (42, "42"), (42.0, "42"), (torch.tensor(0.5), "0.5"), (None, "None")],
)
def test_the_answer_of_votes_is_a_text(pred, text):
    assert to_results({"score": 1, "pred": pred}) == {"score": 1.0, "pred": text}


def test_a_value_whose_repr_raises():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no")

    with pytest.raises(ValueError, match=r"<Odd: RuntimeError> .Odd."):
        to_results(Odd())


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)))
def test_rows_of_a_batch(values):
    for rows in (values, tuple(values), np.array(values, dtype=np.float64)):
        assert to_rows(rows, len(values)) == values
    with pytest.raises(ValueError, match="results for"):
        to_rows(values, len(values) + 1)


@pytest.mark.parametrize("results", [1.0, "12", {"a": 1}, None, np.array(1.0)])
def test_batch_results_must_be_a_list(results):
    with pytest.raises(ValueError, match="expected a list"):
        to_rows(results, 2)
