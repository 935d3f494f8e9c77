"""Run by test_sparse_linear.py with TRITON_INTERPRET=1 set before any import."""

import pytest
import torch

from hybridengine.kernels._per_token import row_index
from hybridengine.kernels.logprob.options import RowOptions
from hybridengine.kernels.sparse_linear import triton, triton_rows
from hybridengine.kernels.sparse_linear.op import backward_rows, forward_rows
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


PLAIN = RowOptions(1.0, None, 1.0, 0.0, -100, None, None, False, "")


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        PLAIN._replace(temperature=0.7, logit_scale=1.3, softcap=3.0),
        PLAIN._replace(temperatures=torch.linspace(0.5, 2.0, 7), softcap=30.0),
        PLAIN._replace(vocab_range=torch.tensor([100, 900])),
    ],
)
def test_rows(options):
    """Long rows, one entry, none, an ignored one; -inf, large and NaN logits, ids outside."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([300, 1, 0, 40, 129, 20, 30])
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    ids = torch.cat([torch.randperm(900, generator=generator)[:n].sort().values for n in lengths])
    token_ids = torch.stack([ids[min(int(e), len(ids) - 1)] for e in ends[:-1]])
    token_ids[3] = -100
    token_ids[4] = 901  # not kept
    ids[ends[6]] = 5_000  # outside the vocabulary
    logits = torch.randn(len(ids), generator=generator) * 5
    logits[ends[0] : ends[0] + 3] = torch.tensor([-torch.inf, 300.0, -300.0])
    logits[ends[5] + 1] = torch.nan
    weight = torch.zeros(900, 8)
    row = row_index(ends, len(ids))
    assert torch.equal(triton_rows.row_index(ends, len(ids)), row)
    hidden = torch.zeros(len(lengths), 8)
    products = Products(hidden, weight, ids.int(), ends, row, options.vocab_range, "triton")
    reference = products._replace(backend="reference")
    close = lambda a, b: torch.testing.assert_close(  # noqa: E731
        a, b, rtol=1e-6, atol=1e-7, equal_nan=True
    )
    results = forward_rows(logits, products, options, token_ids)
    expected = forward_rows(logits, reference, options, token_ids)
    for got, exact in zip(results, expected, strict=True):
        close(got, exact)
    for_rows = torch.randn(2, len(lengths), generator=generator)
    for_rows[:, 1] = 0.0
    for_kept = torch.randn(len(ids), generator=generator)
    for_kept[row == 4] = 0.0
    for wanted in ((True, False, False), (False, True, False), (True, True, True)):
        grads = [g if w else None for g, w in zip((*for_rows, for_kept), wanted, strict=True)]
        got = backward_rows(logits, products, options, token_ids, expected[1], *grads)
        close(got, backward_rows(logits, reference, options, token_ids, expected[1], *grads))
