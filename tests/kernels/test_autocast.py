"""Autocast is off inside an op and its backward; test_contract.py has what operators compute."""

import re
from pathlib import Path

import torch

from hybridengine import kernels as he
from hybridengine.kernels._library import custom_op


def test_every_op_is_declared_with_autocast_off():
    folder = Path(he.__file__).parent
    declared = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if re.search(r"torch\.library\.custom_op\(|triton_op\(", path.read_text())
    }
    assert declared == {"_library.py"}


def test_autocast_is_off_inside_an_op():
    @custom_op("hybridengine_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """A product that autocast rounds."""
        return a @ b

    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.b.t(), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "b", inputs[1]),
    )
    a = torch.arange(16.0).view(4, 4) / 8  # sums that are exact in float32, not in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert product(a, a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
        for differentiable in (product, torch.ops.hybridengine_test.product):
            x = torch.full((4, 4), 1e4, requires_grad=True)
            (differentiable(x, a) * 1e4).sum().backward()
            assert torch.equal(x.grad, 1e4 * a.sum(1).expand(4, 4))
