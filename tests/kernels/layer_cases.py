"""Operands of linear layers, norms and activations, and checks against float64."""

from functools import partial

import torch

from hybridengine.kernels import gated_activation, rms_norm
from hybridengine.kernels.layer import layer_norm

NORMS = ({}, {"offset": 1.0}, {"round_first": True})


def operands(rows, n, k, dtype, bias=True):
    generator = torch.Generator().manual_seed(rows * n + k)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return draw(rows, k), draw(n, k), draw(n) if bias else None


def assert_near_float64(got, x, weight, bias):
    """The error is at most that of K float32 roundings of the sum's terms, plus the result's."""
    wide = [None if t is None else t.double() for t in (x, weight, bias)]
    expected = torch.nn.functional.linear(*wide)
    terms = torch.nn.functional.linear(*(None if t is None else t.abs() for t in wide))
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-24
    limit = terms * 2.0**-24 * (x.shape[-1] + 8) + expected.abs() * rounding
    assert ((got.double() - expected).abs() <= limit).all()


def draw(rows, width, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, width, generator=generator)).to(dtype)


def assert_near(got, exact, dtype, roundings=1):
    """Within so many roundings of the largest value; of float32 eight count as one.

    Gradients pass through sums over a row and, of a weight, over 70 rows: up to 16.
    """
    limit = roundings * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-21)
    assert (got.double() - exact).abs().max() <= limit * max(1.0, exact.abs().max().item())


def check_against_float64(operator, inputs, grad, roundings):
    """Return the result of `operator`; roundings: of the result and of the gradients."""
    ours = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    out, expected = operator(*ours), operator(*exact)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == grad.dtype
    assert_near(out, expected, grad.dtype, roundings[0])
    for one, other in zip(ours, exact, strict=True):
        assert one.grad.dtype == grad.dtype
        assert_near(one.grad, other.grad, grad.dtype, roundings[1])
    return out.detach()


def check_norm(device, rows, width, dtype, options):
    """Against float64, with gradients; returns (x, weight, result)."""
    x, grad = (draw(rows, width, dtype, seed).to(device) for seed in (0, 1))
    weight = draw(1, width, dtype, 2)[0].to(device)
    norm = partial(rms_norm, eps=1e-6, **options)
    return x, weight, check_against_float64(norm, (x, weight), grad, (2, 16))


def check_layer_norm(device, rows, width, dtype, bias=True, offset=0.0):
    """Against float64, with gradients; returns (x, weight, bias, result)."""
    x, grad = (draw(rows, width, dtype, seed).to(device) for seed in (0, 1))
    x = x + offset
    weight, added = (draw(1, width, dtype, seed)[0].to(device) for seed in (2, 3))
    given = (x, weight, added) if bias else (x, weight)
    norm = lambda x, weight, bias=None: layer_norm(x, weight, bias, 1e-6)  # noqa: E731
    return *given, check_against_float64(norm, given, grad, (2, 16))


def check_activation(device, rows, width, dtype, activation):
    """Against float64, with gradients; returns (gate, up, result)."""
    tensors = (draw(rows, width, dtype, seed, scale=3.0).to(device) for seed in (0, 1, 2))
    gate, up, grad = tensors
    gated = partial(gated_activation, activation=activation)
    return gate, up, check_against_float64(gated, (gate, up), grad, (1, 2))
