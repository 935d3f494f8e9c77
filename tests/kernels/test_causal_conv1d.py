"""causal_conv1d: packed segments and forests, against a convolution of each in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import causal_conv1d
from tests.kernels.linear_attention_cases import (
    DTYPES,
    assert_convolution,
    make_convolution,
    run_convolution,
    segments,
)
from tests.kernels.strategies import integers


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    **integers(channels=(1, 40), width=(2, 4), count=(0, 6), seed=(0, 999)),
    bias=st.booleans(),
    initial=st.booleans(),
    silu=st.booleans(),
    data=st.data(),
)
def test_random_forests_against_float64(
    dtype, channels, width, count, seed, bias, initial, silu, data
):
    lengths = [data.draw(st.sampled_from((0, 1, 2, 3, 31, 32, 70))) for _ in range(count)]
    parents = [data.draw(st.integers(-1, index - 1)) for index in range(count)]
    inputs = make_convolution(
        lengths, channels, width, bias=bias, initial=initial, dtype=dtype, seed=seed
    )
    options = {**segments(lengths, parents), "activation": "silu" if silu else None}
    assert_convolution(inputs, options)


@pytest.mark.parametrize("channels", (256, 300, 513))
def test_several_tiles_of_channels(channels):
    lengths, parents = [65, 1, 0, 3, 40], [-1, 0, 1, 2, -1]
    inputs = make_convolution(lengths, channels, 4, initial=True)
    assert_convolution(inputs, {**segments(lengths, parents), "activation": "silu"})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_result_that_bypasses_the_caches_has_the_bits_of_its_halves(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = 2**24 // (1024 * dtype.itemsize) + 5
    x, grad = (torch.randn(rows, 1024, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(1024, 4, generator=generator)
    x.requires_grad_()
    cut = rows // 2

    def half(part, **options):
        ends = segments([len(part)])
        return causal_conv1d(part, weight, activation="silu", **ends, **options)

    halves = torch.cat([half(x[:cut]), half(x[cut:], initial_state=x[None, cut - 3 : cut])])
    assert torch.equal(half(x), halves)
    [whole], [parts] = (torch.autograd.grad(out, x, grad) for out in (half(x), halves))
    whole[cut - 3 : cut] = parts[cut - 3 : cut]  # the sum of two gradients
    assert torch.equal(whole, parts)


def test_the_bits_of_a_tree_depend_on_itself_alone():
    lengths, parents = [33, 2, 100], [-1, 0, -1]
    inputs = make_convolution(lengths, 300, 4)
    together = run_convolution(inputs, segments(lengths, parents), "cpp")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for name, x in run_convolution(inputs, segments(lengths, parents), "cpp").items():
            assert torch.equal(x, together[name]), name
    finally:
        torch.set_num_threads(before)
    alone = {**inputs, "x": inputs["x"][35:]}
    assert torch.equal(causal_conv1d(**alone, **segments([100])), together["out"][35:])
    split = segments([33, 2, 1, 1, 98], [-1, 0, -1, 2, 3])
    assert torch.equal(causal_conv1d(**inputs, **split), together["out"])


def test_nan_stays_in_its_tree():
    lengths, parents = [5, 4, 6], [-1, -1, 1]
    inputs = make_convolution(lengths, 20, 4)
    clean = run_convolution(inputs, segments(lengths, parents), "cpp")
    inputs["x"][4] = float("nan")
    spoilt = run_convolution(inputs, segments(lengths, parents), "cpp")
    for name in ("out", "x"):
        assert torch.equal(spoilt[name][5:], clean[name][5:])
        assert torch.equal(spoilt["out"][:4], clean["out"][:4])


@pytest.mark.parametrize("value", (-1e30, -100.0, 100.0, 1e30))
def test_silu_of_large_values(value):
    x = torch.full((3, 16), value, requires_grad=True)
    weight = torch.tensor([[0.0, 1.0]]).repeat(16, 1)
    out = causal_conv1d(x, weight, activation="silu", **segments([3]))
    assert torch.allclose(out, torch.nn.functional.silu(x), rtol=1e-6, atol=1e-30)
    [grad] = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, torch.full_like(x, float(value > 0)), rtol=0, atol=1e-37)


def test_strided_inputs():
    inputs = make_convolution([20, 30], 24, 3)
    expected = run_convolution(inputs, segments([20, 30]), "cpp")
    wide = torch.cat([inputs["x"], inputs["x"]], 1)
    for x in (wide[:, :24], inputs["x"].t().contiguous().t()):
        for name, y in run_convolution({**inputs, "x": x}, segments([20, 30]), "cpp").items():
            assert torch.equal(y, expected[name])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.zeros(4, 5)}, r"weight has shape \[4, 5\]; expected \[C, W\], W 2 to 4"),
        ({"parents": torch.tensor([-1, 2])}, r"parents\[1\] is 2; expected an earlier segment"),
        ({"x": None}, "x is None"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {**make_convolution([3, 5], 4, 3), **segments([3, 5]), **change}
    with pytest.raises((ValueError, TypeError), match=message):
        causal_conv1d(**arguments)
