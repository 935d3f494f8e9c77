"""The KL coefficient's controller, against numbers worked out by hand."""

import math

import pytest

from hybridengine.trainer.algorithms import KLController


def test_fixed_stays():
    fixed = KLController(0.2)
    fixed.update(9.0, 64)
    assert fixed.coef == 0.2


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.11, 0.5 * (1 + 0.1 * 50 / 1000)), (9.0, 0.5 * 1.01), (0.0, 0.5 * 0.99), (0.1, 0.5)],
)
def test_adaptive_moves_by_the_clipped_relative_error(kl, expected):
    adaptive = KLController(0.5, target=0.1, horizon=1000, adaptive=True)
    adaptive.update(kl, 50)
    assert adaptive.coef == pytest.approx(expected)


def test_its_state_resumes():
    adaptive = KLController(0.5, adaptive=True)
    adaptive.update(3.0, 100)
    other = KLController(0.1, adaptive=True)
    other.load_state_dict(adaptive.state_dict())
    assert other.coef == adaptive.coef


def test_a_kl_that_is_not_finite_does_not_spoil_the_coefficient():
    adaptive = KLController(0.5, adaptive=True)
    for kl in (math.nan, math.inf, -math.inf):
        adaptive.update(kl, 100)
    assert adaptive.coef == 0.5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"coef": math.nan}, "coef is nan"),
        ({"coef": 0.1, "target": 0.0, "adaptive": True}, r"target is 0\.0"),
        ({"coef": 0.1, "horizon": -1.0, "adaptive": True}, r"horizon is -1\.0"),
    ],
)
def test_errors_name_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=f"KLController: {message}"):
        KLController(**options)
