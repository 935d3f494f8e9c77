"""orthogonalize in Triton's interpreter, run by test_orthogonalize.py."""

import pytest
import torch

from hybridengine.kernels import orthogonalize, orthogonalize_triton
from tests.kernels.interpreter import take_triton_kernels


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    take_triton_kernels(monkeypatch)
    for name, value in (("TILE", 16), ("TILE_K", 16), ("FEWEST_ROWS", 1)):
        monkeypatch.setattr(orthogonalize_triton, name, value)


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (48, 48), (5, 7), (16, 33)])
def test_symmetric_products_against_float64(shape):
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    gram = orthogonalize_triton.symmetric(x)
    torch.testing.assert_close(gram, x @ x.mT, rtol=2**-7, atol=2**-7 * shape[1] ** 0.5)
    assert torch.equal(gram, gram.mT)
    square = orthogonalize_triton.symmetric(gram, 0.5, -2.0)
    wide = gram.double()
    exact = 0.5 * wide @ wide.mT - 2 * wide
    error = (square.double() - exact).abs() / exact.abs().amax()
    assert torch.equal(square, square.mT) and error.max() < 2**-8


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (0, 4)])
def test_it_is_as_close_as_torch(shape):
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = orthogonalize(x.double())

    def distance(backend):
        return (orthogonalize(x, backend=backend).double() - exact).norm()

    assert distance("triton") <= 1.2 * distance("torch") + 2**-8 * exact.norm()
