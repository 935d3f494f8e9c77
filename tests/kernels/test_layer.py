"""Row operators of a layer against float64 or torch, and the same bits for a row in any batch."""

import pytest
import torch

from hybridengine.kernels import gated_activation, rms_norm
from hybridengine.kernels.layer import add_scaled_, inference_norm, layer_norm
from hybridengine.kernels.rotary import RotaryTable, rotate
from tests.kernels.layer_cases import (
    NORMS,
    check_activation,
    check_layer_norm,
    check_norm,
    draw,
)

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (1, 5, 8, 31, 64, 576, 1100)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "sigmoid", "softplus")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("options", NORMS)
def test_norm_against_float64(dtype, width, options):
    check_norm("cpu", 70, width, dtype, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("bias", (False, True))
def test_layer_norm_against_float64(dtype, width, bias):
    check_layer_norm("cpu", 70, width, dtype, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_against_float64(dtype, width, activation):
    check_activation("cpu", 21, width, dtype, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_large_values(activation):
    gate = torch.tensor([[-1e30, -300.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e30]])
    for given in (gate, gate.bfloat16()):
        ones = torch.ones_like(given)
        exact = gated_activation(given.double(), ones.double(), activation)
        got = gated_activation(given, ones, activation)
        torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (31, 576))
def test_a_row_does_not_depend_on_other_rows_or_threads(dtype, width):
    both = draw(150, 2 * width, dtype, scale=2.0)
    weight = draw(1, width, dtype, 1)[0]
    gate, up = both.chunk(2, 1)
    normed, gated = rms_norm(gate, weight, 1e-5), gated_activation(gate, up)
    centred = layer_norm(gate, weight, weight, 1e-5)
    assert torch.equal(normed, rms_norm(gate.contiguous(), weight, 1e-5))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (slice(0, 1), slice(149, 150), slice(5, 7), slice(8, 11), slice(17, 150)):
                assert torch.equal(rms_norm(gate[rows], weight, 1e-5), normed[rows])
                assert torch.equal(gated_activation(gate[rows], up[rows]), gated[rows])
                assert torch.equal(layer_norm(gate[rows], weight, weight, 1e-5), centred[rows])
    finally:
        torch.set_num_threads(threads)


def test_the_gradient_of_the_weight_does_not_depend_on_threads():
    x, weight = draw(500, 64, torch.float32), torch.ones(64, requires_grad=True)
    grads, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            grads += torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), weight)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_no_rows():
    empty, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    out = gated_activation(rms_norm(empty, weight, 1e-6), empty)
    out.sum().backward()
    assert out.shape == (0, 4) and torch.equal(weight.grad, torch.zeros(4))


@pytest.mark.parametrize(
    "call, message",
    (
        (lambda x: rms_norm(x, torch.ones(4).bfloat16(), 1e-6), "weight"),
        (lambda x: layer_norm(x, torch.ones(4), torch.ones(3), 1e-6), "bias"),
        (lambda x: rms_norm(x.half(), torch.ones(4).half(), 1e-6), "x"),
        (lambda x: gated_activation(x, x.bfloat16()), "up"),
    ),
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.zeros(2, 4))


def test_a_position_has_the_same_angles_in_any_order():
    inv_freq = 1.0 / 10_000 ** (torch.arange(0, 64, 2).float() / 64)
    positions = torch.tensor([700, 3, 0, 64, 63, 3])
    at_once = RotaryTable(inv_freq, 1.5).rows(positions)
    grown = RotaryTable(inv_freq, 1.5)
    for i, position in sorted(enumerate(positions.tolist()), key=lambda pair: pair[1]):
        for table, row in zip(at_once, grown.rows(torch.tensor([[position]])), strict=True):
            assert torch.equal(table[i], row[0, 0])
    angles = positions[:, None].double() * inv_freq.double()
    for table, exact in zip(at_once, (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(table.double(), 1.5 * exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (2, 10, 64, 128))
def test_rotated_heads_have_the_bits_of_torch(dtype, dim):
    tables = [draw(50, dim // 2, dtype, seed) for seed in (1, 2)]
    positions = torch.tensor([0, 49, 7, 7, 21])
    both = draw(5, 3 * dim + 1, dtype)
    cos, sin = (torch.cat([t, t], -1)[positions][:, None] for t in tables)
    heads = both[:, : 3 * dim].view(5, 3, dim)  # rows with others' memory between them
    first, second = heads.chunk(2, -1)
    expected, last = heads * cos + torch.cat([-second, first], -1) * sin, both[:, -1].clone()
    assert torch.equal(rotate(heads, positions, *tables), expected)
    assert torch.equal(both[:, -1], last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", (False, True))  # tables in float32
@pytest.mark.parametrize("half", (5, 16, 32))  # of 32 pairs
def test_rotated_neighbours_have_the_bits_of_torch(dtype, wide, half):
    tables = [draw(50, half, torch.float32 if wide else dtype, seed) for seed in (1, 2)]
    positions, heads = torch.tensor([0, 49, 7, 7, 21]), draw(5, 3 * 64, dtype).view(5, 3, 64)
    cos, sin = (t[positions][:, None].repeat_interleave(2, -1) for t in tables)
    turned = heads[..., : 2 * half]
    other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    expected = torch.cat([(turned * cos + other * sin).to(dtype), heads[..., 2 * half :]], -1)
    assert torch.equal(rotate(heads.clone(), positions, *tables, neighbours=True), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_are_those_of_rows(dtype):
    both, weight = draw(5, 3 * 34 + 1, dtype), draw(1, 34, dtype)[0]
    heads = both[:, : 3 * 34].view(5, 3, 34)
    normed = inference_norm(heads, None, weight, 1e-6, round_first=True)
    assert normed.is_contiguous()
    rows = rms_norm(heads.reshape(15, 34), weight, 1e-6, round_first=True)
    assert torch.equal(normed, rows.view(5, 3, 34))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_update_is_rounded_before_it_is_added(dtype):
    both, update = draw(7, 31, dtype), draw(7, 19, dtype, 1)
    before, out = both.clone(), both[:, 5:24]
    add_scaled_(out, update, 1.7)
    assert torch.equal(out, before[:, 5:24] + update * 1.7)
    assert torch.equal(both[:, :5], before[:, :5]) and torch.equal(both[:, 24:], before[:, 24:])
    with pytest.raises(ValueError, match="update has shape"):
        add_scaled_(out, update[:3], 1.7)


def test_a_position_outside_of_the_tables_is_refused():
    x, table = torch.zeros(2, 1, 4), torch.zeros(3, 2)
    for positions in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="positions"):
            rotate(x, torch.tensor(positions), table, table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", NORMS)
def test_the_norm_of_a_sum_keeps_the_sum(dtype, options):
    x, residual = draw(9, 31, dtype), draw(9, 31, dtype, 1)
    weight, total = draw(1, 31, dtype, 2)[0], x + residual
    normed = inference_norm(x, residual, weight, 1e-6, **options)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6, **options))
    assert torch.equal(residual, total)
