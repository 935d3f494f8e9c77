"""paged_attention against the trainer's attention, bit for bit, and against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import paged_attention, tree_attention, write_kv_cache
from tests import tolerances
from tests.kernels.attention.cases import forest_of, problem
from tests.kernels.attention.paged_cases import Cache, Sequences, packed

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
# AVX512-BF16 multiplies weights that are rounded to bfloat16.
TOLERANCES = {torch.float32: tolerances.ATTENTION, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}
SINKS = pytest.mark.parametrize("sinks", (False, True), ids=("", "sinks"))
OPTIONS = pytest.mark.parametrize(
    "options",
    ({}, {"window_size": 70}, {"softcap": 2.0}, {"window_size": 300, "softcap": 0.5}),
    ids=("plain", "window", "softcap", "both"),
)


@DTYPES
@OPTIONS
@SINKS
@pytest.mark.parametrize("block_size", (16, 32, 64, 208))
def test_the_bits_are_those_of_the_trainer(block_size, sinks, options, dtype):
    """Prompts of several chains and blocks, decoding, and mixed batches."""
    case = Sequences.random([700, 1, 33, 257, 512, 64], dtype=dtype, sinks=sinks)
    got = Cache(case, block_size).run(seed=1, longest=200, **options)
    assert torch.equal(got, packed(case, **options))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (14, 2), (71, 1), (8, 8)]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 80), (128, 128), (48, 32)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block_size=st.sampled_from([16, 32, 48, 64, 128, 272]),
    window_size=st.sampled_from([None, None, 1, 2, 17, 100, 300]),
    softcap=st.sampled_from([None, None, 1.5]),
    longest=st.sampled_from([1, 5, 50, 600]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_random_sequences(
    lengths, heads, dims, dtype, block_size, window_size, softcap, longest, sinks, seed
):
    case = Sequences.random(lengths, heads, dims, dtype, seed, sinks)
    options = {"window_size": window_size, "softcap": softcap, "softmax_scale": 0.3}
    if longest == 1:  # one step a token
        case = Sequences.random([min(n, 70) for n in lengths], heads, dims, dtype, seed, sinks)
    got = Cache(case, block_size, seed).run(seed, longest, **options)
    assert torch.equal(got, packed(case, **options))


@DTYPES
def test_the_bits_of_decoding_at_every_length(dtype):
    """One query a step, over the end of a chain and of a block."""
    case = Sequences.random([290, 270], (7, 1), dtype=dtype)
    cache = Cache(case, 16)
    cache.step({0: 10, 1: 200})
    outs = [[], []]
    for _ in range(70):
        for i, out in cache.step({1: 1, 0: 1}).items():
            outs[i].append(out)
    cache.step({0: 175})
    for _ in range(35):
        outs[0].append(cache.step({0: 1})[0])
    expected = packed(case)
    first, second = (torch.cat(x) for x in outs)
    assert torch.equal(first, torch.cat([expected[10:80], expected[255:290]]))
    assert torch.equal(second, expected[290 + 200 : 290 + 270])


@DTYPES
@OPTIONS
@SINKS
def test_the_bits_of_a_shared_prefix(sinks, options, dtype):
    """Responses that share their prompt in the trainer's forest, and its blocks in the cache."""
    forest = forest_of((301, [70, 33, (40, [280, 5])]))
    case = problem(forest, 6, 2, 32, dtype=dtype, sinks=sinks)
    query, key, value, sinks = *case.qkv, case.sinks
    expected = tree_attention(
        query, key, value, forest.subtree_ends, forest.position_ids, sinks=sinks, **options
    )
    for path in forest.paths:
        case = Sequences([len(path)], [x[path] for x in (query, key, value)], sinks)
        cache = Cache(case, 16)
        cache.step({0: 288}, **options)
        got = cache.step({0: len(path) - 288}, **options)[0]
        assert torch.equal(got, expected[path[288:]])


@DTYPES
@pytest.mark.parametrize("threads", (2, 5))
def test_the_number_of_threads_changes_no_bit(threads, dtype):
    case = Sequences.random([900, 3, 400, 1], dtype=dtype)
    expected = packed(case)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(Cache(case, 32).run(seed=2, longest=300), expected)
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_against_float64(dtype):
    case = Sequences.random([300, 40], dtype=dtype, sinks=True)
    exact = Sequences(case.lengths, [x.double() for x in case.qkv], case.sinks)
    options = {"window_size": 100, "softcap": 3.0}
    got = Cache(case).run(seed=3, longest=100, **options)
    torch.testing.assert_close(got.double(), packed(exact, **options), **TOLERANCES[dtype])


