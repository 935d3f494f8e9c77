"""Run by test_rescale.py in Triton's interpreter."""

import pytest
import torch

from hybridengine.kernels.linear.rescale import BLOCK_SIZE, rescale_


@pytest.mark.parametrize("size", (0, 1, BLOCK_SIZE, 5 * BLOCK_SIZE + 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("factor", (1.0, 0.5, 0.0, torch.nan))
def test_in_place(size, dtype, factor):
    tensor = torch.randn(size).to(dtype)
    expected = tensor * factor
    assert rescale_(tensor, torch.tensor(factor)) is tensor
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)
