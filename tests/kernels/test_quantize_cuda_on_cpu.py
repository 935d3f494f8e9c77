"""The CUDA kernels of block_quantize, compiled for the CPU, against the plain PyTorch reference."""

import ctypes
from pathlib import Path

import pytest
import torch

from hybridengine.kernels.block_quantize import block_quantize, block_scales
from tests.kernels.copy_cases import row
from tests.kernels.cuda_on_cpu import compile_for_cpu
from tests.kernels.quantize_cases import DTYPES, matrix, same

pytestmark = pytest.mark.slow

# Numbers in csrc/common/dtype.h.
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    check = Path(__file__).parent / "quantize_cuda_check.cpp"
    folder = tmp_path_factory.mktemp("quantize")
    return compile_for_cpu("strided_copy/quantize_cuda.cu", check, folder)


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


def rows_of_blocks(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table of the blocks of a matrix, as slices, and their numbers."""
    rows = [
        row(0, 0, i * k + j, i * k + j, [min(128, n - i), min(128, k - j)], [k, 1], [k, 1])
        for i in range(0, n, 128)
        for j in range(0, k, 128)
    ]
    return torch.tensor(rows), torch.arange(len(rows))


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wide", "nan", "zeros"])
def test_slices_of_a_tensor(library, kind, source_dtype) -> None:
    for n, k in ((160, 264), (131, 77)):  # in groups, and element by element
        x = matrix(kind, n, k, source_dtype)
        for dtype in (torch.bfloat16, torch.float16):
            expected, scale = block_quantize(x.to(dtype), backend="reference")
            table, blocks = rows_of_blocks(n, k)
            absmax, out = torch.zeros(len(blocks), dtype=torch.int32), torch.zeros_like(expected)
            numbers = [ctypes.c_int(NUMBERS[d]) for d in (source_dtype, dtype)]
            fixed = (pointer(table), pointer(blocks), ctypes.c_int64(len(blocks)), pointer(x))
            run = library.run_on_cpu
            assert run(*fixed, pointer(out), pointer(absmax), pointer(None), *numbers) == 0
            assert same(block_scales(absmax), scale.view(-1))
            assert run(*fixed, pointer(out), pointer(None), pointer(scale), *numbers) == 0
            assert same(out, expected)


def assert_equals_the_reference(library, x: torch.Tensor) -> None:
    """In one read: whole matrices [M, N, K]."""
    expected, scale = block_quantize(x, backend="reference")
    out, scales = torch.full_like(expected, 7.0), torch.full_like(scale, -1.0)
    sizes = [ctypes.c_int64(size) for size in x.shape]
    dtype = ctypes.c_int(NUMBERS[x.dtype])
    assert library.quantize_on_cpu(pointer(x), *sizes, pointer(out), pointer(scales), dtype) == 0
    assert same(scales, scale) and same(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wide", "nan", "infinite", "zeros", "denormals", "midpoints"])
def test_matrices(library, kind, dtype) -> None:
    for n, k in ((128, 128), (160, 264), (131, 77), (1, 8), (3, 1)):
        x = torch.stack([matrix(kind, n, k, dtype), matrix("normal", n, k, dtype)])
        assert_equals_the_reference(library, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [128, 127])
def test_every_16_bit_value(library, dtype, columns) -> None:
    """In order, so that scales fit, and shuffled; as multiples of 448 and in groups or not."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = values[values.isfinite()]
    by_magnitude = finite[finite.abs().float().argsort()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]
    small = shuffled[shuffled.abs() <= 448]
    one_scale = small.clone()
    one_scale[:: columns * 64] = 448  # in every block: the values themselves are rounded
    for x in (values, by_magnitude, shuffled, one_scale):
        whole = len(x) // columns * columns
        rest = torch.cat([x[whole:], x[: columns - len(x) + whole]])
        assert_equals_the_reference(library, torch.cat([x[:whole], rest]).view(1, -1, columns))


def test_a_weight_that_is_not_aligned(library) -> None:
    x = matrix("normal", 130, 136, torch.bfloat16)
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(1, *x.shape)
    shifted.copy_(x)
    assert_equals_the_reference(library, shifted)