@DTYPES
def test_the_reference_reads_the_same_cache(dtype):
    case = Sequences.random([50, 20], dims=(32, 16), dtype=dtype, sinks=True)
    caches = [Cache(case, fill=0.0) for _ in range(2)]
    chunks = {1: 20, 0: 45}
    ours = caches[0].step(chunks)
    reference = caches[1].step(chunks, backend="reference")
    assert torch.equal(caches[0].kv, caches[1].kv)
    for i in chunks:
        torch.testing.assert_close(ours[i], reference[i], **TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("operand", (0, 1, 2), ids=("query", "key", "value"))
def test_a_token_that_is_not_finite_spreads_only_to_those_that_see_it(operand, bad, dtype):
    case = Sequences.random([90, 300, 20], dtype=dtype)
    expected = packed(case)
    case.qkv[operand][90 + 37, 0, 3] = bad
    got = Cache(case).run(seed=4, longest=120)
    assert torch.equal(got.isnan(), packed(case).isnan())
    assert got.isnan().any()
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


@DTYPES
@pytest.mark.parametrize("softcap", (None, 300.0))
@pytest.mark.parametrize("softmax_scale", (50.0, 1e30))
def test_large_scores(softmax_scale, softcap, dtype):
    """Weights that underflow, and scores that overflow."""
    case = Sequences.random([700, 64], dtype=dtype)
    options = {"softmax_scale": softmax_scale, "softcap": softcap}
    got = Cache(case).run(seed=5, longest=200, **options)
    assert torch.equal(got.isnan(), packed(case, **options).isnan())
    assert torch.equal(got.nan_to_num(), packed(case, **options).nan_to_num())


def test_padding_is_not_written():
    cache = torch.zeros(2, 1, 16, 32)
    write_kv_cache(torch.ones(3, 1, 16), torch.ones(3, 1, 16), cache, torch.tensor([-1, 20, -1]))
    assert int(cache.count_nonzero()) == 32 and int(cache[1].count_nonzero()) == 32


def call(**changed):
    arguments = {
        "query": torch.zeros(3, 2, 16),
        "kv_cache": torch.zeros(4, 1, 16, 32),
        "block_table": torch.tensor([[0, 1], [3, 9]]).int(),
        "query_start_loc": torch.tensor([0, 1, 3]).int(),
        "seq_lens": torch.tensor([20, 16]).int(),
    }
    return paged_attention(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_lens": torch.tensor([20, 17]).int()}, r"block_table\[1, 1\] is 9"),
        ({"seq_lens": torch.tensor([33, 16]).int()}, r"seq_lens\[0\] is 33"),
        ({"seq_lens": torch.tensor([20, 1]).int()}, r"seq_lens\[1\] is 1 for 2 queries"),
        ({"query_start_loc": torch.tensor([0, 4, 3]).int()}, "ascending"),
        ({"query_start_loc": torch.tensor([0, 1, 2]).int()}, "ends at 2"),
        ({"block_table": torch.tensor([[0, -1], [3, 9]]).int()}, r"block_table\[0, 1\] is -1"),
        ({"query": torch.zeros(3, 2, 16).bfloat16()}, "bfloat16"),
        ({"kv_cache": torch.zeros(4, 1, 24, 32)}, "multiples of 16"),
        ({"kv_cache": torch.zeros(4, 3, 16, 32)}, "multiple"),
        ({"kv_cache": torch.zeros(4, 1, 16, 32).half()}, "float16"),
        ({"window_size": 0}, "window_size is 0"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\]; expected \[H\] with H = 2"),
        ({"sinks": torch.zeros(2).int()}, "sinks has dtype int32"),
        ({"out": torch.zeros(3, 2, 8)}, "out has shape"),
    ],
)
def test_errors(changed, message):
    assert call().shape == (3, 2, 16)
    with pytest.raises(ValueError, match=message):
        call(**changed)


def test_a_slot_outside_of_the_cache():
    key = torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 64"):
        write_kv_cache(key, key, torch.zeros(4, 1, 16, 32), torch.tensor([64]))
