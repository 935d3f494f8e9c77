"""strided_copy against as_strided + copy_, for every dtype pair and on hostile tables."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import strided_copy
from tests.kernels.copy_cases import row, slices

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits(tensor):
    """Compare bits, not values; NaNs of one dtype count as one value."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    clean = tensor.masked_fill(tensor.isnan(), 0) if tensor.is_floating_point() else tensor
    return clean.view(integer[tensor.element_size()]), tensor != tensor


def assert_same_as_reference(sources, destinations, table, device):
    expected = [d.clone() for d in destinations]
    strided_copy(sources, expected, table, backend="reference")
    got = [d.to(device) for d in destinations]
    strided_copy([s.to(device) for s in sources], got, table)
    for e, g in zip(expected, got, strict=True):
        for expected_part, got_part in zip(bits(e), bits(g.cpu()), strict=True):
            assert torch.equal(expected_part, got_part)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(st.lists(slices(), min_size=0, max_size=6), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_any_table(device, drawn, src_dtype, dst_dtype):
    sources = [torch.randn(20_000).to(src_dtype), torch.randn(20_000).to(src_dtype)]
    destinations = [torch.zeros(60_000, dtype=dst_dtype)]
    rows, place = [], 0
    for i, (size, src_stride, dst_stride, src_offset, gap) in enumerate(drawn):
        rows.append(row(i % 2, 0, src_offset, place + gap, size, src_stride, dst_stride))
        place += gap + torch.Size(size).numel()
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 16)
    assert_same_as_reference(sources, destinations, table, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", FLOATS)
def test_casts_are_torchs(src_dtype, dst_dtype, device):
    """Every bfloat16 bit pattern, its neighbours in float32, and the ends of every range."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    nearby = torch.cat([(patterns << 16) + delta for delta in (0, 1, 0x7FFF, 0x8000, 0x8001)])
    source = nearby.view(torch.float32).to(src_dtype)
    if src_dtype == torch.float16:
        source = patterns.to(torch.int16).view(torch.float16)
    table = torch.tensor([row(0, 0, 0, 0, [len(source)], [1], [1])])
    destination = torch.zeros(len(source), dtype=dst_dtype)
    expected = source.to(dst_dtype)
    destination, source = destination.to(device), source.to(device)
    strided_copy([source], [destination], table)
    for expected_part, got_part in zip(bits(expected), bits(destination.cpu()), strict=True):
        assert torch.equal(expected_part, got_part)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("src_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_keeps_its_payload_in_float16(src_dtype, stride):
    """In vectors, in what remains after them, and strided; also torch's own cast, given F16C."""
    patterns = torch.arange(1, 1024, dtype=torch.int32) << 13
    patterns = torch.cat([patterns, patterns - 1, patterns[:9] >> 9]) | 0x7F800000
    patterns = torch.cat([patterns, patterns | -(2**31)])
    source = patterns.view(torch.float32).to(src_dtype).repeat_interleave(stride)
    assert source.isnan().all()
    kept = source[::stride].float().view(torch.int32)
    expected = ((kept >> 16) & 0x8000) | 0x7E00 | ((kept >> 13) & 0x1FF)
    destination = torch.zeros(len(kept), dtype=torch.float16)
    table = torch.tensor([row(0, 0, 0, 0, [len(kept)], [stride], [1])])
    strided_copy([source], [destination], table)
    assert torch.equal(destination.view(torch.int16), expected.short())
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert torch.equal(source[::stride].half().view(torch.int16), expected.short())


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("dst_dtype", [torch.float32, torch.float64])
def test_nan_of_float16_keeps_its_payload(dst_dtype, stride):
    """It becomes quiet. Torch's own cast gives several values, by the layout of the tensor."""
    patterns = torch.arange(0x7C01, 0x8000, dtype=torch.int32)
    patterns = torch.cat([patterns, patterns - 0x8000]).repeat_interleave(stride)
    kept = patterns[::stride]
    expected = (kept & -(2**31)) | 0x7FC00000 | ((kept & 0x3FF) << 13)
    destination = torch.zeros(len(kept), dtype=dst_dtype)
    table = torch.tensor([row(0, 0, 0, 0, [len(kept)], [stride], [1])])
    strided_copy([patterns.short().view(torch.float16)], [destination], table)
    got, wanted = (
        destination.view(torch.int64 if dst_dtype.itemsize == 8 else torch.int32),
        expected,
    )
    if dst_dtype == torch.float64:
        wanted = expected.view(torch.float32).double().view(torch.int64)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.int8, torch.bool, torch.int32, torch.float8_e4m3fn))
