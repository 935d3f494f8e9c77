"""whiten and rollout_correction in Triton: in the interpreter, and on a GPU where there is one."""

import pytest

from tests.kernels.interpreter import run_interpreted
from tests.kernels.step_operators import (
    CORRECTIONS,
    WHITENINGS,
    check_correction,
    check_joined_moments,
    check_whitening,
)

pytest.importorskip("triton")


@pytest.mark.slow
def test_in_the_interpreter():
    run_interpreted("interpreted_step_operators.py")


@pytest.mark.gpu
@pytest.mark.parametrize("case", WHITENINGS)
def test_whitening_on_the_gpu(case):
    check_whitening("cuda", *case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CORRECTIONS, ids=str)
def test_correction_on_the_gpu(case):
    check_correction("cuda", *case)


@pytest.mark.gpu
def test_joined_moments_on_the_gpu():
    check_joined_moments("cuda")
