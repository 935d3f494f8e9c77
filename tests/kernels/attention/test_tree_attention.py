"""tree_attention against plain attention of every path from root to leaf, in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import tree_attention
from tests import tolerances
from tests.kernels.attention.cases import (
    Case,
    forest_of,
    plain_attention,
    problem,
    random_forest,
    results,
)
from tests.kernels.attention.triton_cases import OPTIONS, assert_exact


def ours(case, dtype=None, **options):
    forest = case.forest

    call = partial(tree_attention, subtree_ends=forest.subtree_ends, softmax_scale=0.4)
    return results(call, case, dtype, position_ids=forest.position_ids, **options)


def expected(case, window_size=None, softcap=None):
    call = partial(plain_attention, forest=case.forest, scale=0.4)
    return results(call, case, torch.float64, window=window_size, softcap=softcap)


def assert_close(case, got, exact, tolerance):
    for name, a, b in zip(case.names, got, exact, strict=True):
        torch.testing.assert_close(
            a.double(), b, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


FORESTS = dict(
    tokens=st.integers(1, 260),
    longest=st.sampled_from([3, 40, 150]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (10, 2)]),
    dims=st.sampled_from([(8, 8), (16, 5), (3, 24), (64, 64), (80, 96)]),
    option=st.sampled_from(list(OPTIONS)),
    sinks=st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    **FORESTS,
    seed=st.integers(0, 2**20),
)
def test_random_forests(tokens, longest, heads, dims, option, sinks, seed):
    case = problem(random_forest(tokens, seed, longest), *heads, *dims, seed=seed, sinks=sinks)
    exact = expected(case, **OPTIONS[option])
    in_float64 = ours(case, torch.float64, **OPTIONS[option])
    assert_close(case, in_float64, exact, tolerances.ATTENTION_FLOAT64)
    assert_close(case, ours(case, **OPTIONS[option]), exact, tolerances.ATTENTION)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    **FORESTS,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**20),
)
def test_random_forests_in_16_bits(tokens, longest, heads, dims, option, sinks, dtype, seed):
    forest = random_forest(tokens, seed, longest)
    case = problem(forest, *heads, *dims, dtype=dtype, seed=seed, sinks=sinks)
    assert_exact(case, dtype=dtype, **OPTIONS[option])


@pytest.mark.parametrize("backend", ("reference", None))
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("sinks", (False, True))
def test_nodes_longer_than_a_block(sinks, option, backend):
    case = problem(forest_of((300, [70, (40, [280, 1])]), 130), 6, 2, 16, sinks=sinks)
    exact = expected(case, **OPTIONS[option])
    assert_close(case, ours(case, backend=backend, **OPTIONS[option]), exact, tolerances.ATTENTION)


def sdpa(case, dtype, length):
    """torch's own attention of sequences of one length."""

    def call(q, k, v):
        rows = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return results(call, case, dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("length", (23, 300, 1500))
def test_error_is_at_most_twice_that_of_torch(length, dtype):
    count = -(-100 // length)
    case = problem(forest_of(*[length] * count), 3, 1, 64, dtype=dtype)
    exact = sdpa(case, torch.float64, length)
    theirs = sdpa(case, dtype, length)
    got = results(partial(tree_attention, subtree_ends=case.forest.subtree_ends), case)
    for name, a, b, x in zip(("out", "dq", "dk", "dv"), got, theirs, exact, strict=True):
        error, limit = ((y.double() - x).square().mean().sqrt() for y in (a, b))
        assert error <= tolerances.ERROR_FACTOR * limit, name


BIT_DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))


@BIT_DTYPES
@pytest.mark.parametrize("heads", ((6, 2), (2, 2)))
def test_sequences_do_not_depend_on_each_other(heads, dtype):
    """Bit for bit, gradients too, across the blocks of the kernel and the cuts of its sums."""
    lengths = [33, 5, 410, 64, 700, 1]
    case = problem(forest_of(*lengths), *heads, 24, dtype=dtype, sinks=True)
    together = results(partial(tree_attention, subtree_ends=case.forest.subtree_ends), case)
    start = 0
    for length in lengths:
        rows = slice(start, start := start + length)
        part = Case(forest_of(length), [x[rows] for x in case.qkv], case.grad[rows], case.sinks)
        alone = results(partial(tree_attention, subtree_ends=part.forest.subtree_ends), part)
        for got, expected in zip(together[:4], alone[:4], strict=True):
            assert torch.equal(got[rows], expected)


# Branches at even and odd depths; a key at depth 256, where a chain of a sum begins, has
# copies (`Slots` in csrc).
TREES = {
    "levels": [(300, [70, (40, [280, 1]), 200]), (5, [3, 4])],
    "odd": [(257, [3, 300, (1, [2, 1, 70])]), (1, [1, 1, 1]), 1, (3, [(1, [5, 6]), (2, [7, 8])])],
}


@BIT_DTYPES
@pytest.mark.parametrize("window", (None, 90))
@pytest.mark.parametrize("trees", TREES)
def test_shared_prefixes_change_no_bit_of_the_result(trees, window, dtype):
    forest = forest_of(*TREES[trees])
    case = problem(forest, 4, 2, 24, dtype=dtype, sinks=True)

    def call(q, k, v, forest, sinks):
        ends, positions = forest.subtree_ends, forest.position_ids
        options = {"window_size": window, "softcap": window}
        return tree_attention(q, k, v, ends, positions, sinks=sinks, **options)

    out, grad_query, *_ = results(partial(call, forest=forest), case)
    for path in forest.paths:
        qkv = [x[path] for x in case.qkv]
        alone = Case(forest_of(len(path)), qkv, case.grad[path], case.sinks)
        alone_out, alone_grad, *_ = results(partial(call, forest=alone.forest), alone)
        assert torch.equal(out[path], alone_out) and torch.equal(grad_query[path], alone_grad)


@BIT_DTYPES
@pytest.mark.parametrize("threads", (2, 5))
def test_the_number_of_threads_changes_no_bit(threads, dtype):
    case = problem(random_forest(600, 3), 6, 2, 16, dtype=dtype, sinks=True)
    call = partial(tree_attention, subtree_ends=case.forest.subtree_ends)
    one = results(call, case)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        several = results(call, case)
    finally:
        torch.set_num_threads(before)
    for got, expected in zip(several, one, strict=True):
        assert torch.equal(got, expected)
