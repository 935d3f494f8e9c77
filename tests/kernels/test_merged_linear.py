"""merged_linear against float64, and bits of a merged weight in any part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridengine.kernels import decode_linear
from hybridengine.kernels.merged_linear import merge_adapter, merge_into, merged_linear

DTYPES = [torch.float32, torch.bfloat16]
SCALE = 1.5


def operands(dtype: torch.dtype, rank: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    shapes = {"x": (3, 7, 34), "weight": (51, 34), "left": (51, rank), "right": (rank, 34)}
    return {
        name: torch.randn(shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_any_part_has_the_bits_of_the_full_weight(dtype: torch.dtype, rank: int) -> None:
    _, weight, left, right = operands(dtype, rank).values()
    full = merge_adapter(weight, left, right, SCALE)
    for rows in (slice(0, 1), slice(13, 40)):
        for columns in (slice(0, 34), slice(31, 33)):
            given = weight[rows, columns], left[rows], right[:, columns]
            part = merge_adapter(*given, SCALE)
            assert torch.equal(part, full[rows, columns])
            out = torch.empty_like(part, dtype=torch.float32)
            merge_into(out, *(t.float() for t in given), SCALE, dtype)
            assert torch.equal(out, part.float())
    exact = weight.double() + SCALE * (left.double() @ right.double())
    limit = 1e-6 if dtype is torch.float32 else 2**-8
    assert ((full.double() - exact).abs() <= limit * (1 + exact.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_results_and_gradients(dtype: torch.dtype, splits: int) -> None:
    given = operands(dtype)
    wide = {name: t.double().requires_grad_(name != "weight") for name, t in given.items()}
    ours = {name: t.requires_grad_(name != "weight") for name, t in given.items()}
    bias = torch.linspace(-1, 1, 51).to(dtype)
    out = merged_linear(**ours, scale=SCALE, bias=bias, splits=splits)
    merged = merge_adapter(*(ours[n] for n in ("weight", "left", "right")), SCALE)
    assert torch.equal(out, decode_linear(ours["x"], merged, bias, splits=splits))
    update = SCALE * (wide["left"] @ wide["right"])
    expected = wide["x"] @ (wide["weight"] + update).t() + bias.double()
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad.to(dtype))
    expected.backward(grad.to(dtype).double())
    limit = 1e-5 if dtype is torch.float32 else 0.03
    for result, oracle in [
        (out, expected),
        *((ours[name].grad, wide[name].grad) for name in ("x", "left", "right")),
    ]:
        assert result is not None and oracle is not None
        assert (result.double() - oracle).abs().max() < limit * oracle.abs().max()


def test_other_operands_are_refused() -> None:
    given = operands(torch.float32)
    with pytest.raises(ValueError, match=r"merged_linear: right has shape \[4, 34\]"):
        merged_linear(**given | {"right": given["right"][:4]}, scale=1.0)
    with pytest.raises(ValueError, match="merged_linear: left has dtype"):
        merged_linear(**given | {"left": given["left"].bfloat16()}, scale=1.0)
    out = merged_linear(**{n: t.requires_grad_(n == "x") for n, t in given.items()}, scale=1.0)
    (gradient,) = torch.autograd.grad(out.sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once only"):
        gradient.sum().backward()
