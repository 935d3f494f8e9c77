"""Operators give the same bits inside autocast as outside, in the forward and in the backward."""

import re
from pathlib import Path

import pytest
import torch
from hybridengine.kernels._library import custom_op

from hybridengine import kernels as he
from tests.kernels.operator_cases import CASES, draw


def values_and_gradients(name, inputs, backend):
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = CASES[name][1](*leaves, backend=backend)
    weights = [torch.linspace(1, 2, o.numel()).view(o.shape) for o in outputs]
    grads = torch.autograd.grad(outputs, leaves, weights)
    return [*(o.detach() for o in outputs), *grads]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_no_bit(name, backend, dtype):
    inputs = [draw(*shape) for shape in CASES[name][0]]
    expected = values_and_gradients(name, inputs, backend)
    with torch.autocast("cpu", dtype):
        got = values_and_gradients(name, inputs, backend)
    for value, other in zip(got, expected, strict=True):
        assert value.dtype == other.dtype
        assert torch.equal(value, other)


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

    a = draw(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert product(a, a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
