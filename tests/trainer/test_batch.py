"""How sequences become micro-batches: complete, within the token budget, equal in number."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.trainer.batch import split_micro_batches


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 200)
)
def test_every_sequence_once_within_the_budget(lengths, world_size, max_tokens) -> None:
    split = split_micro_batches(lengths, world_size, max_tokens)
    assert len(split) == world_size
    assert len({len(rank) for rank in split}) == 1, "collectives need the same count on every rank"
    trained = [i for rank in split for m in rank if not m.is_dummy for i in m.indices]
    assert sorted(trained) == list(range(len(lengths)))
    for micro in (m for rank in split for m in rank):
        assert micro.indices, "a rank must have something to run"
        assert len(micro.indices) == 1 or sum(lengths[i] for i in micro.indices) <= max_tokens


def test_same_arguments_same_split() -> None:
    lengths = [5, 9, 2, 2, 7, 40, 1]
    assert split_micro_batches(lengths, 3, 20) == split_micro_batches(lengths, 3, 20)
