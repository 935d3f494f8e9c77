"""Run by test_linear_attention_triton.py in Triton's interpreter."""

import pytest

from tests.kernels import linear_attention_cases as cases
from tests.kernels.interpreter import take_triton_kernels


@pytest.fixture(autouse=True)
def triton_on_the_cpu(monkeypatch):
    take_triton_kernels(monkeypatch)


@pytest.mark.parametrize("case", cases.CONVOLUTIONS, ids=str)
def test_convolution(case):
    cases.check_convolution("cpu", case)


@pytest.mark.parametrize("case", cases.RECURRENCES, ids=str)
def test_recurrence(case):
    cases.check_recurrence("cpu", case)


@pytest.mark.parametrize("op", ("convolution", "recurrence"))
def test_nan_stays_in_its_tree(op):
    cases.check_nan("cpu", op)
