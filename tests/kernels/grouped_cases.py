"""grouped_linear against float64: the operands, the exact results and the bounds."""

from __future__ import annotations

import torch

from hybridengine.kernels import grouped_linear

DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operands(counts, n, k, dtype, transposed=False, device="cpu"):
    """x [T, K], weight [E, N, K], cu_counts and a gradient [T, N]."""
    generator = torch.Generator().manual_seed(sum(counts) * n + k)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    cu_counts = torch.tensor([0, *counts]).cumsum(0)
    weight = draw(len(counts), n, k)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    made = draw(sum(counts), k), weight, cu_counts, draw(sum(counts), n)
    return tuple(t.to(device) for t in made)


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


def check_against_float64(device, counts, n, k, dtype, transposed, backend="triton"):
    """Results and both gradients; an empty group's is zero, and a weight's has its strides."""
    arguments = operands(counts, n, k, dtype, transposed, device)
    got = results(*arguments, backend)
    assert_near_float64(got, arguments)
    assert got[2].stride() == arguments[1].stride()
    for group, count in enumerate(counts):
        assert count or not got[2][group].any()


def check_rows_alone(device, counts, n, k, dtype, parts, backend="triton"):
    """The bits of a row's results do not depend on other rows, nor a weight's on other groups.

    parts: first and last rows of the slices that are computed alone.
    """
    x, weight, cu_counts, grad = operands(counts, n, k, dtype, device=device)
    full = results(x, weight, cu_counts, grad, backend)
    assert all(map(torch.equal, results(x, weight, cu_counts, grad, backend), full))
    for first, last in parts:
        part = cu_counts.clamp(first, last) - first
        got = results(x[first:last], weight, part, grad[first:last], backend)
        assert torch.equal(got[0], full[0][first:last])
        assert torch.equal(got[1], full[1][first:last])
        own = (part.diff() == cu_counts.diff()).nonzero().flatten()
        assert torch.equal(got[2][own], full[2][own])


def check_strides(device, dtype, backend="triton"):
    """Strides, addresses and expanded gradients change no bit."""
    arguments = operands((20, 0, 45), 40, 72, dtype, device=device)
    x, weight, cu_counts, grad = arguments
    expected = results(*arguments, backend)
    wide_x = torch.zeros(65, 91, device=device).to(dtype)
    wide_weight = torch.zeros(3, 43, 93, device=device).to(dtype)
    wide_x[:, 3:75], wide_weight[:, 2:42, 1:73] = x, weight
    views = (
        (wide_x[:, 3:75], wide_weight[:, 2:42, 1:73]),
        (x.t().contiguous().t(), weight.transpose(1, 2).contiguous().transpose(1, 2)),
        (x, weight.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
    )
    for other_x, other_weight in views:
        got = results(other_x, other_weight, cu_counts, grad.t().contiguous().t(), backend)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    got = results(*arguments[:3], grad[:1].expand_as(grad), backend)
    one = results(*arguments[:3], grad[:1].repeat(65, 1), backend)
    assert all(torch.equal(a, b) for a, b in zip(got, one, strict=True))


def check_row_that_is_not_finite(device, dtype, value, backend="triton"):
    """It spreads only to its own results, and to its column of its group's gradient."""
    x, weight, cu_counts, grad = operands((9, 30, 5), 20, 70, dtype, device=device)
    expected = results(x, weight, cu_counts, grad, backend)
    x[10, 69] = value
    out, x_grad, weight_grad = results(x, weight, cu_counts, grad, backend)
    others = [row for row in range(44) if row != 10]
    assert not out[10].isfinite().any() and torch.equal(out[others], expected[0][others])
    assert torch.equal(x_grad, expected[1])
    assert not weight_grad[1, :, 69].isfinite().any()
    assert torch.equal(weight_grad[:, :, :69], expected[2][:, :, :69])
    assert torch.equal(weight_grad[[0, 2]], expected[2][[0, 2]])
