"""grouped_linear in Triton's interpreter, run by test_grouped_linear_triton.py."""

import pytest
import torch

from hybridengine.kernels import _backend, grouped_linear_triton
from tests.kernels import grouped_cases as cases
from tests.kernels.interpreter import round_to_nearest, widen_dot

DTYPES = pytest.mark.parametrize("dtype", cases.DTYPES, ids=("float32", "bfloat16"))


@pytest.fixture(autouse=True)
def triton_on_cpu_tensors(monkeypatch):
    widen_dot(monkeypatch)
    round_to_nearest(monkeypatch)
    monkeypatch.setattr(_backend, "why_unavailable", lambda *_: None)


@DTYPES
@pytest.mark.parametrize(
    "counts, n, k, transposed",
    [
        ((66, 0, 3), 33, 70, False),  # several tiles of a group, and of every dimension
        ((0, 20), 130, 33, True),
        ((130,), 20, 24, True),  # large tiles
        ((0, 5, 0), 1, 1, False),
        ((0, 0), 16, 24, False),
        ((2, 3), 5, 0, False),
    ],
)
def test_against_float64(dtype, counts, n, k, transposed):
    cases.check_against_float64("cpu", counts, n, k, dtype, transposed)


def test_more_groups_than_are_read_at_once(monkeypatch):
    monkeypatch.setattr(grouped_linear_triton, "SEARCH", 2)
    counts = (0, 3, 0, 0, 66, 1, 0, 2)
    cases.check_against_float64("cpu", counts, 8, 16, torch.float32, False)


def test_float16():
    cases.check_against_float64("cpu", (3, 4), 16, 24, torch.float16, False)


def test_rows_alone():
    parts = (0, 1), (3, 70), (100, 140)  # of both sizes of tiles
    cases.check_rows_alone("cpu", (70, 100, 9), 33, 40, torch.bfloat16, parts)


def test_strides():
    cases.check_strides("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    "dtype, value", [(torch.float32, float("nan")), (torch.bfloat16, float("inf"))]
)
def test_a_row_that_is_not_finite(dtype, value):
    cases.check_row_that_is_not_finite("cpu", dtype, value)
