"""The CUDA kernels of ChangeTable and of gaps, compiled for the CPU, against the reference."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels.delta import decode_gaps, encode_gaps
from tests.kernels.copy_cases import row, slices
from tests.kernels.cuda_on_cpu import compile_for_cpu
from tests.kernels.delta_cases import GAPS, changes_of, positions_of, reference_table

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def gaps_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gaps")
    library = compile_for_cpu("delta/gaps_cuda.cu", HERE / "gaps_cuda_check.cpp", folder)
    library.encode_on_cpu.restype = library.decode_on_cpu.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="module")
def table_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    library = compile_for_cpu("delta/changes_cuda.cu", HERE / "delta_cuda_check.cpp", folder)
    library.follow_on_cpu.restype = ctypes.c_int64
    return library


def address(tensor):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def assert_gaps(library, positions, start):
    """Also with the widths that encode_gaps does not choose, where they have a bounded size."""
    (expected, best), count = encode_gaps(positions, start, backend="reference"), len(positions)
    for width in (1, 2, 3):
        numbers = (ctypes.c_int64(count), ctypes.c_int64(start), ctypes.c_int(width))
        size = library.encode_on_cpu(address(positions), *numbers, None)
        assert width != best or size == len(expected)
        if size > 4 * len(expected) + 100_000:
            continue
        gaps = torch.zeros(size, dtype=torch.uint8)
        library.encode_on_cpu(address(positions), *numbers, address(gaps))
        assert width != best or torch.equal(gaps, expected)
        decoded = torch.full((count + 2,), -7)
        found = library.decode_on_cpu(
            address(gaps),
            ctypes.c_int64(size // width),
            ctypes.c_int64(start),
            ctypes.c_int64(count),
            ctypes.c_int(width),
            address(decoded),
        )
        assert found == count and torch.equal(decoded[:count], positions)
        assert decoded[count:].tolist() == [-7, -7], "nothing is written past the end"
        again = decode_gaps(gaps, width, start, int(positions[-1]) + 1, count, backend="reference")
        assert torch.equal(again, positions)


@settings(deadline=None, max_examples=15)
@given(drawn=GAPS.filter(lambda drawn: len(drawn[0])))
def test_gaps(gaps_library, drawn):
    assert_gaps(gaps_library, *drawn)


@pytest.mark.parametrize("kind", ["uniform", "regular", "crowded"])
def test_gaps_of_several_chunks(gaps_library, kind):
    assert_gaps(gaps_library, positions_of(kind, 3_000_000, 0.004), 0)


def test_a_wrong_count_writes_nothing_past_the_end(gaps_library):
    gaps, width = encode_gaps(torch.arange(0, 60_000, 6))
    positions = torch.full((9_002,), -7)
    found = gaps_library.decode_on_cpu(
        address(gaps),
        ctypes.c_int64(len(gaps)),
        ctypes.c_int64(0),
        ctypes.c_int64(9_000),
        ctypes.c_int(width),
        address(positions),
    )
    assert found == 10_000 and positions[9_000:].tolist() == [-7, -7]


def entries(rows):
    """Rows of a table as `ChangeRow` of csrc has them."""
    ends = rows[:, 2] + ((rows[:, 4:8] - 1) * rows[:, 8:12]).sum(1) + 1
    number = rows[:, 0] + (rows[:, 1] << 32)
    return torch.cat([rows[:, 2:], ends[:, None], number[:, None]], 1).contiguous()


def assert_followed(library, table, indices, values, size):
    reference = reference_table(table)
    lists = [
        [i.data_ptr(), v.data_ptr(), len(i), i.dtype == torch.int64]
        for i, v in zip(indices, values, strict=True)
    ]
    rows, lists = entries(reference.rows), torch.tensor(lists, dtype=torch.int64)

    def follow(destination, positions, mapped):
        return library.follow_on_cpu(
            address(rows),
            ctypes.c_int64(len(rows)),
            address(lists),
            ctypes.c_int64(len(lists)),
            address(destination),
            address(positions),
            address(mapped),
        )

    got, expected = torch.zeros(2, size, dtype=torch.bfloat16).unbind()
    pairs = follow(got, None, None)
    reference.scatter(indices, values, [expected])
    assert torch.equal(got, expected)
    positions, mapped = torch.full((pairs,), -2), torch.zeros(pairs, dtype=torch.bfloat16)
    follow(None, positions, mapped)
    assert -2 not in positions
    positions, order = positions.sort()
    here = positions >= 0
    for ours, theirs in zip(
        (positions[here], mapped[order][here]), reference.map(indices, values), strict=True
    ):
        assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(drawn=st.lists(slices(), min_size=1, max_size=6), share=st.floats(0, 1), wide=st.booleans())
def test_a_table(table_library, drawn, share, wide):
    table, _, indices, values = changes_of(drawn, share, wide)
    assert_followed(table_library, table, indices, values, 80_000)


def test_more_pairs_than_blocks_take_at_a_time(table_library):
    """And rows without changes between those that have some."""
    size = 1024 * 2048 + 5000
    rows = [row(0, 0, 0, 0, [size], [1], [1]), row(1, 0, 0, size, [7], [1], [1])]
    rows += [row(0, 0, i, size + 7 + i, [1], [1], [1]) for i in range(3)]
    indices = [torch.arange(size, dtype=torch.int32), torch.empty(0, dtype=torch.int32)]
    values = [torch.randn(size).bfloat16(), torch.empty(0, dtype=torch.bfloat16)]
    assert_followed(table_library, torch.tensor(rows), indices, values, size + 10)
