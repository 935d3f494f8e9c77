"""Balancing: every sequence once, counts, budgets, and how even against optimum and bounds."""

import math
import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import balance, balance_by_tokens, imbalance

lengths_lists = st.lists(st.integers(0, 50), max_size=40)


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_lists, num_bins=st.integers(1, 9), equal_count=st.booleans())
def test_every_sequence_is_in_one_bin(lengths, num_bins, equal_count):
    bins = balance(lengths, num_bins, equal_count=equal_count)
    assert len(bins) == num_bins
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(items == sorted(items) for items in bins)
    counts = [len(items) for items in bins]
    if equal_count:
        assert max(counts) - min(counts) <= 1
    elif len(lengths) >= num_bins:
        assert min(counts) > 0
    assert bins == balance(
        torch.tensor(lengths, dtype=torch.int64), num_bins, equal_count=equal_count
    )


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=3, max_size=8), num_bins=st.integers(2, 3))
def test_close_to_the_optimum_of_small_cases(lengths, num_bins):
    optimum = min(
        max(
            sum(length for length, b in zip(lengths, where, strict=True) if b == bin_)
            for bin_ in range(num_bins)
        )
        for where in product(range(num_bins), repeat=len(lengths))
    )
    assert imbalance(lengths, balance(lengths, num_bins)).largest <= 7 / 6 * optimum


@pytest.mark.parametrize("equal_count", [False, True])
def test_many_lengths_come_out_even(equal_count):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(4096).log_normal_(6, 1, generator=generator).long()
    even = imbalance(lengths, balance(lengths, 16, equal_count=equal_count))
    assert even.largest - even.smallest <= 1 and even.ratio < 1 + 1e-4


@settings(max_examples=100, deadline=None)
@given(
    lengths=lengths_lists,
    budget=st.integers(50, 200),
    min_bins=st.integers(1, 4),
    multiple_of=st.integers(1, 4),
)
def test_budget_is_kept(lengths, budget, min_bins, multiple_of):
    bins = balance_by_tokens(lengths, budget, min_bins=min_bins, multiple_of=multiple_of)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert imbalance(lengths, bins).largest <= budget
    assert len(bins) >= min_bins and len(bins) % multiple_of == 0


@pytest.mark.parametrize(("shortest", "longest", "fewest"), [(520, 1000, 2048), (340, 480, 1024)])
def test_the_fewest_bins_of_2048_sequences(shortest, longest, fewest):
    """One or two fit into a bin, which the sum of their lengths does not tell: no bin by bin."""
    draw = random.Random(0)
    lengths = [draw.randint(shortest, longest) for _ in range(2048)]
    bins = balance_by_tokens(lengths, 1000)
    assert imbalance(lengths, bins).largest <= 1000
    assert len(bins) == fewest


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists, budget=st.integers(50, 200), more=st.integers(0, 5))
def test_ranks_that_ask_for_the_largest_number_agree(lengths, budget, more):
    most = len(balance_by_tokens(lengths, budget)) + more
    bins = balance_by_tokens(lengths, budget, min_bins=most)
    assert len(bins) == most
    assert imbalance(lengths, bins).largest <= budget
    assert sum(not items for items in bins) == max(0, most - len(lengths))


@pytest.mark.parametrize("kind", (iter, tuple, torch.tensor, lambda items: (i for i in items)))
def test_lengths_of_any_iterable(kind):
    lengths = [8, 7, 6, 5, 4]
    assert balance(kind(lengths), 2) == balance(lengths, 2)
    assert balance_by_tokens(kind(lengths), 15) == balance_by_tokens(lengths, 15)
    assert imbalance(kind(lengths), [[0, 1], [2, 3, 4]]).largest == 15


def test_totals_beyond_int32():
    lengths = [2**33, 2**32, 2**32, 5]
    bins = balance(lengths, 2)
    assert bins == [[0], [1, 2, 3]] and imbalance(lengths, bins).largest == 2**33 + 5


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="num_bins is 0"):
        balance([1], 0)
    with pytest.raises(ValueError, match=r"lengths\[1\] is -2"):
        balance([1, -2], 1)
    with pytest.raises(ValueError, match=r"lengths\[2\] is 9, above max_tokens 8"):
        balance_by_tokens([1, 2, 9], 8)
    with pytest.raises(ValueError, match=r"balance_by_tokens: lengths\[0\] is -1"):
        balance_by_tokens([-1, 2], 8)
    for name, value in (("max_tokens", 0), ("min_bins", -1), ("multiple_of", 0)):
        with pytest.raises(ValueError, match=f"balance_by_tokens: {name} is {value}; expected an"):
            balance_by_tokens([1, 2], **{"max_tokens": 8, name: value})
    for name, value in (("max_tokens", math.nan), ("multiple_of", 1.5)):
        with pytest.raises(TypeError, match=f"balance_by_tokens: {name} is {value} .float."):
            balance_by_tokens([1, 2], **{"max_tokens": 8, name: value})
    for wrong in (1.5, math.nan, "3", None, True):
        with pytest.raises(ValueError, match=r"balance: lengths\[1\] is .*; expected an integer"):
            balance([1, wrong], 1)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 922.*; expected .* 2\^60"):
        balance([2**63 - 1, 2**63 - 1], 1)
    with pytest.raises(ValueError, match=r"lengths\[0\] is \[1, 2\]"):
        balance(torch.tensor([[1, 2]]), 1)
    with pytest.raises(ValueError, match="bins is empty"):
        imbalance([1], [])


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_lists, num_bins=st.integers(1, 5), seed=st.integers(0, 99))
def test_groups_stay_together(lengths, num_bins, seed):
    ids = [random.Random(seed + i).choice("abcdef") for i in range(len(lengths))]
    bins = balance(lengths, num_bins, group_ids=ids)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(items == sorted(items) for items in bins)
    for one in set(ids):
        assert sum(any(ids[i] == one for i in items) for items in bins) == 1
    numbers = torch.tensor([ord(one) for one in ids], dtype=torch.int64)
    assert bins == balance(lengths, num_bins, group_ids=numbers)


def test_groups_are_balanced_by_their_totals():
    bins = balance(
        [1, 9, 1, 5, 4, 1], 2, group_ids=["a", "b", "a", "c", "c", "d"], equal_count=True
    )
    assert imbalance([1, 9, 1, 5, 4, 1], bins).largest == 11  # totals 2, 9, 9 and 1, two in a bin
    with pytest.raises(ValueError, match="group_ids has 2 entries; expected 3"):
        balance([1, 2, 3], 2, group_ids=["a", "b"])
