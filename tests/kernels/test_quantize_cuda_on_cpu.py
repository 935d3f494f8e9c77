"""The CUDA kernels of block_quantize, compiled for the CPU, against the plain PyTorch reference."""

import ctypes
from pathlib import Path

import pytest
import torch

from hybridengine.kernels.block_quantize import block_quantize, block_rows, block_scales
from tests.kernels.cuda_on_cpu import compile_for_cpu
from tests.kernels.quantize_cases import DTYPES, matrix, same

# Numbers in csrc/common/dtype.h.
pytestmark = pytest.mark.slow

NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    check = Path(__file__).parent / "quantize_cuda_check.cpp"
    folder = tmp_path_factory.mktemp("quantize")
    return compile_for_cpu("strided_copy/quantize_cuda.cu", check, folder)


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wide", "nan", "zeros"])
def test_blocks_of_a_tensor(library, kind, source_dtype) -> None:
    for n, k in ((160, 264), (131, 77)):  # in groups, and element by element
        x = matrix(kind, n, k, source_dtype)
        for dtype in (torch.bfloat16, torch.float16):
            expected, scale = block_quantize(x.to(dtype), backend="reference")
            table, blocks = block_rows(x.shape)
            absmax, out = torch.zeros(len(blocks), dtype=torch.int32), torch.zeros_like(expected)
            numbers = [ctypes.c_int(NUMBERS[d]) for d in (source_dtype, dtype)]
            fixed = (pointer(table), pointer(blocks), ctypes.c_int64(len(blocks)), pointer(x))
            run = library.run_on_cpu
            assert run(*fixed, pointer(out), pointer(absmax), pointer(None), *numbers) == 0
            assert same(block_scales(absmax), scale.view(-1))
            assert run(*fixed, pointer(out), pointer(None), pointer(scale), *numbers) == 0
            assert same(out, expected)
