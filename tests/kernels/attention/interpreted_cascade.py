"""Run by test_cascade.py in Triton's interpreter: cascades with a stand-in for FlashAttention."""

import sys

import pytest
import torch

from hybridengine.kernels import tree_attention
from hybridengine.kernels.attention import cascade, cascade_tables, flash_forest
from hybridengine.kernels.attention.cascade_tables import make_cascade
from hybridengine.kernels.attention.flash_choice import why_wrong
from hybridengine.kernels.attention.reference import Heads
from tests import tolerances
from tests.kernels.attention.cases import (
    forest_of,
    plain_attention,
    problem,
    random_forest,
    results,
)
from tests.kernels.attention.flash_in_float64 import PAIR

SCALE = 0.3


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan):
        out, lse = cascade.cascade_forward(Heads(q, k, v), SCALE, plan, PAIR)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        heads = Heads(q, k, v)
        return *cascade.cascade_backward(grad, heads, out, lse, SCALE, ctx.plan, PAIR), None


def assert_exact(case, levels=None):
    plan = make_cascade(case.forest.subtree_ends)
    assert levels is None or len(plan.levels) == levels
    got = results(lambda q, k, v: _Cascade.apply(q, k, v, plan), case)
    exact = results(lambda *qkv: plain_attention(*qkv, case.forest, SCALE), case, torch.float64)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, **tolerances.ATTENTION)


@pytest.mark.parametrize(
    ("tokens", "longest", "seed"), [(70, 9, s) for s in range(8)] + [(90, 1, 9)]
)
def test_random_forests(tokens, longest, seed):
    """With empty nodes, nodes of one token, only children and trees without children."""
    assert_exact(problem(random_forest(tokens, seed, longest), 4, 2, 8))


@pytest.mark.parametrize(
    ("trees", "levels"),
    [
        ([(20, [9, 18]), (1, [7, 3, 1]), 5, (40, [2, 2])], 1),
        ([5, 3], 0),
        ([1], 0),
        ([(3, [(2, [(1, [(2, [(3, [1, 2]), 1]), 4]), 1]), 2])], 5),
        ([(4, [(5, [6])])], 0),  # a chain is one node
        ([(4, [(0, [2, 3]), 6])], 1),
    ],
)
def test_shapes(trees, levels):
    assert_exact(problem(forest_of(*trees), 6, 2, 16), levels)


def test_strides():
    """As views of one product, and as heads before tokens."""
    case = problem(forest_of((20, [9, 18]), (5, [4, 2])), 2, 2, 8)
    packed = torch.stack(case.qkv, 2)
    by_head = packed[:, :, 1].transpose(0, 1).contiguous().transpose(0, 1)
    case.qkv = [packed[:, :, 0], by_head, packed[:, :, 2].mT.contiguous().mT]
    assert_exact(case)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let the operator choose FlashAttention, of which there is the stand-in; count its plans."""
    op, plans = sys.modules["hybridengine.kernels.attention.op"], []
    monkeypatch.setattr(cascade_tables, "MIN_KEYS", 12)
    monkeypatch.setattr(op, "takes", lambda *_: True)
    monkeypatch.setattr(op, "choose_backend", lambda *_: "triton")
    monkeypatch.setattr(flash_forest, "flash_pair", lambda *_: PAIR)

    def counted(ends):
        plans.append(cascade_tables.cascades_of(ends))
        return plans[-1]

    monkeypatch.setattr(flash_forest, "cascades_of", counted)
    return plans


@pytest.mark.parametrize(
    ("trees", "levels"),
    [
        ([(14, [9, 18]), (13, [7, 3])], [1]),
        ([(8, [9, 18])], []),  # too few keys
        ([(3, [(2, [(1, [(2, [(80, [1, 2]), 1]), 4]), 1]), 2])], []),  # too many levels
        ([30, 20], [0]),
    ],
)
def test_the_operator_calls_it_where_it_is_worth_it(trees, levels, as_on_a_gpu):
    case = problem(forest_of(*trees), 2, 1, 8)
    ends = case.forest.subtree_ends

    def two_layers(q, k, v):
        return sum(tree_attention(q, k, v, ends, softmax_scale=SCALE, flash=True) for _ in "ab")

    def exact(q, k, v):
        return 2 * plain_attention(q, k, v, case.forest, SCALE)

    got = results(two_layers, case)
    for a, b in zip(got, results(exact, case, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, **tolerances.ATTENTION)
    (plan,) = as_on_a_gpu
    assert [len(one.levels) for one in plan] == levels


def test_no_tokens(as_on_a_gpu):
    empty = torch.zeros(0, 2, 16, requires_grad=True)
    out = tree_attention(empty, empty, empty, torch.zeros(0, dtype=torch.int32), flash=True)
    out.sum().backward()
    assert out.shape == empty.shape == empty.grad.shape


def test_an_implementation_is_checked(monkeypatch):
    """The stand-in is right; wrong gradients, NaN and errors are found and described."""
    monkeypatch.setattr(cascade, "ROWS", 1024)  # one program a head, for speed

    def spoilt(name, change):
        def call(*arguments):
            return change(*getattr(PAIR, name)(*arguments))

        return PAIR._replace(**{name: call})

    def refuse(*_):
        raise RuntimeError("no kernel")

    def why(pair):
        return why_wrong(pair, torch.device("cpu"), 16)

    assert why(PAIR) is None
    assert "the result" in why(spoilt("forward", lambda out, lse: (out * 1.1, lse)))
    assert "log-sum-exp" in why(spoilt("forward", lambda out, lse: (out, lse + 0.5)))
    assert "grad_key" in why(spoilt("backward", lambda q, k, v: (q, -k, v)))
    assert "nan" in why(spoilt("backward", lambda q, k, v: (q * torch.nan, k, v)))
    assert "RuntimeError: no kernel" in why(spoilt("backward", refuse))
