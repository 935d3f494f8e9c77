"""The CUDA kernel of strided_copy, compiled for the CPU, against as_strided + copy_."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.kernels import strided_copy
from tests.kernels.copy_cases import row
from tests.kernels.cuda_on_cpu import compile_for_cpu

# Dtypes and their numbers in csrc/common/dtype.h.
pytestmark = pytest.mark.slow

KINDS = (
    (torch.float32, torch.bfloat16, 0, 2),
    (torch.bfloat16, torch.float32, 2, 0),
    (torch.float64, torch.float16, 3, 1),
    (torch.uint8, torch.uint8, 4, 4),
    (torch.bfloat16, torch.bfloat16, 5, 5),
)
SPACE = 60_000


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    check = Path(__file__).parent / "strided_copy_cuda_check.cpp"
    folder = tmp_path_factory.mktemp("strided_copy")
    return compile_for_cpu("strided_copy/strided_copy_cuda.cu", check, folder)


def assert_copies(library, rows, kind):
    generator = torch.Generator().manual_seed(0)
    src_dtype, dst_dtype, *numbers = KINDS[kind]
    source = (torch.randn(SPACE, generator=generator) * 50).to(src_dtype)
    expected = torch.zeros(SPACE, dtype=dst_dtype)
    got = expected.clone()
    table = torch.tensor(rows)
    strided_copy([source], [expected], table, backend="reference")
    error = library.run_on_cpu(
        *(ctypes.c_void_p(table.data_ptr()), ctypes.c_int64(len(rows))),
        *(ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(got.data_ptr())),
        *(ctypes.c_int(number) for number in numbers),
    )
    assert error == 0
    assert torch.equal(got, expected)


@st.composite
def slices(draw):
    """Up to four dimensions, aligned to 16 elements or not, of up to three chunks."""
    unit = draw(st.sampled_from((1, 8, 16)))
    size = [draw(st.integers(1, 40 if unit == 1 else 12)) * unit]
    stride, place = [1], size[0]
    for _ in range(draw(st.integers(0, 3))):
        place += draw(st.integers(0, 2)) * unit
        if place > SPACE // 6:
            break
        size.insert(0, draw(st.integers(1, min(400, SPACE // 2 // place))))
        stride.insert(0, place)
        place *= size[0]
    dense = [1] * len(size)
    for i in range(len(size) - 2, -1, -1):
        dense[i] = dense[i + 1] * size[i + 1]
    offset = draw(st.integers(0, 3)) * unit
    if draw(st.booleans()):
        stride, dense = dense, stride
    return row(0, 0, offset, draw(st.integers(0, 3)) * unit, size, stride, dense)


@settings(deadline=None, max_examples=60)
@given(slices(), st.sampled_from(range(len(KINDS))))
def test_any_slice(library, drawn, kind):
    assert_copies(library, [drawn], kind)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize(
    "slice_row",
    [
        row(0, 0, 0, 0, [50_000], [1], [1]),  # one run over chunks
        row(0, 0, 3, 1, [50_001], [1], [1]),  # not aligned
        row(0, 0, 0, 16, [3, 16_400], [16_400, 1], [16_416, 1]),  # runs longer than a chunk
        row(0, 0, 0, 0, [1563, 16], [32, 1], [16, 1]),  # many short runs
        row(0, 0, 1, 0, [7, 11, 13, 17], [2431, 221, 17, 1], [17, 2023, 119, 1]),  # permuted
        row(0, 0, 0, 0, [150, 200], [1, 150], [200, 1]),  # transposed
        row(0, 0, 0, 0, [20_000, 2], [2, 1], [3, 1]),
    ],
)
def test_slices_over_blocks(library, slice_row, kind):
    assert_copies(library, [slice_row], kind)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_table_of_rows(library, kind):
    rows = [row(0, 0, 8 * i, 48 * i, [5, 8], [64, 1], [8, 1]) for i in range(20)]
    rows.insert(7, row(0, 0, 0, 1000, [40_000], [1], [1]))
    assert_copies(library, rows, kind)
