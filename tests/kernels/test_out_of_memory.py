"""A CPU kernel that gets no memory raises in the thread that called it."""

import ctypes
from pathlib import Path

import pytest

from tests.kernels.cuda_on_cpu import compile_check


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    source = Path(__file__).parent / "out_of_memory_check.cpp"
    folder = tmp_path_factory.mktemp("out_of_memory")
    built = compile_check(source, folder, "-std=c++20", "-fopenmp")
    built.raises_bad_alloc.restype = ctypes.c_bool
    return built


@pytest.mark.parametrize("threads", [1, 3])
def test_a_missing_buffer_is_bad_alloc(library: ctypes.CDLL, threads: int) -> None:
    assert library.raises_bad_alloc(threads)
