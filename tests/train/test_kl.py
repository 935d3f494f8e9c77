"""The KL coefficient's controller, against numbers worked out by hand."""

import math

import pytest

from hybridengine.run.config.rl import KLControlConfig
from hybridengine.train.algorithms import KLController


def controller(total_steps=1, **options):
    config = KLControlConfig(**options)
    return KLController(config, config.kl_coef, total_steps)


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


def coefficients(steps, **options):
    linear = controller(type="linear", kl_coef=0.5, final_kl_coef=0.1, **options)
    used = []
    for _ in range(steps):
        used.append(linear.coef)
        linear.update(math.nan, 8)
    return used


def test_linear_ends_in_the_last_step_of_the_run():
    assert coefficients(5, total_steps=5) == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])
    assert coefficients(2, total_steps=1) == pytest.approx([0.5, 0.1])


def test_linear_ends_in_the_given_step_and_stays():
    used = coefficients(5, total_steps=100, num_steps=3)
    assert used == pytest.approx([0.5, 0.3, 0.1, 0.1, 0.1])


def test_a_linear_schedule_resumes_where_it_was():
    options = {"type": "linear", "kl_coef": 0.5, "final_kl_coef": 0.1, "total_steps": 5}
    first, resumed = controller(**options), controller(**options)
    for _ in range(2):
        first.update(0.0, 8)
    resumed.load_state_dict(first.state_dict())
    assert resumed.coef == first.coef
    resumed.update(0.0, 8)
    assert resumed.coef == pytest.approx(0.2)


def test_a_fixed_coefficient_is_the_one_set_now():
    before, now = controller(kl_coef=0.2), controller(kl_coef=0.3)
    now.load_state_dict(before.state_dict())
    assert now.coef == 0.3