def test_other_dtypes_copy_their_bytes(dtype, device):
    source = torch.randint(0, 2, (100, 7)).to(dtype)
    destination = torch.zeros(253).to(dtype).to(device)
    table = torch.tensor([row(0, 0, 1, 3, [50, 5], [14, 1], [5, 1])])
    strided_copy([source.to(device)], [destination], table)
    got = destination.cpu().float()[3:].reshape(50, 5)
    assert torch.equal(got, source.float()[::2, 1:6])


@pytest.mark.parametrize("device", DEVICES)
def test_views_start_at_their_own_first_element(device):
    base = torch.arange(100.0)
    out = torch.zeros(50)
    table = torch.tensor([row(0, 0, 2, 1, [3], [1], [1])])
    assert_same_as_reference([base[10:]], [out[5:]], table, device)
    out = out.to(device)
    strided_copy([base.to(device)[10:]], [out[5:]], table)
    assert out[6:9].tolist() == [12.0, 13.0, 14.0]


@pytest.mark.parametrize("device", DEVICES)
def test_one_long_row_among_short_ones(device):
    """The work is split over chunks, not over rows."""
    source = torch.randn(300_001)
    rows = [row(0, 0, i, i, [1], [1], [1]) for i in range(5)]
    rows += [row(0, 0, 5, 5, [0], [1], [1])]  # nothing
    rows += [row(0, 0, 5, 5, [300_001 - 5], [1], [1])]
    assert_same_as_reference(
        [source], [torch.zeros(300_001, dtype=torch.bfloat16)], torch.tensor(rows), device
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("src_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "slice_row",
    [
        row(0, 0, 3, 1, [50_001], [1], [1]),  # not aligned
        row(0, 0, 0, 16, [3, 16_400], [16_400, 1], [16_416, 1]),  # runs longer than a chunk
        row(0, 0, 0, 0, [1563, 16], [32, 1], [16, 1]),  # many short runs
        row(0, 0, 1, 0, [7, 11, 13, 17], [2431, 221, 17, 1], [17, 2023, 119, 1]),  # permuted
        row(0, 0, 0, 0, [150, 200], [1, 150], [200, 1]),  # transposed
    ],
)
def test_slices_of_several_chunks(slice_row, src_dtype, device):
    source = torch.randn(60_000, generator=torch.Generator().manual_seed(0)).to(src_dtype)
    destination = torch.zeros(60_000, dtype=torch.bfloat16)
    assert_same_as_reference([source], [destination], torch.tensor([slice_row]), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("src_dtype", (torch.float32, torch.bfloat16))
def test_adjacent_rows_that_read_the_same(src_dtype, dst_dtype, device):
    """They share their chunks, however their sizes are written and wherever they write."""
    whole, turned = [200, 1], [1, 150]  # strides of two orders of the same 30,000 elements
    rows = [
        row(0, 0, 5, 0, [30_000], [1], [1]),
        row(0, 1, 5, 3, [150, 200], whole, [210, 1]),
        row(0, 2, 5, 0, [150, 200], whole, [1, 150]),
        row(0, 0, 5, 30_001, [150, 4, 50], [200, 50, 1], [200, 50, 1]),
        row(0, 1, 5, 40_000, [200, 150], turned, [150, 1]),  # another order
        row(0, 2, 5, 40_000, [200, 150], turned, [1, 200]),
        row(1, 0, 5, 70_000, [200, 150], turned, [150, 1]),  # of another tensor
        row(1, 1, 5, 80_000, [200, 149], turned, [149, 1]),  # less of it
        row(1, 2, 6, 80_000, [200, 149], turned, [149, 1]),
    ]
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(30_006, generator=generator).to(src_dtype) for _ in range(2)]
    destinations = [torch.full((120_000,), 7.0, dtype=dst_dtype) for _ in range(3)]
    assert_same_as_reference(sources, destinations, torch.tensor(rows), device)
    large = [row(0, i, 0, i, [3_000_000], [0], [1]) for i in range(3)]  # past the caches
    destinations = [torch.full((3_000_003,), 7.0, dtype=dst_dtype) for _ in range(3)]
    assert_same_as_reference(sources, destinations, torch.tensor(large), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dst_dtype", FLOATS)
@pytest.mark.parametrize("widths", [(100, 1, 299), (16, 384), (1, 2, 397), (200, 200)])
def test_slices_side_by_side(widths, dst_dtype, device):
    """Their runs are read in turn, through several chunks, wherever each slice is written."""
    height, stride, begin, rows = 151, 401, 7, []
    for number, width in enumerate(widths):
        size, reads = [height, width], [stride, 1]
        packed = 70_000 * (number % 2)
        rows.append(row(0, 0, begin, packed + begin * height, size, reads, [width, 1]))
        if number != 1:  # a second destination, transposed
            rows.append(row(0, 1, begin, begin * height, size, reads, [1, height]))
        if width == 299:  # a third, in parts of the runs
            parts = [23, height * 23, 1]
            rows.append(row(0, 2, begin, 0, [height, 13, 23], [stride, 23, 1], parts))
        begin += width
    rows += [
        row(0, 3, begin, 5, [height - 2, 3], [stride, 1], [3, 1]),  # fewer runs
        row(1, 3, begin + 3, 1_000, [height - 2, 3], [stride, 1], [3, 1]),  # of another tensor
        row(1, 3, begin + 6, 2_000, [3], [1], [1]),  # one run
        row(1, 3, begin + 9, 3_000, [3], [2], [1]),
        row(1, 3, begin + 12, 4_000, [3], [2], [1]),
    ]
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(height * stride + 30, generator=generator) for _ in range(2)]
    destinations = [torch.full((150_000,), 7.0, dtype=dst_dtype) for _ in range(4)]
    assert_same_as_reference(sources, destinations, torch.tensor(rows), device)


@pytest.mark.parametrize("device", DEVICES)
def test_slices_side_by_side_that_bypass_the_caches(device):
    source = torch.randn(1_200, generator=torch.Generator().manual_seed(0))
    rows = [row(0, i, i * 300, i, [9_000, 300], [0, 1], [301, 1]) for i in range(4)]
    destinations = [torch.full((2_710_000,), 7.0, dtype=torch.bfloat16) for _ in rows]
    assert_same_as_reference([source], destinations, torch.tensor(rows), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dst_dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("src_dtype", (torch.float32, torch.bfloat16))
def test_results_that_bypass_the_caches(src_dtype, dst_dtype, device):
    """So many chunks that they are streamed: rows that begin and end anywhere in a cache line."""
    lengths = [127, 128, 129, 256, 257, 700, 1024, 1025, 2049, 2080] * 60
    rows, end = [], 3
    for number, length in enumerate(lengths):
        rows.append(row(0, 0, number, end, [length], [1], [1]))
        end += length + number % 3  # what lies between rows stays
    source = torch.randn(4_000, generator=torch.Generator().manual_seed(0)).to(src_dtype)
    destination = torch.full((end + 9,), 7.0, dtype=dst_dtype)
    assert_same_as_reference([source], [destination], torch.tensor(rows), device)


def test_an_empty_table_moves_nothing():
    out = torch.zeros(3)
    strided_copy([torch.ones(3)], [out], torch.empty(0, 16, dtype=torch.int64))
    strided_copy([], [], torch.empty(0, 16, dtype=torch.int64))
    assert out.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("bad_row", "named"),
    [
        (row(0, 0, 98, 0, [3], [1], [1]), r"row 1 reaches element 100 of sources\[0\].* 100 el"),
        (row(0, 0, 0, 98, [3], [1], [1]), r"row 1 reaches element 100 of destinations\[0\]"),
        (row(0, 0, -1, 0, [3], [1], [1]), r"row 1 of sources\[0\] begins at element -1"),
        (row(0, 0, 50, 0, [3], [-1], [1]), r"must not be negative"),
        (row(1, 0, 0, 0, [3], [1], [1]), r"row 1 names sources\[1\], but there are 1"),
        (row(0, 2, 0, 0, [3], [1], [1]), r"row 1 names destinations\[2\], but there are 1"),
    ],
)
def test_a_row_outside_its_tensor_is_refused_before_anything_moves(bad_row, named):
    good = row(0, 0, 0, 0, [3], [1], [1])
    out = torch.zeros(100)
    with pytest.raises(IndexError, match=named):
        strided_copy([torch.ones(100)], [out], torch.tensor([good, bad_row]))
    assert not out.any()


FAR = 2**63 - 1  # what wraps around in 64 bits


@pytest.mark.parametrize("backend", (None, "reference"))
@pytest.mark.parametrize(
    "bad_row",
    [
        row(0, 0, FAR - 1, 0, [3], [1], [1]),
        row(0, 0, 0, FAR - 1, [3], [1], [1]),
        row(0, 0, FAR, 0, [2], [FAR], [1]),
        row(0, 0, 0, 0, [3], [2**62], [1]),
        row(0, 0, 0, 0, [5], [2**62], [1]),  # 4 * 2^62 is 0
        row(0, 0, 0, 0, [2, 2], [2**62, 1], [2, 1]),
        row(0, 0, 0, 0, [2, 2, 2, 2], [FAR] * 4, [8, 4, 2, 1]),
        row(0, 0, 1, 0, [2, 2], [FAR, FAR], [2, 1]),  # 1 + 2 (2^63 - 1) is -1
        row(0, 0, 0, 0, [2**32, 2**32], [2**31, 2**31], [0, 0]),
        row(0, 0, 0, 0, [3], [1], [2**62]),
        row(2**31 - 1, 0, 0, 0, [3], [1], [1]),
        row(0, 2**31 - 1, 0, 0, [3], [1], [1]),
        row(2**40, 0, 0, 0, [3], [1], [1]),
        row(-1, 0, 0, 0, [3], [1], [1]),
        row(0, -1, 0, 0, [3], [1], [1]),
    ],
)
def test_numbers_that_wrap_around_are_refused(bad_row, backend):
    out = torch.zeros(100)
    with pytest.raises((IndexError, ValueError), match="strided_copy: row 0 "):
        strided_copy([torch.ones(100)], [out], torch.tensor([bad_row]), backend=backend)
    assert not out.any()


def test_sizes_whose_product_wraps_around_are_refused():
    rows = [row(0, 0, 0, 0, [2**31, 2**31, 4], [0, 0, 0], [0, 0, 0])]
    with pytest.raises(ValueError, match=r"row 0 has, with those before it, more than 2.60 elem"):
        strided_copy([torch.ones(1)], [torch.zeros(1)], torch.tensor(rows))
    rows = [row(0, 0, 0, 0, [2**30, 2**30], [0, 0], [2**30, 1])] * 2
    with pytest.raises(ValueError, match=r"row 1 has, with those before it, more than 2.60 elem"):
        strided_copy([torch.ones(1)], [torch.zeros(1)], torch.tensor(rows))


def test_a_stride_of_a_dimension_of_one_does_not_matter():
    rows = [row(0, 0, 0, 0, [1, 3], [FAR, 1], [FAR, 1]), row(0, 0, FAR, FAR, [0], [FAR], [FAR])]
    out = torch.zeros(3)
    strided_copy([torch.ones(3)], [out], torch.tensor(rows))
    assert out.tolist() == [1.0, 1.0, 1.0]


def test_wrong_arguments_are_named():
    table = torch.tensor([row(0, 0, 0, 0, [3], [1], [1])])
    x, y = torch.ones(3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"table has shape \[1, 15\]"):
        strided_copy([x], [y], table[:, :15].contiguous())
    with pytest.raises(ValueError, match="size -3 in dimension 3"):
        strided_copy([x], [y], torch.tensor([row(0, 0, 0, 0, [-3], [1], [1])]))
    with pytest.raises(ValueError, match=r"sources\[1\] has dtype"):
        strided_copy([x, x.double()], [y], table)
    with pytest.raises(ValueError, match="no cast from"):
        strided_copy([x.int()], [y], table)
    with pytest.raises(ValueError, match=r"destinations\[0\] is on meta, sources\[0\] on cpu"):
        strided_copy([x], [y.to("meta")], table)
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo; expected a dense tensor"):
        strided_copy([x.to_sparse()], [y], table)
