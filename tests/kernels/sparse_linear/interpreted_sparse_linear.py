"""Run by test_sparse_linear.py with TRITON_INTERPRET=1 set before any import."""

import pytest
import torch

from hybridengine.kernels._per_token import row_index
from hybridengine.kernels.sparse_linear import triton
from hybridengine.kernels.sparse_linear.products import Products
from tests import tolerances
from tests.kernels.sparse_linear.cases import problem


@pytest.mark.parametrize("width, first", ((7, None), (64, 100), (1500, None)))
def test_the_three_products(width, first):
    case = problem(11, width, 400, 6, seed=0)
    hidden, weight = case.tensors[0], case.tensors[1][first or 0 : 350 if first else None]
    ids, ends = case.kept.ids.int(), case.kept.cu.int()
    row = row_index(ends, ids.shape[0])
    grad = torch.randn(ids.shape[0])
    grad[::4] = 0.0
    vocab_range = None if first is None else torch.tensor([first, 400])
    products = Products(hidden, weight, ids, ends, row, vocab_range, "triton")
    reference = products._replace(backend="reference")
    close = lambda a, b: torch.testing.assert_close(a, b, **tolerances.LINEAR)  # noqa: E731
    close(products.logits(None), reference.logits(None))
    close(products.hidden_grad(grad), reference.hidden_grad(grad))
    exact = reference.weight_grad(grad, None)
    order, begin = products.by_id()
    for add in (False, True):
        out = torch.full_like(exact, 2.0)
        triton.weight_grad(hidden, row, order, begin, grad, out, add)
        close(out, exact + 2.0 * add)
