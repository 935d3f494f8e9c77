"""decode_linear against float64, and the same bits for a row in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import decode_linear
from hybridengine.kernels.decode_linear import MAX_ROWS, inference_linear
from tests.kernels.layer_cases import assert_near_float64, operands
from tests.kernels.strategies import integers

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=80)
@given(**integers(rows=(0, 140), n=(0, 90), k=(0, 200)), bias=st.booleans(), wide=st.booleans())
def test_against_float64(dtype, rows, n, k, bias, wide):
    x, weight, added = operands(rows, n, k, dtype, bias)
    out_dtype = torch.float32 if wide else None
    got = decode_linear(x, weight, added, out_dtype=out_dtype)
    assert got.dtype == (out_dtype or dtype) and got.shape == (rows, n)
    assert_near_float64(got, x, weight, added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", ((130, 576), (64, 1536), (33, 77), (700, 40), (27, 4999)))
def test_a_row_does_not_depend_on_other_rows_or_threads(dtype, n, k):
    x, weight, bias = operands(150, n, k, dtype)
    full = decode_linear(x, weight, bias)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (
                slice(0, 1),
                slice(149, 150),
                slice(5, 7),
                slice(8, 11),
                slice(17, 150),
                slice(20, 26),
            ):
                part = decode_linear(x[rows], weight, bias)
                assert torch.equal(part, full[rows])
                if len(part) <= MAX_ROWS:
                    assert torch.equal(inference_linear(x[rows], weight, bias), part)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_does_not_depend_on_other_outputs(dtype):
    """So a column-parallel slice of the weight gives the same bits as the full weight."""
    x, weight, bias = operands(9, 200, 576, dtype)
    full = decode_linear(x, weight, bias)
    for part in (slice(0, 1), slice(3, 50), slice(100, 200)):
        assert torch.equal(decode_linear(x, weight[part], bias[part]), full[:, part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_and_leading_dimensions(dtype):
    x, weight, bias = operands(12, 40, 70, dtype)
    expected = decode_linear(x, weight, bias)
    wide_x, wide_weight = torch.zeros(12, 91).to(dtype), torch.zeros(40, 93).to(dtype)
    wide_x[:, 3:73], wide_weight[:, 1:71] = x, weight
    spread = bias.repeat_interleave(2)[::2]
    assert torch.equal(decode_linear(wide_x[:, 3:73], wide_weight[:, 1:71], spread), expected)
    transposed = [t.t().contiguous().t() for t in (x, weight)]
    assert torch.equal(decode_linear(*transposed, bias), expected)
    assert torch.equal(decode_linear(x.view(2, 6, 70), weight, bias), expected.view(2, 6, 40))
    assert torch.equal(decode_linear(x[0], weight, bias), expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_are_the_sums_of_ranks_with_a_slice_each(dtype):
    x, weight, bias = operands(9, 40, 96, dtype)
    for splits in (2, 3):
        parts = zip(x.chunk(splits, 1), weight.chunk(splits, 1), strict=True)
        total, *others = (decode_linear(*part, out_dtype=torch.float32) for part in parts)
        for part in others:
            total = total + part
        expected = (total + bias.float()).to(dtype)
        assert torch.equal(decode_linear(x, weight, bias, splits=splits), expected)


@pytest.mark.parametrize("splits", (1, 2))
def test_gradients_are_those_of_a_linear_layer(splits):
    x, weight, bias = (t.double().requires_grad_() for t in operands(7, 5, 12, torch.float32))
    call = lambda *t: decode_linear(*t, splits=splits)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, weight, bias))
    narrow = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    grad = torch.ones(7, 5)
    call(*narrow).backward(grad)
    torch.nn.functional.linear(x, weight, bias).backward(grad.double())
    for ours, exact in zip(narrow, (x, weight, bias), strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_it_reads_a_weight_that_was_written_in_place():
    x, weight, _ = operands(3, 20, 64, torch.bfloat16)
    decode_linear(x, weight)
    weight.mul_(2)
    assert torch.equal(decode_linear(x, weight), decode_linear(x, weight.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_row_that_is_not_finite_does_not_spread(dtype, value):
    x, weight, bias = operands(6, 20, 70, dtype)
    expected = decode_linear(x, weight, bias)
    x[2, 69] = value
    got = decode_linear(x, weight, bias)
    assert not got[2].isfinite().any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], expected[others])


def test_reference_in_float64():
    x, weight, bias = operands(4, 5, 6, torch.float64)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(decode_linear(x, weight, bias), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16))
def test_inference_linear_of_any_number_of_rows(dtype):
    x, weight, bias = operands(2 * MAX_ROWS, 40, 70, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(inference_linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (0, 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS):
        got = inference_linear(x[:rows], weight, bias)
        assert got.dtype == dtype
        expected = torch.nn.functional.linear(*(t.double() for t in (x[:rows], weight, bias)))
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
        torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=64 * rounding)
        if rows > 1:
            assert torch.equal(compiled(x[:rows], weight, bias), got)
    pair = x.view(MAX_ROWS, 2, 70)
    got = inference_linear(pair[:5], weight).flatten(0, 1)
    assert torch.equal(got, inference_linear(x[:10], weight))


@pytest.mark.parametrize(
    "change, message",
    (
        ({"x": torch.zeros(2, 6).half()}, "x"),
        ({"x": torch.zeros(2, 6).bfloat16()}, "weight"),
        ({"bias": torch.zeros(5).bfloat16()}, "bias"),
        ({"out_dtype": torch.bfloat16}, "out_dtype is torch.bfloat16; expected torch.float32"),
    ),
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"x": torch.zeros(2, 6), "weight": torch.zeros(5, 6), "bias": torch.zeros(5)}
    with pytest.raises((ValueError, TypeError), match=message):
        decode_linear(**{**arguments, **change})


def test_the_kernel_checks_what_inference_linear_does_not():
    x, weight = torch.zeros(2, 6), torch.zeros(5, 6)
    for arguments, message in (
        ((x, weight[:, :5], None), r"weight has shape \[5, 5\] .* expected a \[\*, 6\] tensor"),
        ((x, weight.bfloat16(), None), "weight has .* dtype bfloat16; expected .* of float32"),
        ((x, weight.t().contiguous().t(), None), "inner stride 1"),
        ((x, weight, torch.zeros(4)), "bias has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            inference_linear(*arguments)
