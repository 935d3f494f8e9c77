"""pack_forest: C++ against the reference, and the reference against what a forest must be."""

from __future__ import annotations

import pytest
import torch
from hybridengine.kernels import pack_forest, pack_sequences
from hypothesis import given, settings
from hypothesis import strategies as st

BACKENDS = ["cpp", "reference"]
FIELDS = ("input_ids", "position_ids", "subtree_ends", "cu_seqlens", "token_index")

# Few token values, so that common prefixes of every depth occur.
forests = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def visible(forest) -> torch.Tensor:
    """bool [T, T]: query token i attends to key token j."""
    i = torch.arange(forest.input_ids.numel())
    return (i[None] <= i[:, None]) & (i[:, None] < forest.subtree_ends[None])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=200, deadline=None)
@given(sequences=forests)
def test_every_token_sees_the_tokens_before_it_in_its_sequence(backend, sequences):
    forest = pack_forest(sequences, backend=backend)
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
    cpp, reference = (pack_forest(sequences, backend=backend) for backend in BACKENDS)
    for field in FIELDS:
        ours, expected = getattr(cpp, field), getattr(reference, field)
        assert ours.dtype == expected.dtype and torch.equal(ours, expected), field


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_runs_that_part_anywhere(backend):
    """Runs are compared in blocks: part before, at and after the end of one."""
    stem = list(range(1000, 1300))
    sequences = [stem] + [[*stem[:n], 7, n] for n in (1, 63, 64, 65, 127, 128, 192, 299, 300)]
    sequences += [stem[:64], stem[:65], [*stem, 8]]
    forest = pack_forest(sequences, backend=backend)
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
    forest, packed = pack_forest(sequences, backend=backend), pack_sequences(sequences)
    assert torch.equal(forest.input_ids, packed.values[0])
    assert torch.equal(forest.position_ids, packed.position_ids)
    assert forest.token_index.tolist() == list(range(7))
    assert forest.cu_seqlens.tolist() == [0, 3, 4, 7], "an empty sequence is no tree"
    assert forest.subtree_ends.tolist() == [3, 3, 3, 4, 7, 7, 7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_nothing_at_all(backend, sequences):
    forest = pack_forest(sequences, backend=backend)
    assert forest.cu_seqlens.tolist() == [0] and forest.max_seqlen == 0
    assert [getattr(forest, name).numel() for name in FIELDS] == [0, 0, 0, 1, 0]


def test_tensors_of_any_integer_dtype_and_extreme_ids():
    largest = torch.iinfo(torch.int64).max
    lists = [[-1, largest, 0], [-1, largest, -largest]]
    forest = pack_forest([torch.tensor(ids) for ids in lists])
    assert forest.input_ids.tolist() == [-1, largest, 0, -largest]
    for dtype in (torch.int32, torch.uint8, torch.bool):
        forest = pack_forest([torch.tensor(ids, dtype=dtype) for ids in ([1, 0], [1, 1])])
        assert forest.input_ids.dtype == torch.int64 and forest.input_ids.tolist() == [1, 0, 1]


def test_hostile_arguments():
    with pytest.raises(ValueError, match=r"shape \['l'\] and dtype torch.float32; expected token"):
        pack_forest([[0.5, 1.0]])
    with pytest.raises(ValueError, match=r"shape \['l', 2\] and dtype torch.int64"):
        pack_forest([torch.zeros(3, 2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="mixes tensors and lists"):
        pack_forest([[1], torch.tensor([1])])
    with pytest.raises(ValueError, match="backend 'cuda' does not exist"):
        pack_forest([[1]], backend="cuda")


def test_the_extension_checks_what_it_is_given():
    from hybridengine.kernels._backend import native

    tokens = torch.arange(4)
    for ends in ([1, 4], [0, 3], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="ends must start at 0, not decrease and end at 4"):
            native().pack_forest(tokens, torch.tensor(ends))
    with pytest.raises(ValueError, match=r"pack_forest: tokens has shape \[4\] and dtype Int"):
        native().pack_forest(tokens.int(), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="pack_forest: ends has shape"):
        native().pack_forest(tokens, torch.tensor([], dtype=torch.int64))
