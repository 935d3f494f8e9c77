"""Where changes go and how positions are coded: against plain PyTorch, and the bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import bit_checksum, strided_copy
from hybridengine.kernels.delta import ChangeTable, decode_gaps, encode_gaps
from tests.kernels.copy_cases import row, slices
from tests.kernels.delta_cases import GAPS, changes_of, positions_of, reference_table


@pytest.mark.parametrize("backend", [None, "reference"])
def test_wrong_arguments_are_named(backend) -> None:
    gaps, width = encode_gaps(torch.tensor([5, 900]))
    for count, end in ((1, 901), (3, 901), (2, 900)):
        with pytest.raises(ValueError, match="decode_gaps"):
            decode_gaps(gaps, width, 0, end, count, backend=backend)
    with pytest.raises(ValueError, match="decode_gaps: got 3 bytes of width 4"):
        decode_gaps(gaps[:3], 4, 0, 901, 0, backend=backend)


def entropy_bits(size: int, count: int) -> float:
    """log2(size over count)"""
    lgamma = math.lgamma
    return (lgamma(size + 1) - lgamma(count + 1) - lgamma(size - count + 1)) / math.log(2)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["uniform", "regular", "crowded"])
@pytest.mark.parametrize("share", [3e-6, 1e-5, 1e-4, 1e-3, 2.7e-3, 3.9e-3, 1e-2, 0.1, 0.33])
def test_gaps_with_raw_values_are_within_1_3_of_the_entropy(
    kind: str, share: float, device: str
) -> None:
    size = 20_000_000 if share < 1e-3 else 1_000_000
    positions = positions_of(kind, size, share).to(device)
    gaps, width = encode_gaps(positions)
    bound = entropy_bits(size, len(positions)) + 16 * len(positions)
    assert 8 * len(gaps) + 16 * len(positions) <= 1.3 * bound
    assert torch.equal(decode_gaps(gaps, width, 0, size, len(positions)), positions)
    reference = encode_gaps(positions, backend="reference")
    assert torch.equal(reference[0], gaps) and reference[1] == width


@settings(deadline=None, max_examples=100)
@given(GAPS)
def test_gaps_come_back(drawn) -> None:
    positions, start = drawn
    end = start + 1 if not len(positions) else int(positions[-1]) + 1
    gaps, width = encode_gaps(positions, start)
    for backend in (None, "reference"):
        again = decode_gaps(gaps, width, start, end, len(positions), backend=backend)
        assert torch.equal(again, positions)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(drawn=st.lists(slices(), min_size=0, max_size=6), share=st.floats(0, 1), wide=st.booleans())
def test_a_table_moves_changes_as_strided_copy_moves_all(device, drawn, share, wide) -> None:
    """Copy everything before and after some elements change, or the changes alone."""
    table, tensors, indices, values = changes_of(drawn, share, wide)
    tensors, indices, values = ([t.to(device) for t in x] for x in (tensors, indices, values))
    before, after = tensors[:2], tensors[2:]
    got, expected = torch.zeros(2, 80_000, dtype=torch.bfloat16, device=device).unbind()
    strided_copy(before, [got], table)
    strided_copy(after, [expected], table)
    by_reference = got.clone()
    changes = ChangeTable(table, torch.device(device))
    positions, mapped = changes.map(indices, values)
    before_scatter = int(bit_checksum(got))
    grown = changes.scatter(indices, values, [got])
    assert torch.equal(got, expected)
    if device == "cpu":
        assert (before_scatter + int(grown) - int(bit_checksum(got))) % 2**64 == 0
    else:
        assert grown is None
    assert bool((positions.diff() > 0).all()), "ascending, each once"
    assert torch.equal(mapped, expected[positions])
    assert set((by_reference != expected).nonzero()[:, 0].tolist()) <= set(positions.tolist())
    reference = reference_table(table, device)
    reference.scatter(indices, values, [by_reference])
    assert torch.equal(by_reference, expected)
    for ours, theirs in zip((positions, mapped), reference.map(indices, values), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 15, 4), (3, 5, 7, 2), (4, 3, 1), (2, 9, 3, 5)])
def test_steps_over_an_odd_count(shape: tuple[int, ...]) -> None:
    """Of x[:, ::2, …, :2] the next outer step begins within the step of the inner dimension."""
    everything = torch.arange(math.prod(shape))
    chosen = everything.view(shape)[:, ::2, ..., :2]
    strides = torch.empty(chosen.shape).stride()
    table = torch.tensor([row(0, 0, 0, 0, *map(list, (chosen.shape, chosen.stride(), strides)))])
    for changes in (ChangeTable(table, torch.device("cpu")), reference_table(table)):
        given = [everything], [everything.bfloat16()]
        positions, mapped = changes.map(*given)
        written = torch.full(chosen.shape, -1.0, dtype=torch.bfloat16)
        changes.scatter(*given, [written])
        assert torch.equal(positions, torch.arange(chosen.numel()))
        assert torch.equal(mapped, chosen.flatten().bfloat16())
        assert torch.equal(written, chosen.bfloat16())


def test_addresses_beyond_32_bits() -> None:
    """A slice of a source and a destination with more than 2^32 elements, none of which exist."""
    table = torch.tensor([row(0, 0, 5, 9, [3, 1 << 33], [1 << 34, 1], [1 << 33, 1])])
    near = torch.tensor([4, 5, (1 << 33) + 4, (1 << 33) + 5, (1 << 34) + 6, (1 << 35) + 7])
    values = torch.arange(6).bfloat16()
    expected = torch.tensor([9, (1 << 33) + 8, (1 << 33) + 10, (1 << 34) + 11])
    for changes in (ChangeTable(table, torch.device("cpu")), reference_table(table)):
        positions, mapped = changes.map([near], [values])
        assert torch.equal(positions, expected)
        assert mapped.tolist() == [1, 2, 4, 5]


def test_a_table_does_not_write_outside_its_destination() -> None:
    table = torch.tensor([row(0, 0, 0, 2, [4], [1], [1])])
    changes = ChangeTable(table, torch.device("cpu"))
    one = [torch.tensor([0])], [torch.ones(1).bfloat16()]
    changes.scatter(*one, [torch.zeros(6).bfloat16()])
    with pytest.raises(IndexError, match="ends at element 6 of destination 0, which has 5"):
        changes.scatter(*one, [torch.zeros(5).bfloat16()])
    with pytest.raises(IndexError, match="got 0 destinations; expected 1"):
        changes.scatter(*one, [])
    with pytest.raises(ValueError, match="expected 1 of each"):
        changes.map([], [])
    with pytest.raises(ValueError, match=r"indices\[0\] has shape"):
        changes.map([torch.zeros(1)], [torch.ones(1).bfloat16()])
