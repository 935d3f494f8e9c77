"""grouped_linear against float64, and the same bits for a row in any group."""

import pytest
import torch
from hybridengine.kernels import grouped_linear
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16)
BACKENDS = ("cpp", "torch", "reference")
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def operands(counts, n, k, dtype, transposed=False):
    """x [T, K], weight [E, N, K], cu_counts and a gradient [T, N]."""
    generator = torch.Generator().manual_seed(sum(counts) * n + k)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    cu_counts = torch.tensor([0, *counts]).cumsum(0)
    weight = draw(len(counts), n, k)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    return draw(sum(counts), k), weight, cu_counts, draw(sum(counts), n)


def results(x, weight, cu_counts, grad, backend=None):
    """The result and both gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = grouped_linear(x, weight, cu_counts, backend=backend)
    return out.detach(), *torch.autograd.grad(out, (x, weight), grad)


def sums(x, weight, cu_counts, grad):
    """The same in float64."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    lengths = cu_counts.diff().tolist()
    groups = list(zip(x.split(lengths), weight, grad.split(lengths), strict=True))
    out = torch.cat([rows @ w.t() for rows, w, _ in groups])
    x_grad = torch.cat([g @ w for _, w, g in groups])
    return out, x_grad, torch.stack([g.t() @ rows for rows, _, g in groups])


def assert_near_float64(got, arguments):
    """The error is at most that of a rounding per term of the sum, and the result's."""
    exact, terms = sums(*arguments), sums(*(t.abs() for t in arguments))
    x, weight = arguments[:2]
    for value, want, scale in zip(got, exact, terms, strict=True):
        assert value.dtype == x.dtype and value.shape == want.shape
        limit = scale * 2.0**-24 * (len(x) + sum(weight.shape[1:])) + want.abs() * ROUNDING[x.dtype]
        assert ((value.double() - want).abs() <= limit).all()


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
    arguments = operands((20, 0, 45), 40, 72, dtype)
    x, weight, cu_counts, grad = arguments
    expected = results(*arguments)
    wide_x, wide_weight = torch.zeros(65, 91).to(dtype), torch.zeros(3, 43, 93).to(dtype)
    wide_x[:, 3:75], wide_weight[:, 2:42, 1:73] = x, weight
    views = (
        (wide_x[:, 3:75], wide_weight[:, 2:42, 1:73]),
        (x.t().contiguous().t(), weight.transpose(1, 2).contiguous().transpose(1, 2)),
        (x, weight.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
    )
    for other_x, other_weight in views:
        got = results(other_x, other_weight, cu_counts, grad.t().contiguous().t())
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    got = results(*arguments[:3], grad[:1].expand_as(grad))
    one = results(*arguments[:3], grad[:1].repeat(65, 1))
    assert all(torch.equal(a, b) for a, b in zip(got, one, strict=True))


def test_the_gradient_of_a_transposed_weight_has_its_strides():
    x, weight, cu_counts, grad = operands((3, 4), 5, 6, torch.float32, transposed=True)
    assert results(x, weight, cu_counts, grad)[2].stride() == weight.stride()


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_spreads_only_to_its_own_results(dtype, value):
    x, weight, cu_counts, grad = operands((9, 30, 5), 20, 70, dtype)
    expected = results(x, weight, cu_counts, grad)
    x[10, 69] = value
    out, x_grad, weight_grad = results(x, weight, cu_counts, grad)
    others = [row for row in range(44) if row != 10]
    assert not out[10].isfinite().any() and torch.equal(out[others], expected[0][others])
    assert torch.equal(x_grad, expected[1])
    assert not weight_grad[1, :, 69].isfinite().any()
    assert torch.equal(weight_grad[:, :, :69], expected[2][:, :, :69])
    assert torch.equal(weight_grad[[0, 2]], expected[2][[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_backend_and_empty_groups(backend, dtype):
    for counts in ((0, 5, 0), (0, 0), (16, 8, 24)):
        arguments = operands(counts, 16, 24, dtype)
        got = results(*arguments, backend=backend)
        assert_near_float64(got, arguments)
        for group, count in enumerate(counts):
            assert count or not got[2][group].any()


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_and_compile(backend):
    x, weight, cu_counts, grad = operands((3, 4), 8, 16, torch.float32, transposed=True)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    op = torch.ops.hybridengine.grouped_linear
    torch.library.opcheck(op, (*leaves, cu_counts.int(), backend))
    call = lambda *t: grouped_linear(*t, cu_counts, backend=backend)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, expected = compiled(*leaves), call(*leaves)
    assert torch.equal(got, expected)
    pairs = zip(*(torch.autograd.grad(t, leaves, grad) for t in (got, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "change, message",
    (
        ({"x": torch.zeros(7, 5)}, "weight has shape"),
        ({"x": torch.zeros(7, 6).bfloat16()}, "weight"),
        ({"weight": torch.zeros(4, 6)}, "weight has shape"),
        ({"cu_counts": torch.tensor([0, 7])}, "cu_counts has shape"),
        ({"cu_counts": torch.tensor([0, 3, 6])}, "cu_counts ends at 6"),
        ({"cu_counts": torch.tensor([0, 8, 7])}, "less than 8"),
        ({"cu_counts": torch.tensor([1, 3, 7])}, r"cu_counts\[0\] is 1"),
        ({"cu_counts": torch.tensor([0.0, 3, 7])}, "cu_counts"),
        ({"backend": "cuda"}, "backend 'cuda' does not exist"),
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
