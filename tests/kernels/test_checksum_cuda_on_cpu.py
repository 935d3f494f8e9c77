"""The CUDA kernel of bit_checksum, compiled for the CPU, against the reference."""

import ctypes
from pathlib import Path

import pytest
import torch

from hybridengine.kernels import bit_checksum
from tests.kernels.cuda_on_cpu import compile_for_cpu

pytestmark = pytest.mark.slow

BLOCK = 1 << 15  # bytes


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    check = Path(__file__).parent / "checksum_cuda_check.cpp"
    built = compile_for_cpu("checksum/checksum_cuda.cu", check, tmp_path_factory.mktemp("checksum"))
    built.run_on_cpu.restype = ctypes.c_int64
    return built


@pytest.mark.parametrize("offset", [0, 4, 8, 12])
@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 5, 15, 16, 31, 127, 4099, BLOCK, BLOCK + 1, 3 * BLOCK + 77, (1 << 20) + 6]
)
def test_the_kernel_gives_the_checksum(library, size, offset):
    """offset: of the first byte from an address that is a multiple of 16."""
    generator = torch.Generator().manual_seed(size)
    memory = torch.randint(256, (size + 32,), dtype=torch.uint8, generator=generator)
    start = (offset - memory.data_ptr()) % 16
    for data in (memory[start : start + size], memory[start : start + size].fill_(255)):
        got = library.run_on_cpu(ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(size))
        assert got == bit_checksum(data, backend="reference"), (size, offset)
