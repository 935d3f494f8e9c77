"""grouped_linear against float64, and the same bits for a row in any group."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import grouped_linear
from tests.kernels.grouped_cases import (
    DTYPES,
    assert_near_float64,
    check_against_float64,
    check_row_that_is_not_finite,
    check_strides,
    operands,
    results,
    sums,
)

BACKENDS = ("cpp", "torch", "reference")


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    n=st.integers(1, 140),
    k=st.integers(1, 140),
    transposed=st.booleans(),
)
def test_against_float64(dtype, counts, n, k, transposed):
    arguments = operands(counts, n, k, dtype, transposed)
    assert_near_float64(results(*arguments), arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts, n, k",
    (
        ((600, 0, 3), 70, 600),  # several blocks along every dimension that is summed
        ((0, 300), 800, 33),
        ((1, 1, 1), 1, 1),
        ((257,), 129, 513),
    ),
)
def test_sizes_around_blocks(dtype, counts, n, k):
    for transposed in (False, True):
        arguments = operands(counts, n, k, dtype, transposed)
        assert_near_float64(results(*arguments), arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_twice_that_of_plain_pytorch(dtype):
    arguments = operands((64, 40, 90), 96, 1024, dtype)
    exact, plain = sums(*arguments), results(*arguments, backend="reference")
    for got, want, other in zip(results(*arguments), exact, plain, strict=True):
        errors = [(t.double() - want).square().mean().sqrt() for t in (got, other)]
        assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", ((130, 576), (33, 77), (7, 300)))
def test_a_row_does_not_depend_on_other_rows_or_threads(dtype, n, k):
    x, weight, cu_counts, grad = operands((70, 150, 9), n, k, dtype)
    out, x_grad, weight_grad = results(x, weight, cu_counts, grad)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for first, last in ((0, 1), (3, 70), (70, 71), (100, 220), (220, 229), (5, 229)):
                part = cu_counts.clamp(first, last) - first
                got = results(x[first:last], weight, part, grad[first:last])
                assert torch.equal(got[0], out[first:last])
                assert torch.equal(got[1], x_grad[first:last])
                own = (part.diff() == cu_counts.diff()).nonzero().flatten()
                assert torch.equal(got[2][own], weight_grad[own])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(dtype):
    check_strides("cpu", dtype, "cpp")


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_spreads_only_to_its_own_results(dtype, value):
    check_row_that_is_not_finite("cpu", dtype, value, "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_backend_and_empty_groups(backend, dtype):
    for counts, transposed in product(((0, 5, 0), (0, 0), (16, 8, 24)), (False, True)):
        check_against_float64("cpu", counts, 16, 24, dtype, transposed, backend)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_product_of_strides_that_it_does_not_take(dtype):
    x, weight, cu_counts, grad = operands((16, 8), 16, 24, dtype)
    expected = results(x, weight, cu_counts, grad, "torch")
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    apart = torch.cat([x, x[:, :1]], 1)[:, :-1]
    for other in (shifted, apart):
        got = results(other, weight, cu_counts, grad, "torch")
        assert_near_float64(got, (x, weight, cu_counts, grad))
    one = results(x, weight, cu_counts, grad[:1].expand_as(grad), "torch")
    assert torch.equal(one[0], expected[0])
    assert_near_float64(one, (x, weight, cu_counts, grad[:1].repeat(24, 1)))


def test_torchs_product_of_sizes_that_it_does_not_take():
    arguments = operands((3, 4), 5, 7, torch.bfloat16)
    assert_near_float64(results(*arguments, backend="torch"), arguments)


def test_only_the_gradients_that_are_needed():
    x, weight, cu_counts, grad = operands((3, 4), 5, 6, torch.float32)
    _, x_grad, weight_grad = results(x, weight, cu_counts, grad)
    for leaf, expected in ((x, x_grad), (weight, weight_grad)):
        leaf.requires_grad_()
        (got,) = torch.autograd.grad(grouped_linear(x, weight, cu_counts), (leaf,), grad)
        assert torch.equal(got, expected)
        leaf.requires_grad_(False)


def test_float16_runs_by_the_reference():
    arguments = operands((3, 4), 5, 7, torch.float16)
    for got, want in zip(results(*arguments), sums(*arguments), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2.0**-10, atol=2.0**-10)


def test_gradcheck_in_float64():
    x, weight, cu_counts, _ = operands((3, 0, 2), 4, 5, torch.float64)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *t: grouped_linear(*t, cu_counts), leaves)


@pytest.mark.parametrize(
    "change, message",
    (
        ({"x": torch.zeros(7, 6).bfloat16()}, "weight"),
        ({"cu_counts": torch.tensor([0, 7])}, "cu_counts has shape"),
    ),
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {
        "x": torch.zeros(7, 6),
        "weight": torch.zeros(2, 5, 6),
        "cu_counts": torch.tensor([0, 3, 7]),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        grouped_linear(**{**arguments, **change})
