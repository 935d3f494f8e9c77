"""pack_forest: C++ against the reference, and the reference against what a forest must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import PackedForest, pack_forest, pack_sequences

BACKENDS = ["cpp", "reference"]
FIELDS = ("input_ids", "position_ids", "subtree_ends", "cu_seqlens", "token_index")

# Few token values, so that common prefixes of every depth occur.
forests = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def forest_of(sequences: list[list[int]], backend: str | None = None) -> PackedForest:
    packed = pack_sequences(sequences)
    return pack_forest(packed.values[0], packed.cu_seqlens, backend=backend)


def visible(forest: PackedForest) -> torch.Tensor:
    """bool [T, T]: query token i attends to key token j."""
    i = torch.arange(forest.input_ids.numel())
    return (i[None] <= i[:, None]) & (i[:, None] < forest.subtree_ends[None])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=200, deadline=None)
@given(sequences=forests)
def test_every_token_sees_the_tokens_before_it_in_its_sequence(backend, sequences):
    forest = forest_of(sequences, backend)
    seen, first = visible(forest), 0
    for sequence in sequences:
        path = forest.token_index[first : first + len(sequence)]
        first += len(sequence)
        assert forest.input_ids[path].tolist() == sequence
        assert forest.position_ids[path].tolist() == list(range(len(sequence)))
        for depth, position in enumerate(path.tolist()):
            assert seen[position].nonzero().flatten().tolist() == path[: depth + 1].tolist()
    prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    assert forest.input_ids.numel() == len(prefixes), "every prefix is there once"
    roots = (forest.position_ids == 0).nonzero().flatten().tolist()
    assert forest.cu_seqlens.tolist() == [*roots, len(prefixes)]
    assert forest.max_seqlen == max(forest.cu_seqlens.diff().tolist(), default=0)


@settings(max_examples=200, deadline=None)
@given(sequences=forests)
def test_cpp_equals_reference(sequences):
    cpp, reference = (forest_of(sequences, backend) for backend in BACKENDS)
    for field in FIELDS:
        ours, expected = getattr(cpp, field), getattr(reference, field)
        assert ours.dtype == expected.dtype and torch.equal(ours, expected), field


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_runs_that_part_anywhere(backend):
    """Runs are compared in blocks: part before, at and after the end of one."""
    stem = list(range(1000, 1300))
    sequences = [stem] + [[*stem[:n], 7, n] for n in (1, 63, 64, 65, 127, 128, 192, 299, 300)]
    sequences += [stem[:64], stem[:65], [*stem, 8]]
    forest = forest_of(sequences, backend)
    assert forest.input_ids.numel() == 300 + 9 * 2 + 1
    assert forest.cu_seqlens.tolist() == [0, 319] and forest.max_seqlen == 319
    first = 0
    for sequence in sequences:
        path = forest.token_index[first : first + len(sequence)]
        first += len(sequence)
        assert forest.input_ids[path].tolist() == sequence


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_in_common_is_plain_packing(backend):
    sequences = [[5, 6, 7], [], [8], [9, 5, 6]]
    forest, packed = forest_of(sequences, backend), pack_sequences(sequences)
    assert torch.equal(forest.input_ids, packed.values[0])
    assert torch.equal(forest.position_ids, packed.position_ids)
    assert forest.token_index.tolist() == list(range(7))
    assert forest.cu_seqlens.tolist() == [0, 3, 4, 7], "an empty sequence is no tree"
    assert forest.subtree_ends.tolist() == [3, 3, 3, 4, 7, 7, 7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_nothing_at_all(backend, sequences):
    forest = forest_of(sequences, backend)
    assert forest.cu_seqlens.tolist() == [0] and forest.max_seqlen == 0
    assert [getattr(forest, name).numel() for name in FIELDS] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_both_dtypes_any_stride_and_extreme_value(dtype):
    largest = torch.iinfo(dtype).max
    ids = torch.tensor([-1, largest, 0, -1, largest, -largest], dtype=dtype)
    strided = torch.stack([ids, ids], 1)[:, 0]
    forest = pack_forest(strided, torch.tensor([0, 3, 6], dtype=dtype))
    assert forest.input_ids.tolist() == [-1, largest, 0, -largest]
    assert forest.input_ids.dtype == forest.token_index.dtype == torch.int64


IDS, ENDS = torch.arange(4), torch.tensor([0, 3, 4])


@pytest.mark.parametrize(
    ("ids", "ends", "error", "message"),
    [
        ([0, 1], ENDS, TypeError, r"input_ids is \[0, 1\] \(list\)"),
        (IDS, None, TypeError, "cu_seqlens is None"),
    ],
)
def test_an_error_names_the_argument(ids, ends, error, message):
    with pytest.raises(error, match=message):
        pack_forest(ids, ends)


def test_the_extension_checks_what_it_is_given():
    from hybridengine.kernels._backend import native

    tokens = torch.arange(4)
    for ends in ([1, 4], [0, 3], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="ends must start at 0, not decrease and end at 4"):
            native().pack_forest(tokens, torch.tensor(ends))
    with pytest.raises(ValueError, match=r"pack_forest: tokens has shape \[4\] and dtype int32"):
        native().pack_forest(tokens.int(), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="pack_forest: ends must start at 0"):
        native().pack_forest(tokens, torch.tensor([], dtype=torch.int64))
