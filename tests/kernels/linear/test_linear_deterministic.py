"""deterministic=True: a row's results do not depend on the other rows, whatever the sizes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import (
    linear_cross_entropy,
    linear_distillation_loss,
    linear_policy_loss,
    linear_token_log_probs,
)
from hybridengine.kernels.gemm import has_fast_products
from hybridengine.kernels.linear.chunks import Chunks

OPTIONS = {"deterministic": True}


def log_probs(hidden, weight, bias, ids, index):
    outputs = linear_token_log_probs(hidden, weight, ids, bias=bias, **OPTIONS)
    return outputs, [torch.ones(len(ids)), torch.full((len(ids),), 0.3)]


def cross_entropy(hidden, weight, bias, ids, index):
    loss, _ = linear_cross_entropy(
        hidden, weight, ids, bias=bias, label_smoothing=0.1, reduction="none", **OPTIONS
    )
    return [loss], [torch.ones(len(ids))]


def policy(hidden, weight, bias, ids, index):
    loss, *others = linear_policy_loss(
        hidden,
        weight,
        ids,
        bias=bias,
        old_log_probs=None,
        advantages=1.0 + index,
        global_num_tokens=500,
        entropy_coeff=0.1,
        **OPTIONS,
    )
    return [loss, *others[:2]], [torch.ones(()), None, None]


def distillation(hidden, weight, bias, ids, index):
    loss, divergences = linear_distillation_loss(
        hidden,
        weight,
        hidden.detach().flip(1),
        weight,
        student_bias=bias,
        num_items_in_batch=500,
        **OPTIONS,
    )
    return [loss, divergences], [torch.ones(()), None]


OPS = (log_probs, cross_entropy, policy, distillation)


def by_row(function, hidden, weight, bias, ids, index):
    """The results per row and the gradient of hidden, for the rows of `index`."""
    leaf = hidden[index].clone().requires_grad_()
    outputs, grads = function(leaf, weight, bias, ids[index], index)
    differentiable = [o for o, g in zip(outputs, grads, strict=True) if g is not None]
    gradient = torch.autograd.grad(differentiable, leaf, [g for g in grads if g is not None])
    return [o.detach() for o in outputs if o.dim()] + list(gradient)


def check_rows(function, rows, width, vocab, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    problem = draw(rows, width), draw(vocab, width), draw(vocab)
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    order = torch.randperm(rows, generator=generator)
    full = by_row(function, *problem, ids, torch.arange(rows))
    for index in (order, order[: (rows + 1) // 2], order[-1:]):
        for part, result in zip(by_row(function, *problem, ids, index), full, strict=True):
            assert torch.equal(part, result[index])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("function", OPS)
def test_small_sizes(function, dtype):
    """Products with few columns, for which MKL has kernels of its own, in both directions."""
    for vocab, width in itertools.product((1, 2, 11), (1, 5, 17)):
        check_rows(function, 130, width, vocab, dtype=dtype)


@settings(deadline=None, max_examples=25)
@given(
    function=st.sampled_from(OPS),
    rows=st.integers(1, 150),
    width=st.integers(1, 70),
    vocab=st.integers(1, 150),
    seed=st.integers(0, 3),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_any_sizes(function, rows, width, vocab, seed, dtype):
    check_rows(function, rows, width, vocab, seed, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_batch_invariant_products_are_not_padded(dtype):
    """Then one product has all rows, and the weight gradient the dtype of the weight."""
    hidden, weight = torch.randn(300, 64).to(dtype), torch.randn(1000, 64).to(dtype)
    chunks = Chunks(hidden, weight, None, 2**28, True, 300)
    is_invariant = dtype == torch.bfloat16 and has_fast_products(dtype)
    assert len(list(chunks.parts())) == (1 if is_invariant else 3)
    assert chunks.one_product is is_invariant
