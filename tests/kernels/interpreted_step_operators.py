"""whiten and rollout_correction in Triton's interpreter, run by test_step_operators_triton.py."""

import pytest

from hybridengine.kernels import _backend
from tests.kernels.step_operators import (
    CORRECTIONS,
    WHITENINGS,
    check_correction,
    check_joined_moments,
    check_whitening,
)


@pytest.fixture(autouse=True)
def triton_on_the_cpu(monkeypatch):
    monkeypatch.setattr(_backend, "why_unavailable", lambda *_: None)


@pytest.mark.parametrize("case", WHITENINGS)
def test_whitening(case):
    check_whitening("cpu", *case)


@pytest.mark.parametrize("case", CORRECTIONS, ids=str)
def test_correction(case):
    check_correction("cpu", *case)


def test_joined_moments():
    check_joined_moments("cpu")
