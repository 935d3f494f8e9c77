"""Bad input to tree_attention, and forests at the limits."""

import re
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridengine.kernels import tree_attention
from tests.kernels.attention.cases import dense_mask, forest_of, problem, results

Q, K, V = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 6)
SINKS = torch.randn(4)
ENDS, POSITIONS = torch.tensor([5, 5, 3, 5, 5]), torch.tensor([0, 1, 2, 2, 3])


def call(query=Q, key=K, value=V, subtree_ends=ENDS, position_ids=None, **options):
    return tree_attention(query, key, value, subtree_ends, position_ids, **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": Q[:, :3]}, ValueError, "query has shape [5, 3, 8] and key [5, 2, 8]"),
        ({"key": K[:, :0], "value": V[:, :0]}, ValueError, "key [5, 0, 8]"),
        ({"key": K.bfloat16()}, ValueError, "key has dtype bfloat16"),
        ({"value": V.double()}, ValueError, "value has dtype float64"),
        ({"subtree_ends": None}, TypeError, "subtree_ends is None"),
        ({"subtree_ends": torch.tensor([5, 5, 2, 5, 5])}, ValueError, "subtree_ends[2] is 2"),
        ({"subtree_ends": torch.tensor([5, 5, 3, 6, 5])}, ValueError, "subtree_ends[3] is 6"),
        ({"subtree_ends": torch.tensor([3, 4, 3, 4, 5])}, ValueError, "[1] is 4, more than sub"),
        ({"window_size": 2}, TypeError, "position_ids is None"),
        ({"sinks": 0.5}, TypeError, "sinks is 0.5 (float)"),
    ],
)
def test_an_error_names_the_argument(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(**arguments)


def test_no_tokens():
    leaves = [x[:0].clone().requires_grad_() for x in (Q, K, V)]
    sinks = SINKS.clone().requires_grad_()
    out = call(*leaves, ENDS[:0], sinks=sinks)
    assert out.shape == (0, 4, 6)
    *grads, grad_sinks = torch.autograd.grad(out.sum(), [*leaves, sinks])
    assert [x.shape for x in grads] == [x.shape for x in leaves]
    assert torch.equal(grad_sinks, torch.zeros(4))


def test_one_token_sees_itself():
    out = call(Q[:1], K[:1], V[:1], torch.tensor([1]))
    torch.testing.assert_close(out, V[:1].repeat_interleave(2, 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_strided_inputs(dtype):
    wide = torch.randn(3, 8, 150, 30, dtype=dtype)  # [3, H, T, D + ...], as models have it
    q, k, v = (x[..., 3:27].transpose(0, 1) for x in wide)
    every_other = torch.randn(150, 8, 48, dtype=dtype)[..., ::2]
    ends = torch.full((150,), 150)
    expected = call(q.contiguous(), k.contiguous(), v.contiguous(), ends)
    assert torch.equal(call(q, k, v, ends), expected)
    torch.testing.assert_close(
        call(every_other, k, v, ends), call(every_other.contiguous(), k, v, ends), rtol=0, atol=0
    )


DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))


@DTYPES
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("where", range(3))
@pytest.mark.parametrize("token", (75, 90))  # in a node, and one that is copied for a branch
def test_a_token_that_is_not_finite_spreads_only_to_those_that_see_it(token, where, bad, dtype):
    forest = forest_of((70, [(21, [30, 40]), 90]), 60)
    case = problem(forest, 6, 2, 16, dtype=dtype)
    visible = dense_mask(forest)
    options = {"subtree_ends": forest.subtree_ends, "softmax_scale": 0.3}
    clean = results(partial(tree_attention, **options), case)
    case.qkv[where][token, 0, 5] = bad
    got = results(partial(tree_attention, **options), case)
    reached = visible[:, token] if where else torch.arange(len(visible)) == token
    assert got[0][reached].isnan().any((1, 2)).all()
    assert torch.equal(got[0][~reached], clean[0][~reached])
    # Gradients are NaN for the queries reached, and for the keys that those see.
    also = visible[reached].any(0)
    assert torch.equal(got[1][~reached], clean[1][~reached])
    for got_key, clean_key in zip(got[2:], clean[2:], strict=True):
        assert torch.equal(got_key[~also], clean_key[~also])


@DTYPES
def test_a_gradient_that_is_not_finite_spreads_only_to_the_keys_seen(dtype):
    forest = forest_of((70, [(21, [30, 40]), 90]), 60)
    case, visible = problem(forest, 6, 2, 16, dtype=dtype), dense_mask(forest)
    call = partial(tree_attention, subtree_ends=forest.subtree_ends)
    clean = results(call, case)
    case.grad[100, 0, 5] = float("nan")
    got = results(call, case)
    assert torch.equal(got[1].isnan().any((1, 2)).nonzero().flatten(), torch.tensor([100]))
    for got_key, clean_key in zip(got[2:], clean[2:], strict=True):
        assert got_key[visible[100]].isnan().any((1, 2)).all()
        assert torch.equal(got_key[~visible[100]], clean_key[~visible[100]])


@DTYPES
def test_a_chain_of_nodes_of_one_token(dtype):
    tree = (1, [])
    for _ in range(200):
        tree = (1, [tree])
    case = problem(forest_of(tree), 3, 1, 8, dtype=dtype)
    call = partial(tree_attention, subtree_ends=case.forest.subtree_ends)
    one_node = partial(tree_attention, subtree_ends=torch.full((201,), 201))
    for got, expected in zip(results(call, case), results(one_node, case), strict=True):
        assert torch.equal(got, expected)


BACKENDS = pytest.mark.parametrize("backend", ("cpp", "reference"))


def sink_case(sinks, dtype=torch.float32):
    case = problem(forest_of((70, [(21, [30, 40]), 90]), 60), 6, 2, 16, dtype=dtype)
    case.sinks = torch.tensor(sinks, dtype=dtype)
    return case


@DTYPES
@BACKENDS
def test_a_sink_of_minus_infinity_is_none(backend, dtype):
    case = sink_case([-torch.inf] * 6, dtype)
    call = partial(tree_attention, subtree_ends=case.forest.subtree_ends, backend=backend)
    *got, grad_sinks = results(call, case)
    case.sinks = None
    for a, b in zip(got, results(call, case), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(grad_sinks, torch.zeros(6, dtype=dtype))


@DTYPES
@BACKENDS
@pytest.mark.parametrize("size", (100.0, 1e4, 1e30, torch.inf))
def test_a_large_sink_takes_all_the_weight(size, backend, dtype):
    """Nothing overflows, and the other head has the bits that it has without it."""
    case = sink_case([size, 0.5] * 3, dtype)
    call = partial(tree_attention, subtree_ends=case.forest.subtree_ends, backend=backend)
    out, *grads, grad_sinks = results(call, case)
    assert out[:, ::2].abs().max() < 1e-30 and grads[0][:, ::2].abs().max() < 1e-30
    assert grad_sinks[::2].abs().max() < 1e-30 or size == torch.inf
    assert all(x.isfinite().all() for x in grads)
    case.sinks = torch.tensor([0.5] * 6, dtype=dtype)
    plain, grad_query, _, _, plain_sinks = results(call, case)
    assert torch.equal(out[:, 1::2], plain[:, 1::2])
    assert torch.equal(grads[0][:, 1::2], grad_query[:, 1::2])
    assert torch.equal(grad_sinks[1::2], plain_sinks[1::2])


@DTYPES
@BACKENDS
def test_a_sink_of_nan_reaches_its_own_head_alone(backend, dtype):
    case = sink_case([0.5] * 6, dtype)
    call = partial(tree_attention, subtree_ends=case.forest.subtree_ends, backend=backend)
    clean = results(call, case)
    case.sinks[1] = torch.nan
    got = results(call, case)
    others = [0, 2, 3, 4, 5]
    for i in (0, 1):
        assert got[i][:, 1].isnan().all() and torch.equal(got[i][:, others], clean[i][:, others])
    for i in (2, 3):  # heads 0 to 2 have the first key-value head
        assert got[i][:, 0].isnan().all() and torch.equal(got[i][:, 1], clean[i][:, 1])
    assert got[4][1].isnan() and torch.equal(got[4][others], clean[4][others])


def test_sinks_of_any_layout_and_dtype():
    sinks = torch.tensor([0.5, -2.0, 1.5, 3.0])
    expected = call(sinks=sinks)
    assert torch.equal(call(sinks=sinks.repeat_interleave(2)[::2]), expected)
    assert torch.equal(call(sinks=sinks.bfloat16()), expected)
    one = sinks[:1].clone().requires_grad_()
    out = call(sinks=one.expand(4))
    assert torch.equal(out, call(sinks=sinks[:1].repeat(4)))
    assert torch.autograd.grad(out.sum(), one)[0].shape == (1,)


def test_a_gradient_that_nobody_wants_is_not_computed(monkeypatch):
    """With frozen sinks nothing is added up over the tokens."""
    sums = []
    monkeypatch.setattr(Tensor, "exp", lambda x: sums.append(x.shape) or torch.exp(x))
    for frozen in (True, False):
        leaf, sinks = Q.clone().requires_grad_(), SINKS.clone().requires_grad_(not frozen)
        call(leaf, sinks=sinks).sum().backward()
        assert leaf.grad is not None and (sinks.grad is None) == frozen
        assert sums == ([] if frozen else [(4, 5)])


def test_large_scores():
    """Scores near 1e4: the softmax takes the largest; no overflow and no NaN."""
    ends = torch.full((90,), 90)
    q, k = torch.randn(90, 2, 16) * 50, torch.randn(90, 2, 16) * 50
    v = torch.randn(90, 2, 16)
    got = call(q, k, v, ends, backend=None)
    exact = call(q.double(), k.double(), v.double(), ends)
    torch.testing.assert_close(got.double(), exact, rtol=5e-2, atol=5e-2)
