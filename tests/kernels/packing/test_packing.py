"""Packing against plain indexing: every dtype, layout, gradient, capacity and hostile input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import pack, pack_sequences, unpack
from hybridengine.kernels._backend import native
from tests.kernels.batches import random_mask

BACKENDS = ["cpp", "reference"]


def expected_layout(mask: torch.Tensor):
    rows, positions, lengths = [], [], []
    for b, row in enumerate(mask.tolist()):
        columns = [column for column, unmasked in enumerate(row) if unmasked]
        rows += [b * mask.size(1) + column for column in columns]
        positions += range(len(columns))
        lengths.append(len(columns))
    return rows, positions, lengths


shapes = st.tuples(st.integers(0, 6), st.integers(0, 40))
kinds = st.sampled_from(["prefix", "suffix", "scattered"])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(shape=shapes, kind=kinds, seed=st.integers(0, 2**16), width=st.integers(0, 9))
def test_pack_equals_plain_indexing(backend, shape, kind, seed, width):
    mask = random_mask(*shape, seed, kind)
    hidden = torch.randn(*shape, width)
    ids = torch.randint(0, 100, shape)
    packed = pack([hidden, ids, ids.bool()], mask, backend=backend)
    rows, positions, lengths = expected_layout(mask)
    assert packed.indices.tolist() == rows
    assert packed.position_ids.tolist() == positions
    assert packed.cu_seqlens.diff().tolist() == lengths and packed.cu_seqlens[0] == 0
    assert packed.cu_seqlens.dtype == torch.int32 and packed.position_ids.dtype == torch.int64
    assert packed.max_seqlen == max(lengths, default=0)
    for value, source in zip(packed.values, [hidden, ids, ids.bool()], strict=True):
        assert torch.equal(value, source[mask])
    padded = unpack(packed.values[0], packed, padding_value=-3.0, backend=backend)
    assert torch.equal(padded, hidden.masked_fill(~mask[..., None], -3.0))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.bool,
    ],
)
def test_every_dtype_survives_both_ways(dtype):
    mask = random_mask(5, 33, 0, "scattered")
    source = torch.randn(5, 33, 3).mul(3).to(dtype)
    packed = pack([source], mask)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.element_size()]
    assert torch.equal(packed.values[0].view(bits), source.view(bits)[mask])
    padded = unpack(packed.values, packed, padding_value=1)[0]
    expected = torch.ones(5, 33, 3).to(dtype)
    expected.view(bits)[mask] = source.view(bits)[mask]
    assert torch.equal(padded.view(bits), expected.view(bits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shifted_labels_end_with_the_ignore_value(backend):
    ids = torch.tensor([[0, 7, 8, 9], [4, 0, 5, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    packed = pack([ids, ids], ids > 0, shifted=[1], backend=backend)
    assert packed.values[1].tolist() == [8, 9, -100, 5, -100, -100]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_go_back_to_the_unmasked_entries(backend):
    mask = random_mask(4, 17, 3, "scattered")
    hidden = torch.randn(4, 17, 5, dtype=torch.float64, requires_grad=True)
    log_probs = torch.randn(4, 17, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 9, (4, 17))

    def through(hidden, log_probs):
        packed = pack([hidden, ids, log_probs], mask, backend=backend)
        padded = unpack([packed.values[0] ** 2, packed.values[2]], packed, backend=backend)
        return padded[0], padded[1], packed.values[2]

    assert torch.autograd.gradcheck(through, (hidden, log_probs))


def test_gradient_of_one_of_several_tensors():
    mask = random_mask(3, 8, 0, "prefix")
    wanted = torch.randn(3, 8, requires_grad=True)
    packed = pack([torch.randn(3, 8), wanted], mask)
    packed.values[1].sum().backward()
    assert torch.equal(wanted.grad, mask.float())


def test_views_are_packed_without_a_copy_changing_them():
    mask = random_mask(4, 15, 1, "scattered")
    wide = torch.randn(4, 16, 6, 3)
    for source in (wide[:, 1:], wide[:, :-1], wide[:, 1:, ::2], wide[:, 1:].transpose(2, 3)):
        assert torch.equal(pack([source], mask).values[0], source[mask])
    one = torch.randn(4, 1, 2).expand(4, 15, 2)
    assert torch.equal(pack([one], mask).values[0], one[mask])
    unaligned = torch.randn(4 * 15 * 3 + 1)[1:].view(4, 15, 3)
    assert torch.equal(pack([unaligned], mask.t().contiguous().t()).values[0], unaligned[mask])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_masks_of_any_number_type(dtype):
    mask = random_mask(4, 15, 1, "scattered")
    source = torch.randn(4, 15)
    given = mask.to(dtype) if dtype.is_floating_point else 2 * mask.to(dtype)
    assert torch.equal(pack([source], given).values[0], source[mask])


@pytest.mark.parametrize("backend", BACKENDS)
def test_capacity_pads_the_tail(backend):
    mask = random_mask(4, 9, 2, "scattered")
    total = int(mask.sum())
    source = torch.randn(4, 9, 2)
    packed = pack([source], mask, capacity=total + 5, fill_values=[2.5], backend=backend)
    assert torch.equal(packed.values[0][:total], source[mask])
    assert packed.values[0][total:].eq(2.5).all() and packed.max_seqlen == 9
    assert packed.indices[total:].eq(-1).all() and packed.position_ids[total:].eq(0).all()
    assert packed.cu_seqlens[-1] == total and packed.num_dropped == 0
    padded = unpack(packed.values[0], packed, backend=backend)
    assert torch.equal(padded, source * mask[..., None])
    with pytest.raises(ValueError, match=rf"has {total} tokens, but capacity is {total - 1}"):
        pack([source], mask, capacity=total - 1, backend=backend)


def test_more_tensors_than_one_launch_takes():
    mask = random_mask(3, 7, 5, "scattered")
    sources = [torch.randn(3, 7, i % 4 + 1) for i in range(70)]
    for value, source in zip(pack(sources, mask).values, sources, strict=True):
        assert torch.equal(value, source[mask])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8), as_tensor=st.booleans())
def test_pack_sequences(lengths, as_tensor):
    ids = [list(range(10 * n, 10 * n + length)) for n, length in enumerate(lengths)]
    scores = [[0.5] * length for length in lengths]
    given_ids = [torch.tensor(i, dtype=torch.int64) for i in ids] if as_tensor else ids
    packed = pack_sequences(given_ids, scores)
    flat = [token for sequence in ids for token in sequence]
    assert packed.values[0].tolist() == flat and packed.values[0].dtype == torch.int64
    assert packed.cu_seqlens.diff().tolist() == lengths
    assert packed.position_ids.tolist() == [i for length in lengths for i in range(length)]
    padded = unpack(packed.values[0], packed, padding_value=-1)
    assert padded.shape == (len(lengths), max(lengths))
    assert [[v for v in row if v >= 0] for row in padded.tolist()] == ids


def test_pack_sequences_is_differentiable():
    rows = [torch.randn(n, 3, requires_grad=True) for n in (2, 0, 4)]
    packed = pack_sequences(rows)
    (packed.values[0] * torch.arange(6.0)[:, None]).sum().backward()
    assert rows[2].grad[:, 0].tolist() == [2, 3, 4, 5]


def test_one_long_sequence_among_short_ones():
    lengths = torch.tensor([1, 70_000, 0])
    mask = torch.arange(70_000)[None] < lengths[:, None]
    source = torch.randn(3, 70_000)
    packed = pack([source], mask)
    assert packed.max_seqlen == 70_000 and torch.equal(packed.values[0], source[mask])
    assert torch.equal(unpack(packed.values[0], packed), source * mask)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefix", "scattered"])
def test_results_that_bypass_the_caches(kind):
    """From 16 MiB on; rows of odd widths begin and end anywhere in a cache line."""
    mask = random_mask(9, 900, 4, kind)
    for dtype, width in ((torch.float32, 1237), (torch.bfloat16, 2051), (torch.int8, 5003)):
        source = torch.randint(-99, 99, (9, 900, width), dtype=torch.int8).to(dtype)
        packed = pack([source], mask, capacity=9 * 900)
        total = int(mask.sum())
        assert torch.equal(packed.values[0][:total], source[mask])
        assert packed.values[0][total:].eq(0).all()
        padded = unpack(packed.values[0], packed)
        assert torch.equal(padded, torch.where(mask[..., None], source, 0))
        part = pack([source[..., 1:-1]], mask)  # rows that do not touch
        assert torch.equal(part.values[0], source[..., 1:-1][mask])


def test_large_results_are_ordinary_tensors():
    mask = torch.ones(1, 3000, dtype=torch.bool)
    source = torch.randn(1, 3000, 512)
    first = pack([source], mask).values[0]
    address = first.data_ptr()
    other = pack([source * 2], mask).values[0]
    assert torch.equal(first, source[0]) and torch.equal(other, source[0] * 2)
    del first
    again = pack([source * 3], mask).values[0]
    assert again.data_ptr() == address and torch.equal(again, source[0] * 3)  # its memory is reused
    assert torch.equal(again.resize_(1000, 512), source[0, :1000] * 3)
    assert torch.equal(torch.utils.data.default_convert(other).share_memory_(), source[0] * 2)


def test_more_tokens_than_int32_is_an_error():
    mask = torch.ones(1, 70_000, dtype=torch.bool).expand(40_000, 70_000)
    with pytest.raises(ValueError, match="2800000000 tokens do not fit cu_seqlens"):
        pack([], mask)
    with pytest.raises(ValueError, match="do not fit cu_seqlens"):
        pack_sequences([range(2**31)])


def test_errors_name_what_is_wrong():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="shifted and requires a gradient"):
        pack([torch.zeros(2, 3, requires_grad=True)], mask, shifted=[0])
    with pytest.raises(ValueError, match="sequence 1 has length 2 in field 1 and 1 in field 0"):
        pack_sequences([[1], [2]], [[1], [2, 3]])
    with pytest.raises(ValueError, match=r"pack_sequences: fields\[1\] is on meta, fields\[0\] on"):
        pack_sequences([[1]], [torch.zeros(1, device="meta")])
    with pytest.raises(ValueError, match="expected 6 rows"):
        unpack(torch.zeros(5), pack([], mask))
    with pytest.raises(ValueError, match="1 fill_values for 2 tensors"):
        pack([torch.zeros(2, 3)] * 2, mask, fill_values=[0])
    bytes_ = torch.zeros(2, 3, dtype=torch.uint8)
    for value in (-100, 256, 0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"pack: fill_values\[0\] is .*uint8 does not hold"):
            pack([bytes_], mask, fill_values=[value])
        with pytest.raises(ValueError, match=r"unpack: padding_value is .*uint8 does not hold"):
            unpack(torch.zeros(6, dtype=torch.uint8), pack([], mask), padding_value=value)
    with pytest.raises(ValueError, match=r"fill_values\[0\] is -100.0, which torch.uint8 does not"):
        pack([bytes_], mask, shifted=[0])
    with pytest.raises(ValueError, match="complex128"):
        pack([torch.zeros(2, 3, dtype=torch.complex128)], mask)


def test_second_derivatives_go_through_both_ways():
    mask = random_mask(2, 5, 0, "scattered")
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def there_and_back(x):
        packed = pack([x], mask)
        return unpack(packed.values[0].square(), packed)

    assert torch.autograd.gradgradcheck(there_and_back, (x,))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"fills": []}, ValueError, "0 fills and 1 shifts for 1 tensors"),
        ({"shifts": [1]}, ValueError, r"shifts\[0\] is 1; expected 0 to 0"),
        ({"leading": 3}, ValueError, "leading is 3; expected 1 to 1"),
        ({"out_shape": [4]}, ValueError, r"out_shape is \[4\]; expected 3 rows, as in index"),
        ({"index": torch.tensor([0, 1, 2], device="meta")}, ValueError, "index is on meta"),
        ({"index": torch.tensor([0, 1, 6])}, IndexError, "index 6 is outside the 6 rows"),
        ({"sources": [torch.zeros(6), torch.zeros(5)]}, ValueError, "2 tensors; expected one"),
    ],
)
def test_the_native_operator_checks_its_arguments(changed, error, message):
    given = {
        "sources": [torch.zeros(6)],
        "index": torch.tensor([0, 1, 2]),
        "position_ids": None,
        "leading": 1,
        "out_shape": [3],
        "fills": [0.0],
        "shifts": [0],
    }
    with pytest.raises(error, match=message):
        native().move_rows(**{**given, **changed})
