"""How sequences become micro-batches: complete, within the token budget, equal in number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.train.exchange import split_micro_batches


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 200)
)
def test_every_sequence_once_within_the_budget(lengths, world_size, max_tokens) -> None:
    split = split_micro_batches(lengths, world_size, max_tokens)
    check(split, len(lengths), world_size)
    for micro in (m for rank in split for m in rank):
        assert len(micro) == 1 or sum(lengths[i] for i in micro) <= max_tokens


def check(split, num_sequences: int, world_size: int) -> None:
    assert len(split) == world_size
    assert len({len(rank) for rank in split}) == 1, "collectives need the same count on every rank"
    trained = [i for rank in split for m in rank for i in m]
    assert sorted(trained) == list(range(num_sequences))
    assert all(m == sorted(m) for rank in split for m in rank)


def test_same_arguments_same_split() -> None:
    lengths = [5, 9, 2, 2, 7, 40, 1]
    assert split_micro_batches(lengths, 3, 20) == split_micro_batches(lengths, 3, 20)
    prompts = [(i // 2, 1) for i in range(len(lengths))]
    both = [split_micro_batches(lengths, 3, 20, prompts=prompts, pair_cost=0.1) for _ in range(2)]
    assert both[0] == both[1]


def tree_tokens(indices, lengths, prompts) -> int:
    """Tokens of the sequences with the prompt of each group once."""
    shared = sum(dict(prompts[i] for i in indices).values())
    return shared + sum(lengths[i] - prompts[i][1] for i in indices)


groups = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 30), min_size=1, max_size=9)),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(groups, st.integers(1, 5), st.integers(1, 120), st.sampled_from([0.0, 0.01, 1.0]))
def test_trees_count_their_prompt_once(trees, world_size, max_tokens, pair_cost) -> None:
    prompts = [(g, prompt) for g, (prompt, responses) in enumerate(trees) for _ in responses]
    lengths = [prompt + n for prompt, responses in trees for n in responses]
    split = split_micro_batches(
        lengths, world_size, max_tokens, prompts=prompts, pair_cost=pair_cost
    )
    check(split, len(lengths), world_size)
    for micro in (m for rank in split for m in rank):
        tokens = tree_tokens(micro, lengths, prompts)
        assert len(micro) == 1 or tokens <= max_tokens


def parts_of_groups(split, prompts) -> list[int]:
    """The number of micro-batches that every group is spread over."""
    places: dict = {}
    for micro in (m for rank in split for m in rank):
        for group in {prompts[i][0] for i in micro}:
            places[group] = places.get(group, 0) + 1
    return [places[group] for group in sorted(places)]


def test_groups_stay_together_where_there_are_enough_of_them() -> None:
    prompts = [(i % 8, 100) for i in range(64)]  # interleaved
    lengths = [100 + 10 for _ in prompts]
    split = split_micro_batches(lengths, 2, 400, prompts=prompts)
    assert parts_of_groups(split, prompts) == [1] * 8
    assert [len(rank) for rank in split] == [2, 2], "8 groups of 180 tokens, two fit"


def test_a_group_that_does_not_fit_is_split_with_its_prompt() -> None:
    prompts, lengths = [("a", 100)] * 8, [100 + 50] * 8
    split = split_micro_batches(lengths, 1, 250, prompts=prompts)
    assert all(tree_tokens(m, lengths, prompts) <= 250 for m in split[0])
    assert len(split[0]) == 3, "3 responses fit beside the prompt"


def test_few_groups_are_split_over_the_replicas() -> None:
    prompts, lengths = [(0, 100)] * 8, [100 + 60] * 8
    split = split_micro_batches(lengths, 4, 10_000, prompts=prompts)
    assert [[len(m) for m in rank] for rank in split] == [[2], [2], [2], [2]]
    prompts += [(1, 100)] * 8
    split = split_micro_batches(lengths * 2, 2, 10_000, prompts=prompts)
    assert parts_of_groups(split, prompts) == [1, 1], "balanced already"


def test_a_group_is_not_split_for_nothing() -> None:
    """The prompt is nearly all of its work: each part costs as much as the whole group."""
    prompts, lengths = [(0, 10_000)] * 2, [10_000 + 1] * 2
    split = split_micro_batches(lengths, 2, 50_000, prompts=prompts)
    assert sorted(m for rank in split for m in rank) == [[], [0, 1]]
    assert parts_of_groups(split, prompts) == [1]


def test_attention_work_counts() -> None:
    """One sequence of 400 tokens, four of 100: tokens alone would give a rank each half."""
    lengths = [400, 100, 100, 100, 100]
    prompts = [(i, 0) for i in range(5)]
    by_tokens = split_micro_batches(lengths, 2, 10_000, prompts=prompts)
    assert sorted(len(m) for rank in by_tokens for m in rank) == [1, 4]
    lengths = [400, 100, 100, 100, 100, 300, 100]
    prompts = [(i, 0) for i in range(7)]
    split = split_micro_batches(lengths, 2, 10_000, prompts=prompts, pair_cost=1.0)
    [long] = [m for rank in split for m in rank if 0 in m]
    assert long == [0], "400 tokens see 80,200 keys, the six others together 70,400"
