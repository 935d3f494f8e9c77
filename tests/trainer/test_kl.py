"""The KL coefficient's controller, against numbers worked out by hand."""

import math

import pytest

from hybridengine.config.rl import KLControlConfig
from hybridengine.trainer.algorithms import KLController


def controller(**options):
    return KLController(KLControlConfig(**options))


def test_fixed_stays():
    fixed = controller(kl_coef=0.2)
    fixed.update(9.0, 64)
    assert fixed.coef == 0.2


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.11, 0.5 * (1 + 0.1 * 50 / 1000)), (9.0, 0.5 * 1.01), (0.0, 0.5 * 0.99), (0.1, 0.5)],
)
def test_adaptive_moves_by_the_clipped_relative_error(kl, expected):
    adaptive = controller(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=1000.0)
    adaptive.update(kl, 50)
    assert adaptive.coef == pytest.approx(expected)


def test_its_state_resumes():
    adaptive = controller(type="adaptive", kl_coef=0.5)
    adaptive.update(3.0, 100)
    other = controller(type="adaptive", kl_coef=0.1)
    other.load_state_dict(adaptive.state_dict())
    assert other.coef == adaptive.coef


def test_a_kl_that_is_not_finite_does_not_spoil_the_coefficient():
    adaptive = controller(type="adaptive", kl_coef=0.5)
    for kl in (math.nan, math.inf, -math.inf):
        adaptive.update(kl, 100)
    assert adaptive.coef == 0.5
