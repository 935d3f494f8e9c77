"""Run by test_linear_attention_triton.py in Triton's interpreter."""

import sys

import pytest

from hybridengine.kernels import (
    _backend,
    causal_conv1d_triton,
    linear_recurrence_triton,
    linear_recurrence_triton_backward,
)
from tests.kernels import linear_attention_cases as cases
from tests.kernels.interpreter import round_to_nearest, widen_dot


@pytest.fixture(autouse=True)
def triton_on_the_cpu(monkeypatch):
    widen_dot(monkeypatch)
    round_to_nearest(monkeypatch)
    monkeypatch.setattr(_backend, "_unavailable", lambda *_: None)
    convolution = sys.modules["hybridengine.kernels.causal_conv1d"]
    monkeypatch.setattr(convolution, "_kernels", lambda x: causal_conv1d_triton)
    recurrence = sys.modules["hybridengine.kernels.linear_recurrence"]
    kernels = linear_recurrence_triton, linear_recurrence_triton_backward
    monkeypatch.setattr(recurrence, "_kernels", lambda x: kernels)


@pytest.mark.parametrize("case", cases.CONVOLUTIONS, ids=str)
def test_convolution(case):
    cases.check_convolution("cpu", case)


@pytest.mark.parametrize("case", cases.RECURRENCES, ids=str)
def test_recurrence(case):
    cases.check_recurrence("cpu", case)


@pytest.mark.parametrize("op", ("convolution", "recurrence"))
def test_nan_stays_in_its_tree(op):
    cases.check_nan("cpu", op)
